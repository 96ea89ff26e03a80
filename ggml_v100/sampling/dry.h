// DRY ("don't repeat yourself"): a token that would continue an earlier occurrence of the text's present end is
// penalised, the more the longer that occurrence is. Sequence breakers bound how far back a repetition may reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sampling/candidates.h"

namespace v100 {

// A breaker string as tokens: `head` holds its beginning (after whatever else the token's text has), `tail` the rest.
// An empty tail: the token alone holds the whole string.
struct DryBreaker {
  int32_t head;
  std::vector<int32_t> tail;
};

// Breakers by head. Immutable, shared by the samplers of one model.
class DryBreakers {
 public:
  explicit DryBreakers(const std::vector<DryBreaker>& breakers);

  // Of the longest breaker that ends `i` tokens before the end of `newest_first`'s beginning with head newest_first[i]:
  // the length of its tail; -1 when none.
  ptrdiff_t longest_tail(std::span<const int32_t> newest_first, size_t i) const;
  bool is_single(int32_t token) const;  // has an empty tail

 private:
  std::unordered_map<int32_t, std::vector<std::vector<int32_t>>> tails_;
};

struct DryParams {
  float multiplier;        // 0: off
  float base;              // below 1: off
  int32_t allowed_length;  // repetitions of fewer tokens are not penalised
  int32_t last_n;          // length of the history; 0: off

  bool neutral() const { return multiplier == 0.0f || !(base >= 1.0f) || last_n <= 0; }
};

// The last `capacity` accepted tokens in order.
class DryHistory {
 public:
  explicit DryHistory(int32_t capacity) : capacity_(static_cast<size_t>(capacity)) {}

  void append(std::span<const int32_t> tokens);
  void clear() { tokens_.clear(); }
  std::vector<int32_t> newest_first() const;

 private:
  size_t capacity_;
  std::vector<int32_t> tokens_;  // at most twice the capacity; the last `capacity_` count
};

// Token -> length of the longest repetition that it would continue, where that is at least `allowed_length`.
std::unordered_map<int32_t, size_t> repetitions(std::span<const int32_t> newest_first, size_t allowed_length,
                                                const DryBreakers& breakers);

// logit -= multiplier * base^(repetition - allowed_length) for every token of repetitions() that is no breaker.
void apply_dry(const DryParams& params, const DryHistory& history, const DryBreakers& breakers,
               CandidateList& candidates);

}  // namespace v100
