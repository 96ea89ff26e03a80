// Drawing the tokens of drafts: shares of candidates, and random numbers of their own.
#pragma once

#include <cstdint>
#include <map>
#include <random>

#include "sampling/verification.h"

namespace v100 {

// Scores of candidates, at least one, become their shares at a temperature > 0.
Proposal softmax(Proposal candidates, float temperature);

// A generator for each sequence. Drafts and their verification must not use the same numbers: the sampler's generator has
// the request's seed itself, these have it combined with `salt`.
class DraftNumbers {
 public:
  explicit DraftNumbers(uint32_t salt) : salt_(salt) {}

  // The next number of MT19937, which begins anew where the seed is another than before, or after forget().
  uint32_t next(int32_t sequence, uint32_t seed);
  void forget(int32_t sequence) { generators_.erase(sequence); }

 private:
  struct Generator {
    uint32_t seed;
    std::mt19937 numbers;
  };

  uint32_t salt_;
  std::map<int32_t, Generator> generators_;  // of each sequence
};

}  // namespace v100
