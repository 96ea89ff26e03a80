// The 4-bit floats (E2M1) of MXFP4 and NVFP4 and the 8-bit floats of their scales.
#pragma once

#include <bit>
#include <cstdint>

namespace v100 {

// Twice the values of FP4 E2M1; the scales below are halved to make up for it.
inline constexpr int8_t kDoubledFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Half the value of an E8M0 exponent: 2^(e - 128), subnormal for the two smallest.
inline float half_e8m0(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Half the value of an unsigned E4M3 scale. 0x7F (NaN in the signed format) reads as 0; bit 7 is unused.
inline float half_ue4m3(uint8_t s) {
  if (s == 0x7F) return 0.0f;
  const uint32_t exponent = (s >> 3) & 15u;
  const auto mantissa = static_cast<float>(s & 7u);
  if (exponent == 0) return mantissa * 0x1p-10f;
  return (1.0f + mantissa / 8) * std::bit_cast<float>((exponent + 127 - 8) << 23);
}

// The nearest unsigned E4M3, halves up. Non-positive and NaN give 0; 448, the largest, is 0x7E.
inline uint8_t ue4m3_from_f32(float value) {
  if (!(value > 0)) return 0;
  if (value >= 448.0f) return 0x7E;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  int exponent = static_cast<int>(bits >> 23) - 127 + 7;
  if (exponent <= 0) {  // subnormal: units of 2^-9
    const int mantissa = static_cast<int>(value * 512.0f + 0.5f);
    return static_cast<uint8_t>(mantissa > 7 ? 7 : mantissa);
  }
  uint32_t mantissa = (bits >> 20 & 7u) + (bits >> 19 & 1u);
  if (mantissa == 8) {
    mantissa = 0;
    ++exponent;
  }
  return exponent >= 15 ? 0x7E : static_cast<uint8_t>(static_cast<uint32_t>(exponent) << 3 | mantissa);
}

}  // namespace v100
