#pragma once
#include <cstring>
#include "quants/block_bytes.h"
namespace v100 {
template <class T>
void store(uint8_t* at, T value) { std::memcpy(at, &value, sizeof value); }
inline void store_half(uint8_t* at, float v) { store<uint16_t>(at, f16_from_f32(v)); }
inline int32_t nearest_int(float value) {
  return (std::bit_cast<int32_t>(value + 12582912.0f) & 0x7FFFFF) - 0x400000;
}
}
