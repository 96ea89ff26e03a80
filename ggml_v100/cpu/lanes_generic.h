// Lanes: 16 f32 numbers in an array; loops the compiler may vectorise. For inclusion by files of that instruction set only.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/half.h"

namespace v100::cpu {

namespace {

struct Lanes {
  float v[16];
};

constexpr int kDenseSums = 4;
constexpr int kDenseRows = 4;
constexpr int kDeltaPanels = 1;  // of the delta rule: 4 sums each

// c = a * b + c with one rounding, 16 times. Without a fused instruction: the product of two f32 is exact in f64; the
// sum is rounded to odd there (the addition's error term decides), which makes the second rounding, to f32, the
// correct one.
#ifdef FP_FAST_FMAF
inline void fuse_16(const float* a, const float* b, float* c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
}
#else
using TwoFloats = float __attribute__((vector_size(8)));
using TwoDoubles = double __attribute__((vector_size(16)));
using TwoMasks = uint64_t __attribute__((vector_size(16)));

inline TwoDoubles load_two(const float* p) {
  TwoFloats narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, TwoDoubles);
}

// Not inlined: it is long, used everywhere, and a call is cheap beside it.
[[gnu::noinline, maybe_unused]] void fuse_16(const float* a, const float* b, float* c) {
  for (int i = 0; i < 16; i += 2) {
    const TwoDoubles product = load_two(a + i) * load_two(b + i), addend = load_two(c + i);
    const TwoDoubles sum = product + addend;
    const TwoDoubles rest = sum - product;
    const TwoDoubles error = (product - (sum - rest)) + (addend - rest);
    // One step of the last place towards the exact value where the sum is inexact and even. NaN errors (the sum is not
    // finite) compare false both ways.
    const TwoMasks bits = reinterpret_cast<TwoMasks>(sum);
    const TwoMasks inexact = reinterpret_cast<TwoMasks>((error < 0) | (error > 0));
    const TwoMasks opposite = (bits ^ reinterpret_cast<TwoMasks>(error)) >> 63;  // no 64-bit comparison: SSE2 lacks it
    const TwoMasks step = (1 - opposite - opposite) & inexact & ((bits & 1) - 1);  // 1 or -1
    const TwoFloats rounded = __builtin_convertvector(reinterpret_cast<TwoDoubles>(bits + step), TwoFloats);
    std::memcpy(c + i, &rounded, sizeof rounded);
  }
}
#endif

template <class F>
inline Lanes each(F&& f) {
  Lanes y;
  for (int i = 0; i < 16; ++i) y.v[i] = f(i);
  return y;
}

inline Lanes load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline Lanes load_first(const float* p, int n) {
  return each([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, const Lanes& a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
// Elsewhere a store that leaves the caches alone.
inline void store_past_caches(float* p, const Lanes& a) { store(p, a); }
inline void finish_past_caches() {}
inline void store_first(float* p, const Lanes& a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
inline Lanes splat(float a) {
  return each([=](int) { return a; });
}
inline Lanes load_f16(const uint16_t* p) {
  return each([=](int i) { return f32_from_f16(p[i]); });
}
inline Lanes splat_f16(uint16_t a) { return splat(f32_from_f16(a)); }
inline Lanes load_bf16(const uint16_t* p) {
  return each([=](int i) { return f32_from_bf16(p[i]); });
}
inline Lanes load_i8(const int8_t* p) {
  return each([=](int i) { return static_cast<float>(p[i]); });
}
// The low (shift 0) or high (shift 4) nibbles of 16 bytes.
inline Lanes load_nibbles(const uint8_t* p, int shift) {
  return each([=](int i) { return static_cast<float>(p[i] >> shift & 15); });
}
inline void store_f16(uint16_t* p, const Lanes& a) {
  for (int i = 0; i < 16; ++i) p[i] = f16_from_f32(a.v[i]);
}
// Each lane is an integer of -128..127.
inline void store_i8(int8_t* p, const Lanes& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

inline Lanes operator+(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes operator/(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Lanes negate(const Lanes& a) {
  return each([&](int i) { return -a.v[i]; });
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  Lanes y = c;
  fuse_16(a.v, b.v, y.v);
  return y;
}
inline Lanes larger(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes smaller(const Lanes& a, const Lanes& b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes absolute(const Lanes& a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
// Half to even by the rounding of an addition; |a| < 2^22.
inline Lanes round_even(const Lanes& a) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  return each([&](int i) { return (a.v[i] + kMagic) - kMagic; });
}
inline Lanes power_of_two(const Lanes& n) {  // n integer, -126..127
  return each([&](int i) { return std::bit_cast<float>((static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
// a < bound ? 0 : b
inline Lanes zero_below(const Lanes& a, float bound, const Lanes& b) {
  return each([&](int i) { return a.v[i] < bound ? 0.0f : b.v[i]; });
}
// The lanes [begin, end) of a, the others are filler.
inline Lanes only(const Lanes& a, int begin, int end, float filler) {
  return each([&](int i) { return i >= begin && i < end ? a.v[i] : filler; });
}

// Adds (or takes the larger of) lanes 8, 4, 2, 1 apart.
inline float sum_of(Lanes a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float max_of(const Lanes& a) {
  float largest = a.v[0];
  for (int i = 1; i < 16; ++i) largest = a.v[i] > largest ? a.v[i] : largest;
  return largest;
}
inline float inverse_sqrt(float a) { return 1.0f / std::sqrt(a); }

// (even, odd) elements of 32 consecutive numbers, and back.
inline void load_pairs(const float* p, Lanes& even, Lanes& odd) {
  for (int i = 0; i < 16; ++i) even.v[i] = p[2 * i], odd.v[i] = p[2 * i + 1];
}
inline void store_pairs(float* p, const Lanes& even, const Lanes& odd) {
  for (int i = 0; i < 16; ++i) p[2 * i] = even.v[i], p[2 * i + 1] = odd.v[i];
}

}  // namespace

}  // namespace v100::cpu
