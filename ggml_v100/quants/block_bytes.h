// Little-endian loads from packed blocks at any alignment.
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

inline float load_half(const uint8_t* at) { return f32_from_f16(load<uint16_t>(at)); }

// f16 super-block scale of IQ1_M: its 16 bits are the top nibbles of four 16-bit words.
inline uint16_t iq1_m_scale_bits(const uint8_t* words) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(load<uint16_t>(words + 2 * i) >> 12) << (4 * i);
  return static_cast<uint16_t>(bits);
}

}  // namespace v100
