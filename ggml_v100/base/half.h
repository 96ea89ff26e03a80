// Conversions between f32 and the 16-bit float formats: round to nearest even, subnormals kept, overflow to infinity.
#pragma once

#include <bit>
#include <cstdint>

namespace v100 {

inline float f32_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t bf16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays a quiet NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float f32_from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(bits & 0x7FFFu);
  if (rest >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
  // 2^112 moves the exponent bias from 15 to 127; the product is exact, also for subnormals.
  const float magnitude = std::bit_cast<float>(rest << 13) * std::bit_cast<float>(0x77800000u);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline uint16_t f16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum's rounding places the subnormal's bits at the bottom of 0.5
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace v100
