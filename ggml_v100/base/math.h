// Scalar functions whose exact operation order is part of the Ops contract, so that vector code can repeat it bit for bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace v100 {

// e^x in f32, about 1 ulp. x below -87 gives 0, x above 88 gives the value at 88. NaN is undefined.
// n = round(x / ln 2); r = x - n ln 2 in two fused steps; e^r by a degree-6 polynomial (Taylor's coefficients suffice on
// |r| <= 0.35); scaled by 2^n through the exponent bits. Vector versions use the same steps with fused multiply-adds.
namespace exp_constants {
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2High = 0.693145751953125f;  // 15 bits: n * high is exact
inline constexpr float kLn2Low = 1.42860682030941723e-6f;
inline constexpr float kLowest = -87.0f;
inline constexpr float kHighest = 88.0f;
inline constexpr float kC2 = 0.5f, kC3 = 1.0f / 6, kC4 = 1.0f / 24, kC5 = 1.0f / 120, kC6 = 1.0f / 720;
}  // namespace exp_constants

inline float exp_f32(float x) {
  using namespace exp_constants;
  if (x < kLowest) return 0.0f;
  x = x > kHighest ? kHighest : x;
  const float n = std::nearbyint(x * kLog2E);  // half to even
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  float p = kC6;
  p = std::fma(p, r, kC5);
  p = std::fma(p, r, kC4);
  p = std::fma(p, r, kC3);
  p = std::fma(p, r, kC2);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

// 1 / (1 + e^-x).
inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// x * sigmoid(x).
inline float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), written with tanh(u) = 1 - 2 / (1 + e^2u).
inline float gelu_f32(float x) {
  const float u = 0.797884560802865f * x * std::fma(0.044715f * x, x, 1.0f);
  return x * (1.0f - 1.0f / (1.0f + exp_f32(u + u)));
}

// Sum of 16 interleaved partial sums (element i belongs to partial i % 16): halves are added 8, 4, 2, 1 apart.
inline float sum_of_16(float* partial) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) partial[i] += partial[i + width];
  return partial[0];
}

}  // namespace v100
