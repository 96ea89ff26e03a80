// Little-endian loads from and stores to packed blocks at any alignment.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace v100 {

static_assert(std::endian::native == std::endian::little,
              "blocks are read in place: a little-endian machine is needed");

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
void store(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

inline float load_half(const uint8_t* at) { return f32_from_f16(load<uint16_t>(at)); }
inline void store_half(uint8_t* at, float value) { store(at, f16_from_f32(value)); }

// f16 super-block scale of IQ1_M: its 16 bits are the top nibbles of four 16-bit words.
inline uint16_t iq1_m_scale_bits(const uint8_t* words) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(load<uint16_t>(words + 2 * i) >> 12) << (4 * i);
  return static_cast<uint16_t>(bits);
}

}  // namespace v100
