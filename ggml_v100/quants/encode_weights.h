// Weights of the values in the error that an encoder minimises, and the level of IQ4_NL and IQ4_XS nearest to a quotient.
#pragma once

#include <cmath>
#include <cstdint>

#include "quants/decode_blocks.h"

namespace v100 {

inline float sum_of_squares(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

// importance * sqrt(variance + x^2): an error matters more at a column of importance and at a large value.
inline void importance_weights(const float* x, const float* importance, int64_t n, float variance, float* weights) {
  for (int64_t i = 0; i < n; ++i) weights[i] = importance[i] * std::sqrt(variance + x[i] * x[i]);
}

inline void square_weights(const float* x, int64_t n, float* weights) {
  for (int64_t i = 0; i < n; ++i) weights[i] = x[i] * x[i];
}

// Indices in kNonLinearLevels; a quotient in the middle between two levels goes to the upper one.
inline void nearest_non_linear(const float* x, int n, float levels_per_unit, uint8_t* levels) {
  for (int i = 0; i < n; ++i) {
    const float quotient = levels_per_unit * x[i];
    int level = 0;
    for (int j = 1; j < 16; ++j)
      level += !(quotient < 0.5f * static_cast<float>(kNonLinearLevels[j - 1] + kNonLinearLevels[j]));
    levels[i] = static_cast<uint8_t>(level);
  }
}

}  // namespace v100
