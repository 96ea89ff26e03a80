// What the codecs are written in, in plain C++: codes, bytes and scales of all 16 columns, in loops that vectorise.
#pragma once

#include "cpu/lanes_generic.h"

namespace v100::cpu {

namespace {

constexpr int kCodeColumns = 16;

struct Codes {  // a turn: 4 values of k of each column
  uint8_t v[64];
};
struct Bytes {  // one unsigned byte of each column
  uint8_t v[16];
};
struct Scales {  // one f32 number of each column
  float v[16];
};

template <class F>
inline Codes each_code(F&& f) {
  Codes y;
  for (int i = 0; i < 64; ++i) y.v[i] = static_cast<uint8_t>(f(i));
  return y;
}
template <class F>
inline Bytes each_byte(F&& f) {
  Bytes y;
  for (int i = 0; i < 16; ++i) y.v[i] = static_cast<uint8_t>(f(i));
  return y;
}
template <class F>
inline Scales each_scale(F&& f) {
  Scales y;
  for (int i = 0; i < 16; ++i) y.v[i] = f(i);
  return y;
}

inline Codes load_codes(const std::byte* p) {
  Codes y;
  std::memcpy(y.v, p, 64);
  return y;
}
inline void store_codes(uint8_t* p, const Codes& a) { std::memcpy(p, a.v, 64); }
// Left by `bits`, right when negative.
template <int bits>
inline Codes shifted(const Codes& a) {
  return each_code(
      [&](int i) { return bits > 0 ? a.v[i] << (bits > 0 ? bits : 0) : a.v[i] >> (bits > 0 ? 0 : -bits); });
}
inline Codes masked(const Codes& a, int mask) {
  return each_code([&](int i) { return a.v[i] & mask; });
}
// a | (b & mask)
inline Codes with_bits(const Codes& a, const Codes& b, int mask) {
  return each_code([&](int i) { return a.v[i] | (b.v[i] & mask); });
}
inline Codes lookup(const Codes& indices, const uint8_t* table) {  // indices below 16
  return each_code([&](int i) { return table[indices.v[i]]; });
}

inline Codes plus(const Codes& a, int b) {
  return each_code([&](int i) { return a.v[i] + b; });
}
// Products of bytes with a constant, modulo 256.
inline Codes times(const Codes& a, int factor) {
  return each_code([&](int i) { return a.v[i] * factor; });
}
// 3 a / 256, the first digit of a fraction in base 3.
inline Codes first_trit(const Codes& a) {
  return each_code([&](int i) { return a.v[i] * 3 >> 8; });
}

inline Bytes load_bytes(const std::byte* p) {
  return each_byte([=](int i) { return p[i]; });
}
inline Bytes operator|(const Bytes& a, const Bytes& b) {
  return each_byte([&](int i) { return a.v[i] | b.v[i]; });
}
inline Bytes operator^(const Bytes& a, const Bytes& b) {
  return each_byte([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline Bytes operator&(const Bytes& a, int mask) {
  return each_byte([&](int i) { return a.v[i] & mask; });
}
inline Bytes operator>>(const Bytes& a, uint32_t bits) {
  return each_byte([&](int i) { return a.v[i] >> bits; });
}
inline Bytes operator<<(const Bytes& a, uint32_t bits) {
  return each_byte([&](int i) { return a.v[i] << bits; });
}
inline Bytes operator+(const Bytes& a, int b) {
  return each_byte([&](int i) { return a.v[i] + b; });
}

// Each column's byte in all four values of its turn.
inline Codes spread(const Bytes& a) {
  return each_code([&](int i) { return a.v[i / 4]; });
}
// q + 128, or -q + 128 where value t's bit first + t of the column's spread signs is set.
template <int first>
inline Codes with_signs(const Codes& q, const Codes& signs) {
  return each_code([&](int i) { return 128 + ((signs.v[i] >> (first + i % 4) & 1) != 0 ? -q.v[i] : q.v[i]); });
}

struct Indices {  // of a codebook's rows, one for each column
  uint16_t v[16];
};
inline Indices indices(const Bytes& low, const Bytes& high) {
  Indices y;
  for (int c = 0; c < 16; ++c) y.v[c] = static_cast<uint16_t>(low.v[c] | high.v[c] << 8);
  return y;
}
// Rows of 8 bytes: values 0..3 and 4..7 of each column.
inline void look_up_8(const void* codebook, const Indices& at, Codes& low, Codes& high) {
  for (int c = 0; c < 16; ++c) {
    const auto* row = static_cast<const uint8_t*>(codebook) + 8 * at.v[c];
    std::memcpy(low.v + 4 * c, row, 4);
    std::memcpy(high.v + 4 * c, row + 4, 4);
  }
}
// Rows of 4 bytes.
inline Codes look_up_4(const void* codebook, const Indices& at) {
  Codes y;
  for (int c = 0; c < 16; ++c) std::memcpy(y.v + 4 * c, static_cast<const uint8_t*>(codebook) + 4 * at.v[c], 4);
  return y;
}

inline Scales load_scales(const float* p) {
  return each_scale([=](int i) { return p[i]; });
}
inline void store_scales(float* p, const Scales& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Scales load_halves(const std::byte* p) {
  uint16_t bits[16];
  std::memcpy(bits, p, sizeof bits);
  return each_scale([&](int i) { return f32_from_f16(bits[i]); });
}
inline Scales from_unsigned(const Bytes& a) {
  return each_scale([&](int i) { return static_cast<float>(a.v[i]); });
}
inline Scales from_signed(const Bytes& a) {
  return each_scale([&](int i) { return static_cast<float>(static_cast<int8_t>(a.v[i])); });
}
inline Scales operator*(const Scales& a, const Scales& b) {
  return each_scale([&](int i) { return a.v[i] * b.v[i]; });
}
inline Scales operator*(const Scales& a, float b) {
  return each_scale([&](int i) { return a.v[i] * b; });
}
inline Scales operator-(const Scales& a) {
  return each_scale([&](int i) { return -a.v[i]; });
}
// Half the value of E8M0 exponents: 2^(e - 128), subnormal for the two smallest.
inline Scales half_e8m0(const Bytes& e) {
  return each_scale([&](int i) {
    return std::bit_cast<float>(e.v[i] < 2 ? 0x200000u << e.v[i] : static_cast<uint32_t>(e.v[i] - 1) << 23);
  });
}
// Half the value of unsigned E4M3 numbers (bit 7 clear): as f16 they are 2^-7 of it.
inline Scales half_ue4m3(const Bytes& s) {
  return each_scale([&](int i) { return f32_from_f16(static_cast<uint16_t>(s.v[i] << 7)) * 128.0f; });
}

}  // namespace

}  // namespace v100::cpu
