// The history that penalties look at, and the penalties: repeat (scales), frequency (per occurrence), presence (once).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sampling/candidates.h"

namespace v100 {

// The last `capacity` accepted tokens with their counts.
class TokenWindow {
 public:
  explicit TokenWindow(int32_t capacity) : capacity_(static_cast<size_t>(capacity)) {}

  void append(std::span<const int32_t> tokens);
  void clear();
  const std::unordered_map<int32_t, int32_t>& counts() const { return counts_; }

 private:
  size_t capacity_;
  size_t oldest_ = 0;            // position that the next token overwrites once the ring is full
  std::vector<int32_t> tokens_;  // grows to capacity_
  std::unordered_map<int32_t, int32_t> counts_;
};

struct Penalties {
  float repeat;     // > 0; logits above 0 are divided by it, others multiplied
  float frequency;  // times the count, subtracted
  float presence;   // subtracted once

  bool neutral() const { return repeat == 1.0f && frequency == 0.0f && presence == 0.0f; }
  // Never NaN or +inf for finite values; -inf (banned) stays.
  float apply(float logit, int32_t count) const;
};

void apply_penalties(const Penalties& penalties, const TokenWindow& window, CandidateList& candidates);

}  // namespace v100
