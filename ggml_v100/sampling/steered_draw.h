// Draws that steer themselves by what they drew before: mirostat towards a surprise per token, adaptive-p towards a
// probability of the drawn tokens.
//
// Mirostat: Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity".
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "sampling/candidates.h"

namespace v100 {

// One random number in [0, 1). A draw from a single candidate takes none.
using Uniform = std::function<double()>;

class Mirostat {
 public:
  // version 1 or 2; tau: surprise aimed at, in bits; eta: learning rate.
  Mirostat(int32_t version, int32_t n_vocab, float tau, float eta)
      : version_(version), n_vocab_(n_vocab), tau_(tau), eta_(eta) {
    reset();
  }

  int32_t draw(CandidateList& candidates, const Uniform& uniform);
  void reset();

 private:
  int32_t n_kept(std::span<const float> probabilities) const;

  int32_t version_;
  int32_t n_vocab_;
  float tau_;
  float eta_;
  float mu_ = 0.0f;  // largest surprise let through, in bits
};

class AdaptiveP {
 public:
  // target: probability aimed at; below 0 an ordinary draw. decay: weight of the past per token, cut to 0 .. 0.99.
  AdaptiveP(float target, float decay);

  int32_t draw(CandidateList& candidates, const Uniform& uniform);
  // Only the token of the last draw counts, and once.
  void accept(int32_t token);
  void reset();

 private:
  float target_;
  float decay_;
  float weighted_sum_ = 0.0f;  // of the drawn tokens' original probabilities
  float total_weight_ = 0.0f;
  int32_t pending_ = -1;  // token of the last draw
  float pending_probability_ = 0.0f;
};

}  // namespace v100
