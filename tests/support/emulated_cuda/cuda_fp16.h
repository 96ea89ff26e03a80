// Half-precision values of the emulated CUDA language: stored as bits, computed in f32 and rounded to nearest even.
//
// Sum, difference, product and quotient of two halves in f32 have enough bits that the second rounding changes nothing. The fma
// does not: its f32 sum is rounded to odd, which a rounding to 11 bits can follow.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "language.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

namespace emulated_cuda {

inline float to_float(__half a) { return static_cast<float>(std::bit_cast<_Float16>(a.bits)); }
inline __half to_half(float a) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(a))}; }

// a * b + c with one rounding. The product is exact in f32.
inline __half fma_half(__half a, __half b, __half c) {
  const float product = to_float(a) * to_float(b), added = to_float(c);
  const float sum = product + added;
  const float back = sum - product;
  const float lost = (product - (sum - back)) + (added - back);  // what the rounding of `sum` cut off, exactly
  if (!(std::fabs(sum) <= 3.0e38f) || lost == 0.0f) return to_half(sum);
  uint32_t bits = std::bit_cast<uint32_t>(sum);
  if ((bits & 1u) == 0) bits = (lost > 0.0f) == (sum > 0.0f) ? bits + 1 : bits - 1;
  return to_half(std::bit_cast<float>(bits));
}

}  // namespace emulated_cuda

inline float __half2float(__half a) { return emulated_cuda::to_float(a); }
inline __half __float2half_rn(float a) { return emulated_cuda::to_half(a); }
inline __half __float2half(float a) { return emulated_cuda::to_half(a); }
inline uint16_t __half_as_ushort(__half a) { return a.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }

inline __half2 __float2half2_rn(float a) { return {__float2half_rn(a), __float2half_rn(a)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline __half2 __float22half2_rn(float2 a) { return __floats2half2_rn(a.x, a.y); }
inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
inline float __low2float(__half2 a) { return __half2float(a.x); }
inline float __high2float(__half2 a) { return __half2float(a.y); }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
inline __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }

inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline __half __hdiv(__half a, __half b) { return __float2half_rn(__half2float(a) / __half2float(b)); }
inline __half __hfma(__half a, __half b, __half c) { return emulated_cuda::fma_half(a, b, c); }
inline __half __hneg(__half a) { return {static_cast<uint16_t>(a.bits ^ 0x8000u)}; }
inline __half __habs(__half a) { return {static_cast<uint16_t>(a.bits & 0x7fffu)}; }

inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __half2 __hneg2(__half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
inline __half2 __habs2(__half2 a) { return {__habs(a.x), __habs(a.y)}; }
