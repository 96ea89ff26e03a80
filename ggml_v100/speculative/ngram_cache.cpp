// Counting, the limits below which counts say nothing, and the file format.
#include "speculative/ngram_cache.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/hash.h"

namespace v100 {

namespace {

constexpr int32_t kStaticNgram = 2;

// For n-grams of 1 to 4 tokens: samples that must have been seen, and per cent of them that the best must have.
struct Limits {
  std::array<int32_t, kCacheNgram> samples, percent;
};
constexpr Limits kLax{{2, 2, 1, 1}, {66, 50, 50, 50}};
constexpr Limits kStrict{{4, 3, 2, 2}, {75, 66, 66, 66}};

CachedNgram last_tokens(std::span<const int32_t> text, int32_t n) {
  CachedNgram ngram;
  const auto tail = text.last(static_cast<size_t>(n));
  std::copy(tail.begin(), tail.end(), ngram.tokens.begin());
  return ngram;
}

const FollowerCounts* find(const NgramCounts& counts, const CachedNgram& ngram) {
  const auto found = counts.find(ngram);
  return found == counts.end() ? nullptr : &found->second;
}

// The best follower, if it is clear enough; -1: none. preferred: counts that weigh the first ones, or nullptr.
int32_t best_follower(const FollowerCounts& counts, const FollowerCounts* preferred, const Limits& limits, int32_t n) {
  int64_t best_score = -1, best_count = 0, total = 0;
  int32_t best = -1;
  for (const auto& [token, count] : counts) {
    int64_t score = count;
    if (preferred != nullptr)
      if (const auto found = preferred->find(token); found != preferred->end()) score *= 100 * int64_t{found->second};
    total += count;
    if (score > best_score || (score == best_score && token < best)) {
      best_score = score;
      best_count = count;
      best = token;
    }
  }
  const auto size = static_cast<size_t>(n - 1);
  if (total < limits.samples[size] || 100 * best_count < limits.percent[size] * total) return -1;
  return best;
}

// From the longest n-gram to the shortest.
int32_t from_counts(const NgramCounts& counts, const FollowerCounts* preferred, const Limits& limits,
                    std::span<const int32_t> text) {
  for (int32_t n = std::min(kCacheNgram, static_cast<int32_t>(text.size())); n >= 1; --n)
    if (const FollowerCounts* followers = find(counts, last_tokens(text, n))) {
      const int32_t token = best_follower(*followers, preferred, limits, n);
      if (token >= 0) return token;
    }
  return -1;
}

}  // namespace

size_t CachedNgramHash::operator()(const CachedNgram& ngram) const noexcept {
  Fnv1a hash;
  hash.add(ngram.tokens.data(), sizeof ngram.tokens);
  return static_cast<size_t>(hash.value());
}

NgramCounts read_lookup_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InvalidArgument("lookup file " + path + " cannot be read");
  const auto read = [&](int32_t* to, size_t count) {
    file.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(int32_t)));
    return file.gcount() == static_cast<std::streamsize>(count * sizeof(int32_t));
  };
  NgramCounts counts;
  while (file.peek() != std::ifstream::traits_type::eof()) {
    CachedNgram ngram;
    int32_t n_followers = 0, follower[2];
    bool is_whole = read(ngram.tokens.data(), ngram.tokens.size()) && read(&n_followers, 1);
    if (is_whole && n_followers < 0)
      throw InvalidArgument("lookup file " + path + ": a record has " + std::to_string(n_followers) + " followers");
    FollowerCounts& followers = counts[ngram];
    for (int32_t i = 0; i < n_followers && is_whole; ++i) {
      is_whole = read(follower, 2);
      if (is_whole && follower[1] < 0)
        throw InvalidArgument("lookup file " + path + ": a follower was counted " + std::to_string(follower[1]) +
                              " times");
      if (is_whole) followers[follower[0]] += follower[1];
    }
    if (!is_whole) throw InvalidArgument("lookup file " + path + " ends within a record");
  }
  return counts;
}

void write_lookup_file(const std::string& path, const NgramCounts& counts) {
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  const auto write = [&](const int32_t* from, size_t count) {
    file.write(reinterpret_cast<const char*>(from), static_cast<std::streamsize>(count * sizeof(int32_t)));
  };
  for (const auto& [ngram, followers] : counts) {
    write(ngram.tokens.data(), ngram.tokens.size());
    const auto n_followers = static_cast<int32_t>(followers.size());
    write(&n_followers, 1);
    for (const auto& [token, count] : followers) {
      const int32_t follower[2] = {token, count};
      write(follower, 2);
    }
  }
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0)
    throw Error("lookup file " + path + " cannot be written");
}

NgramCache::NgramCache(const std::string& static_path, const std::string& dynamic_path) : dynamic_path_(dynamic_path) {
  if (!static_path.empty()) static_ = read_lookup_file(static_path);
  if (!dynamic_path.empty() && std::filesystem::exists(dynamic_path)) dynamic_ = read_lookup_file(dynamic_path);
}

// A sequence's counts go where they serve others.
void NgramCache::learn(Context& context) {
  if (!dynamic_path_.empty())
    for (const auto& [ngram, followers] : context.counts)
      for (const auto& [token, count] : followers) dynamic_[ngram][token] += count;
  context = {};
}

void NgramCache::forget(int32_t sequence) {
  const auto found = contexts_.find(sequence);
  if (found == contexts_.end()) return;
  learn(found->second);
  contexts_.erase(found);
}

void NgramCache::save() {
  if (dynamic_path_.empty()) return;
  for (auto& [sequence, context] : contexts_) learn(context);
  write_lookup_file(dynamic_path_, dynamic_);
}

void NgramCache::follow_history(Context& context, const DraftRequest& request) {
  std::vector<int32_t>& seen = context.seen;
  const size_t length = request.history.size() + 1;
  const auto token_at = [&](size_t i) { return i + 1 < length ? request.history[i] : request.last; };
  const size_t common = std::min(seen.size(), request.history.size());
  if (seen.size() > length ||
      !std::equal(seen.begin(), seen.begin() + static_cast<ptrdiff_t>(common), request.history.begin()) ||
      (seen.size() == length && seen.back() != request.last)) {
    learn(context);
  }
  while (seen.size() < length) {
    const int32_t token = token_at(seen.size());
    for (int32_t n = 1; n <= std::min(kCacheNgram, static_cast<int32_t>(seen.size())); ++n)
      ++context.counts[last_tokens(seen, n)][token];
    seen.push_back(token);
  }
}

int32_t NgramCache::next(const NgramCounts& context, std::span<const int32_t> text) const {
  const FollowerCounts* in_static =
      text.size() >= static_cast<size_t>(kStaticNgram) ? find(static_, last_tokens(text, kStaticNgram)) : nullptr;
  int32_t token = from_counts(context, in_static, kLax, text);
  if (token < 0) token = from_counts(dynamic_, in_static, kStrict, text);
  if (token < 0 && in_static != nullptr) token = best_follower(*in_static, nullptr, kLax, kStaticNgram);
  return token;
}

void NgramCache::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  for (size_t i = 0; i < requests.size(); ++i) {
    Context& context = contexts_[requests[i].sequence];
    follow_history(context, requests[i]);
    const size_t tail = std::min<size_t>(context.seen.size(), kCacheNgram);
    std::vector<int32_t> text(context.seen.end() - static_cast<ptrdiff_t>(tail), context.seen.end());
    while (text.size() - tail < static_cast<size_t>(longest())) {
      const int32_t token = next(context.counts, text);
      if (token < 0) break;
      text.push_back(token);
    }
    drafts[i].tokens.assign(text.begin() + static_cast<ptrdiff_t>(tail), text.end());
  }
}

}  // namespace v100
