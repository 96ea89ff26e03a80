// The CUDA language for a host compiler: included before every emulated kernel unit.
//
// Functions have the rounding of the CUDA documentation where that is exact; expf and its like are those of the host's
// library, within the same few units in the last place as the device's. `__global__`, `__launch_bounds__` and
// `__shared__` are handled by build.py.
#pragma once

#include <sched.h>
#include <time.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "executor.h"

#define V100_EMULATED 1
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulated_cuda::current->thread)
#define blockIdx (emulated_cuda::current->block->index)
#define blockDim (emulated_cuda::current->block->dimensions)
#define gridDim (emulated_cuda::current->block->grid)

// --- vectors ----------------------------------------------------------------------------------------------------------

#define EMULATED_VECTOR(type, name, alignment2, alignment4)                   \
  struct alignas(alignment2) name##2 { type x, y; };                          \
  struct name##3 { type x, y, z; };                                           \
  struct alignas(alignment4) name##4 { type x, y, z, w; };                    \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATED_VECTOR(signed char, char, 2, 4)
EMULATED_VECTOR(unsigned char, uchar, 2, 4)
EMULATED_VECTOR(short, short, 4, 8)
EMULATED_VECTOR(unsigned short, ushort, 4, 8)
EMULATED_VECTOR(int, int, 8, 16)
EMULATED_VECTOR(unsigned, uint, 8, 16)
EMULATED_VECTOR(long long, longlong, 16, 16)
EMULATED_VECTOR(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTOR(float, float, 8, 16)
EMULATED_VECTOR(double, double, 16, 16)
#undef EMULATED_VECTOR

// --- scalars ----------------------------------------------------------------------------------------------------------

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }

// Rounded once and never contracted; the units are compiled without contraction as a whole.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __saturatef(float a) { return a > 0.0f ? std::fmin(a, 1.0f) : 0.0f; }  // NaN becomes 0
using std::isfinite;
using std::isinf;
using std::isnan;

// To integers: out of range gives the nearest there is, NaN gives 0.
template <class Integer>
inline Integer emulated_to_integer(double value) {
  if (std::isnan(value)) return 0;
  constexpr double kLeast = std::numeric_limits<Integer>::min(), kMost = std::numeric_limits<Integer>::max();
  if (value <= kLeast) return std::numeric_limits<Integer>::min();
  if (value >= kMost) return std::numeric_limits<Integer>::max();
  return static_cast<Integer>(value);
}
inline int __float2int_rn(float a) { return emulated_to_integer<int>(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return emulated_to_integer<int>(std::trunc(a)); }
inline int __float2int_rd(float a) { return emulated_to_integer<int>(std::floor(a)); }
inline int __float2int_ru(float a) { return emulated_to_integer<int>(std::ceil(a)); }
inline unsigned __float2uint_rn(float a) { return emulated_to_integer<unsigned>(std::nearbyint(a)); }
inline unsigned __float2uint_rz(float a) { return emulated_to_integer<unsigned>(std::trunc(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }

inline int __ffs(int a) { return a == 0 ? 0 : std::countr_zero(static_cast<unsigned>(a)) + 1; }
inline int __clz(int a) { return std::countl_zero(static_cast<unsigned>(a)); }
inline int __popc(unsigned a) { return std::popcount(a); }
inline int __popcll(unsigned long long a) { return std::popcount(a); }
inline unsigned __brev(unsigned a) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}
// The low (or high) word of high:low shifted by the amount's lower five bits.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
// Byte i of the result is the byte of y:x that nibble i names; its top bit asks for the byte's sign, eight times.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15u;
    const unsigned byte = static_cast<unsigned>(bytes >> 8 * (nibble & 7u)) & 255u;
    result |= ((nibble & 8u) != 0 ? (byte >> 7) * 255u : byte) << 8 * i;
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int>(static_cast<int8_t>(static_cast<unsigned>(a) >> 8 * i)) *
         static_cast<int>(static_cast<int8_t>(static_cast<unsigned>(b) >> 8 * i));
  return c;
}
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }

#define EMULATED_MIN_MAX(type)                              \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
#undef EMULATED_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

// --- memory -----------------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* from) {
  return *from;
}
template <class T>
inline T __ldcg(const T* from) {
  return *from;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { sched_yield(); }
inline long long clock64() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// On integers only, as in the kernels. Each returns what was there.
#define EMULATED_ATOMIC(type)                                                                               \
  inline type atomicAdd(type* at, type value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }   \
  inline type atomicAnd(type* at, type value) { return __atomic_fetch_and(at, value, __ATOMIC_SEQ_CST); }   \
  inline type atomicOr(type* at, type value) { return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST); }     \
  inline type atomicXor(type* at, type value) { return __atomic_fetch_xor(at, value, __ATOMIC_SEQ_CST); }   \
  inline type atomicExch(type* at, type value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); } \
  inline type atomicCAS(type* at, type expected, type value) {                                              \
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
    return expected;                                                                                        \
  }                                                                                                         \
  inline type atomicMax(type* at, type value) {                                                             \
    type found = __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                     \
    while (found < value &&                                                                                 \
           !__atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {    \
    }                                                                                                       \
    return found;                                                                                           \
  }                                                                                                         \
  inline type atomicMin(type* at, type value) {                                                             \
    type found = __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                     \
    while (value < found &&                                                                                 \
           !__atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {    \
    }                                                                                                       \
    return found;                                                                                           \
  }
EMULATED_ATOMIC(int)
EMULATED_ATOMIC(unsigned)
EMULATED_ATOMIC(unsigned long)
EMULATED_ATOMIC(unsigned long long)
#undef EMULATED_ATOMIC

// --- what threads do together ------------------------------------------------------------------------------------------

inline void __syncthreads() { emulated_cuda::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated_cuda::meet(emulated_cuda::Waiting::sync_warp, mask); }

namespace emulated_cuda {

inline unsigned lane_number() { return current->lane; }

template <class T>
inline T shuffle(uint32_t mask, T value, uint32_t source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  Warp& warp = *current->warp;
  const unsigned lane = current->lane;
  __builtin_memcpy(&warp.operand[lane], &value, sizeof(T));
  warp.source[lane] = static_cast<uint8_t>(source);
  meet(Waiting::shuffle, mask);
  __builtin_memcpy(&value, &warp.operand[lane], sizeof(T));
  return value;
}

inline uint32_t ballot(uint32_t mask, bool predicate) {
  Warp& warp = *current->warp;
  const unsigned lane = current->lane;
  warp.operand[lane] = predicate ? 1 : 0;
  meet(Waiting::ballot, mask);
  return static_cast<uint32_t>(warp.operand[lane]);
}

// mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32: quadpair p, lanes 4 p.. and 4 p + 16.., multiplies its own 8x4 by its own
// 4x8. Products are exact, their sum and c are added in f64 and rounded to f32 once: a V100 has fewer bits than that and
// more than f32.
inline void mma_m8n8k4(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  Warp& warp = *current->warp;
  const unsigned lane = current->lane;
  warp.a[lane][0] = a0, warp.a[lane][1] = a1, warp.b[lane][0] = b0, warp.b[lane][1] = b1, warp.c[lane] = c;
  meet(Waiting::mma, 0xffffffffu);
}

inline void* dynamic_shared() { return current->block->dynamic_shared; }

}  // namespace emulated_cuda

// A width below 32 cuts the warp into segments; a source outside of the segment is the lane itself.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = emulated_cuda::lane_number(), w = static_cast<unsigned>(width);
  return emulated_cuda::shuffle(mask, value, (lane & ~(w - 1)) | (static_cast<unsigned>(source) & (w - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const unsigned lane = emulated_cuda::lane_number(), w = static_cast<unsigned>(width);
  const unsigned source = lane ^ static_cast<unsigned>(lanes);
  return emulated_cuda::shuffle(mask, value, source >= (lane & ~(w - 1)) + w ? lane : source);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = emulated_cuda::lane_number(), w = static_cast<unsigned>(width);
  return emulated_cuda::shuffle(mask, value, (lane & (w - 1)) < by ? lane : lane - by);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const unsigned lane = emulated_cuda::lane_number(), w = static_cast<unsigned>(width);
  return emulated_cuda::shuffle(mask, value, (lane & (w - 1)) + by >= w ? lane : lane + by);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) { return emulated_cuda::ballot(mask, predicate); }
inline int __any_sync(unsigned mask, bool predicate) { return emulated_cuda::ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, bool predicate) { return emulated_cuda::ballot(mask, predicate) == mask; }
