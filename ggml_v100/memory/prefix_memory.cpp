// Reuse in two parts: a plan that changes nothing, then its execution, which keeps what would be lost before it is lost.
#include "memory/prefix_memory.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

int32_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const auto n = static_cast<ptrdiff_t>(std::min(a.size(), b.size()));
  return static_cast<int32_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

}  // namespace

struct PrefixMemory::Plan {
  PrefixReuse result;
  int32_t base = 0;  // sequence that gives its first `shared` tokens; pages from there on come from host memory
  int32_t shared = 0;
  int32_t end_of = -1;             // sequence whose state or window is used, or
  const std::byte* end = nullptr;  // a checkpoint
  int32_t own = 0;                 // tokens that the sequence holds already
};

PrefixMemory::PrefixMemory(PagedMemory& pages, PagedMemory* window_pages, int32_t window, StatePool& states,
                           std::vector<std::vector<int32_t>>& tokens, std::vector<AdapterScales>& scales,
                           const SequenceBytes& bytes, int64_t budget_bytes, int32_t n_checkpoints)
    : pages_(pages),
      window_pages_(window_pages),
      window_(window),
      states_(states),
      tokens_(tokens),
      scales_(scales),
      bytes_(bytes),
      cache_(budget_bytes, n_checkpoints, bytes.page_bytes(), end_bytes()),
      moved_from_(tokens.size(), kNothingMoved) {}

size_t PrefixMemory::end_bytes() const {
  // As many pages as window - 1 tokens may touch.
  const int32_t n_pages = window_pages_ == nullptr || window_ < 2 ? 0 : (window_ + kPageTokens - 3) / kPageTokens + 1;
  return bytes_.state_bytes() + static_cast<size_t>(n_pages) * bytes_.window_page_bytes();
}

int32_t PrefixMemory::first_seen(int32_t length) const { return std::max(0, length + 1 - window_); }

void PrefixMemory::read_end(int32_t sequence, std::byte* to) const {
  if (bytes_.state_bytes() > 0) bytes_.read_state(states_.slot(sequence), to);
  if (window_pages_ == nullptr) return;
  to += bytes_.state_bytes();
  const int32_t first = first_seen(window_pages_->length(sequence)) / kPageTokens;
  for (const PageId page : window_pages_->pages(sequence).subspan(static_cast<size_t>(first))) {
    bytes_.read_window_page(page, to);
    to += bytes_.window_page_bytes();
  }
}

void PrefixMemory::write_window(int32_t sequence, int32_t length, const std::byte* from) {
  const int32_t first = first_seen(length);
  window_pages_->begin_at(sequence, first, length);
  for (const PageId page : window_pages_->pages(sequence).subspan(static_cast<size_t>(first / kPageTokens))) {
    bytes_.write_window_page(page, from);
    from += bytes_.window_page_bytes();
  }
}

// The longest beginning, within `limit`, that another sequence could take over from this one, which has `common` tokens
// in common with it; 0: none.
int32_t PrefixMemory::usable(int32_t sequence, int32_t common, int32_t limit) const {
  const int32_t length = std::min(common, limit);
  if (bytes_.state_bytes() > 0 && length != pages_.length(sequence)) return 0;
  if (window_pages_ != nullptr && window_pages_->first_kept(sequence) > first_seen(length)) return 0;
  return length;
}

PrefixMemory::Plan PrefixMemory::plan(int32_t sequence, std::span<const int32_t> tokens, int32_t most,
                                      const AdapterScales& scales, const PrefixCache::Found& found) const {
  std::vector<int32_t> common;
  for (size_t s = 0; s < tokens_.size(); ++s)
    common.push_back(scales_[s] == scales ? std::min(common_prefix(tokens_[s], tokens), moved_from_[s]) : 0);
  const auto common_of = [&](int32_t s) { return common[static_cast<size_t>(s)]; };
  Plan plan;
  plan.own = common_of(sequence);
  int32_t base = sequence;
  for (int32_t s = 0; s < pages_.n_sequences(); ++s)
    if (common_of(s) > common_of(base)) base = s;
  const int32_t live = common_of(base);
  const int32_t first_host = live / kPageTokens;  // a page that live tokens fill in part is replaced by its host copy
  int32_t covered = live;
  for (auto page = static_cast<size_t>(first_host); page < found.pages.size(); ++page) {
    covered = std::max(covered, static_cast<int32_t>(page) * kPageTokens + found.pages[page].n_tokens);
    if (found.pages[page].n_tokens < kPageTokens) break;
  }
  const int32_t room = first_host + pages_.pages_to_replace(base, sequence, first_host * kPageTokens);
  const int32_t fitting = std::max(live, std::min(covered, room * kPageTokens));

  const auto longest = [&](int32_t limit) {
    limit = std::min(limit, most);
    if (end_bytes() == 0) return limit;
    int32_t best = 0;
    for (int32_t s = 0; s < pages_.n_sequences(); ++s) best = std::max(best, usable(s, common_of(s), limit));
    for (const PrefixCache::Checkpoint& checkpoint : found.checkpoints)
      if (checkpoint.position <= limit) best = std::max(best, checkpoint.position);
    return best;
  };
  const int32_t length = longest(fitting);
  plan.result.length = length;
  plan.result.matched = std::max(live, found.known);
  if (length == most)
    plan.result.limit = static_cast<size_t>(most) < tokens.size() ? "prompt" : "";
  else if (longest(covered) > length)
    plan.result.limit = "no page";
  else
    plan.result.limit = length < std::min(covered, most) ? "no checkpoint" : "not cached";

  plan.shared = length;
  plan.base = length <= plan.own ? sequence : base;
  if (end_bytes() > 0 && length > 0) {
    for (int32_t s = 0; s < pages_.n_sequences(); ++s)
      if ((plan.end_of < 0 || s == sequence) && usable(s, common_of(s), length) == length) plan.end_of = s;
    if (plan.end_of >= 0) {
      plan.base = plan.end_of;
    } else {
      plan.result.checkpoint = length;
      for (const PrefixCache::Checkpoint& checkpoint : found.checkpoints)
        if (checkpoint.position == length) plan.end = checkpoint.state;
    }
  }
  if (length > live) plan.shared = first_host * kPageTokens;
  if (length > 0) plan.result.source = length > live ? "host" : plan.base == sequence ? "own" : "other";
  return plan;
}

PrefixReuse PrefixMemory::reuse(int32_t sequence, std::span<const int32_t> tokens, int32_t most,
                                const AdapterScales& scales) {
  const int32_t held = pages_.length(sequence);
  if (most < 0 || static_cast<size_t>(most) > tokens.size())
    throw InvalidArgument("cannot reuse " + std::to_string(most) + " of " + std::to_string(tokens.size()) + " tokens");
  AdapterScales& own_scales = scales_[static_cast<size_t>(sequence)];
  AdapterScales scales_after(scales);
  cache_.begin();
  cache_.select(scales);
  const PrefixCache::Found found = cache_.find(tokens);
  const Plan plan = this->plan(sequence, tokens, most, scales, found);
  const int32_t length = plan.result.length, lost_from = std::min(length, plan.own);
  if (lost_from == held && length == held) {
    own_scales = std::move(scales_after);
    return plan.result;
  }

  const auto first = tokens.first(static_cast<size_t>(length));
  std::vector<int32_t> after(first.begin(), first.end());
  try {
    if (plan.end != nullptr && bytes_.state_bytes() > 0) bytes_.write_state(states_.begin(sequence), plan.end);
    if (lost_from < held) keep(sequence, lost_from, plan.end);
    pages_.replace(plan.base, sequence, plan.shared, length);
  } catch (...) {
    states_.abort(sequence);
    throw;
  }
  tokens_[static_cast<size_t>(sequence)] = std::move(after);
  own_scales = std::move(scales_after);
  moved_from_[static_cast<size_t>(sequence)] = kNothingMoved;
  if (plan.end != nullptr)
    states_.commit(sequence);
  else if (plan.end_of >= 0)
    states_.fork(plan.end_of, sequence);
  else
    states_.clear(sequence);
  try {
    if (window_pages_ != nullptr && plan.end != nullptr)
      write_window(sequence, length, plan.end + bytes_.state_bytes());
    else if (window_pages_ != nullptr)
      window_pages_->fork(plan.base, sequence, length);
    if (length > plan.shared) {
      const auto pages = pages_.pages(sequence);
      for (auto page = static_cast<size_t>(plan.shared / kPageTokens); page < pages.size(); ++page)
        bytes_.write_page(pages[page], found.pages[page].bytes);
    }
  } catch (...) {
    clear(sequence);
    throw;
  }
  return plan.result;
}

int32_t PrefixMemory::reusable(int32_t sequence, std::span<const int32_t> tokens, int32_t most,
                               const AdapterScales& scales) {
  cache_.begin();
  cache_.select(scales);
  return plan(sequence, tokens, most, scales, cache_.find(tokens)).result.length;
}

void PrefixMemory::keep_lost(int32_t sequence, int32_t first_lost) {
  cache_.begin();
  keep(sequence, first_lost, nullptr);
}

void PrefixMemory::checkpoint(int32_t sequence) {
  if (pages_.length(sequence) == 0 || end_bytes() == 0) return;
  cache_.begin();
  cache_.select(scales_[static_cast<size_t>(sequence)]);
  cache_.keep_state(tokens_[static_cast<size_t>(sequence)], [&](std::byte* to) { read_end(sequence, to); });
}

void PrefixMemory::release(int32_t sequence) {
  if (pages_.length(sequence) == 0) return;
  cache_.begin();
  keep(sequence, 0, nullptr);
  clear(sequence);
}

// Keeps the tokens of a sequence from `first_lost` on, and the state at its end, at whose cost `pinned` does not go.
void PrefixMemory::keep(int32_t sequence, int32_t first_lost, const std::byte* pinned) {
  const std::vector<int32_t>& all = tokens_[static_cast<size_t>(sequence)];
  const int32_t n_exact = std::min(static_cast<int32_t>(all.size()), moved_from_[static_cast<size_t>(sequence)]);
  if (first_lost >= n_exact) return;
  cache_.select(scales_[static_cast<size_t>(sequence)]);
  const auto tokens = std::span(all).first(static_cast<size_t>(n_exact));
  const auto pages = pages_.pages(sequence);
  const bool is_covered = cache_.keep_pages(tokens, first_lost / kPageTokens, [&](int32_t page, std::byte* to) {
    bytes_.read_page(pages[static_cast<size_t>(page)], to);
  });
  if (is_covered && tokens.size() == all.size())
    cache_.keep_state(tokens, [&](std::byte* to) { read_end(sequence, to); }, pinned);
}

void PrefixMemory::clear(int32_t sequence) {
  pages_.truncate(sequence, 0);
  if (window_pages_ != nullptr) window_pages_->truncate(sequence, 0);
  tokens_[static_cast<size_t>(sequence)].clear();
  moved_from_[static_cast<size_t>(sequence)] = kNothingMoved;
  states_.clear(sequence);
}

void PrefixMemory::mark_moved(int32_t sequence, int32_t first) {
  int32_t& moved_from = moved_from_[static_cast<size_t>(sequence)];
  moved_from = std::min(moved_from, first);
}

void PrefixMemory::was_cut(int32_t sequence, int32_t length) noexcept {
  int32_t& moved_from = moved_from_[static_cast<size_t>(sequence)];
  if (length <= moved_from) moved_from = kNothingMoved;
}

void PrefixMemory::was_forked(int32_t source, int32_t destination, int32_t length) noexcept {
  moved_from_[static_cast<size_t>(destination)] = moved_from_[static_cast<size_t>(source)];
  was_cut(destination, length);
}

}  // namespace v100
