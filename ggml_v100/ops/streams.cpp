// Residual streams: scalar loops in the order of the contract.
#include "ops/streams.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"

namespace v100 {

void mix_streams_into(Tensor y, Tensor x, Tensor gate) {
  const int32_t n = y.features, streams = x.features / n;
  const float share = 1.0f / static_cast<float>(streams);
  for (int32_t r = 0; r < y.rows; ++r)
    for (int32_t i = 0; i < n; ++i) {
      float sum = 0;
      for (int32_t s = 0; s < streams; ++s)
        sum = std::fma(sigmoid_f32(gate.row(r)[s * n + i]), x.row(r)[s * n + i], sum);
      y.row(r)[i] = sum * share;
    }
}

void add_to_streams_in_place(Tensor x, Tensor y, Tensor inject) {
  const int32_t n = y.features, streams = x.features / n;
  const float share = 1.0f / static_cast<float>(streams);
  for (int32_t r = 0; r < x.rows; ++r)
    for (int32_t s = 0; s < streams; ++s) {
      const float strength = 2.0f * sigmoid_f32(inject.row(r)[s] * share);
      for (int32_t i = 0; i < n; ++i) {
        float& value = x.row(r)[s * n + i];
        value = std::fma(strength, y.row(r)[i], value);
      }
    }
}

float memory_gate(const float* key, const float* query, int32_t features) {
  float partial[16] = {};
  for (int32_t i = 0; i < features; ++i) partial[i % 16] = std::fma(key[i], query[i], partial[i % 16]);
  return memory_gate_of(sum_of_16(partial), features);
}

float memory_gate_of(float dot, int32_t features) {
  const float a = dot / std::sqrt(static_cast<float>(features));
  if (a == 0) return sigmoid_f32(0.0f);
  return sigmoid_f32(std::copysign(std::sqrt(std::max(std::fabs(a), 1e-6f)), a));
}

}  // namespace v100
