#pragma once
#include <cstring>
#include "quants/block_bytes.h"
namespace v100 {
template <class T>
void store(uint8_t* at, T value) { std::memcpy(at, &value, sizeof value); }
inline void store_half(uint8_t* at, float v) { store<uint16_t>(at, f16_from_f32(v)); }
}
