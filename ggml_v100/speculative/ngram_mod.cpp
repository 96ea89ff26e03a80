// Filling and reading the pool.
#include "speculative/ngram_mod.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

constexpr size_t kPool = size_t{4} << 20;  // tokens: 16 MiB
constexpr size_t kMostUsed = kPool / 4;    // beyond, most lookups collide
constexpr size_t kNewTokens = 32;          // that a history has grown by before they are taken in
constexpr int32_t kBadRounds = 5;          // in a row, after which the pool is given up
constexpr uint64_t kMultiplier = 6364136223846793005u;

}  // namespace

NgramMod::NgramMod(NgramModParams params) : params_(params) {
  const auto check = [](const char* what, int32_t value, int32_t least) {
    if (value < least || value > 1024)
      throw InvalidArgument(std::string("ngram-mod: ") + what + " is " + std::to_string(value) + ", expected " +
                            std::to_string(least) + " to 1024");
  };
  check("n match", params.n_match, 1);
  check("n min", params.n_min, 0);
  check("n max", params.n_max, 0);
  pool_.assign(kPool, -1);
}

size_t NgramMod::slot_of(std::span<const int32_t> ngram) const {
  uint64_t hash = 0;
  for (const int32_t token : ngram) hash = hash * kMultiplier + static_cast<uint64_t>(static_cast<int64_t>(token));
  return static_cast<size_t>(hash % kPool);
}

void NgramMod::clear() {
  std::fill(pool_.begin(), pool_.end(), -1);
  n_used_ = 0;
}

void NgramMod::insert(Sequence& sequence, std::span<const int32_t> history) {
  const auto n = static_cast<size_t>(params_.n_match);
  for (size_t at = std::max(sequence.inserted, n); at < history.size(); ++at) {
    int32_t& next = pool_[slot_of(history.subspan(at - n, n))];
    n_used_ += next < 0;
    next = history[at];
  }
  sequence.inserted = history.size();
}

void NgramMod::begin(int32_t sequence, std::span<const int32_t> history) {
  Sequence& s = sequences_[sequence];
  s = {};
  insert(s, history);
  if (n_used_ > kMostUsed) clear();
}

void NgramMod::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const auto n = static_cast<size_t>(params_.n_match);
  for (size_t i = 0; i < requests.size(); ++i) {
    const DraftRequest& request = requests[i];
    Sequence& sequence = sequences_[request.sequence];
    sequence.inserted = std::min(sequence.inserted, request.history.size());  // it was cut
    if (request.history.size() >= sequence.inserted + kNewTokens) insert(sequence, request.history);
    sequence.n_drafted = 0;
    if (request.history.size() + 1 < n) continue;
    const auto tail = request.history.last(n - 1);
    std::vector<int32_t> text(tail.begin(), tail.end());
    text.push_back(request.last);
    while (text.size() - n < static_cast<size_t>(params_.n_max)) {
      const int32_t next = pool_[slot_of(std::span(text).last(n))];
      if (next < 0) break;
      text.push_back(next);
    }
    if (text.size() - n < static_cast<size_t>(std::max(params_.n_min, 1))) continue;
    drafts[i].tokens.assign(text.begin() + static_cast<ptrdiff_t>(n), text.end());
    sequence.n_drafted = drafts[i].tokens.size();
  }
}

void NgramMod::accept(int32_t sequence, int32_t n_accepted, bool is_other) {
  Sequence& s = sequences_[sequence];
  if (is_other || s.n_drafted == 0) return;
  if (4 * static_cast<size_t>(n_accepted) >= s.n_drafted) {
    s.n_bad_rounds = 0;
  } else if (++s.n_bad_rounds >= kBadRounds) {
    clear();
    s.n_bad_rounds = 0;
  }
}

}  // namespace v100
