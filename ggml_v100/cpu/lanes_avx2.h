// Lanes: 16 f32 numbers in two AVX registers. For inclusion by files of that instruction set only.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace v100::cpu {

namespace {

struct Lanes {
  __m256 low, high;
};

// Sums that fit the 16 registers of a dense product beside its operands.
constexpr int kDenseSums = 6;
constexpr int kDenseRows = 6;
constexpr int kDeltaPanels = 1;  // of the delta rule: 4 sums each

// All ones in lanes [begin, end) of the eight that start at lane `first`.
inline __m256i lane_range(int first, int begin, int end) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                          _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
}

inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, lane_range(0, 0, n)), _mm256_maskload_ps(p + 8, lane_range(8, 0, n))};
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
// Writes memory without reading it into the caches first; p is aligned to 64 bytes. Other threads see the values after
// finish_past_caches.
inline void store_past_caches(float* p, Lanes a) {
  _mm256_stream_ps(p, a.low);
  _mm256_stream_ps(p + 8, a.high);
}
inline void finish_past_caches() { _mm_sfence(); }
inline void store_first(float* p, Lanes a, int n) {
  _mm256_maskstore_ps(p, lane_range(0, 0, n), a.low);
  _mm256_maskstore_ps(p + 8, lane_range(8, 0, n), a.high);
}
inline Lanes splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Lanes load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
inline Lanes splat_f16(uint16_t a) {
  const __m256 wide = _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(a)));
  return {wide, wide};
}
inline Lanes load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p + 8)), 16))};
}
inline Lanes load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p + 8)))};
}
inline __m256 nibbles_of_8(const uint8_t* p, int shift) {
  const __m256i shifted = _mm256_srl_epi32(_mm256_cvtepu8_epi32(load_64(p)), _mm_cvtsi32_si128(shift));
  return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
}
// The low (shift 0) or high (shift 4) nibbles of 16 bytes.
inline Lanes load_nibbles(const uint8_t* p, int shift) { return {nibbles_of_8(p, shift), nibbles_of_8(p + 8, shift)}; }
inline void store_f16(uint16_t* p, Lanes a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
// Each lane is an integer of -128..127.
inline void store_i8(int8_t* p, Lanes a) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));  // lanes 0-3 8-11 4-7 12-15
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}

inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes negate(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.low, sign), _mm256_xor_ps(a.high, sign)};
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes larger(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Lanes absolute(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Lanes round_even(Lanes a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kMode), _mm256_round_ps(a.high, kMode)};
}
inline __m256 power_of_two_8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes power_of_two(Lanes n) { return {power_of_two_8(n.low), power_of_two_8(n.high)}; }  // n integer, -126..127
// a < bound ? 0 : b
inline Lanes zero_below(Lanes a, float bound, Lanes b) {
  const __m256 limit = _mm256_set1_ps(bound);
  return {_mm256_and_ps(_mm256_cmp_ps(a.low, limit, _CMP_NLT_UQ), b.low),
          _mm256_and_ps(_mm256_cmp_ps(a.high, limit, _CMP_NLT_UQ), b.high)};
}
// The lanes [begin, end) of a, the others are filler.
inline Lanes only(Lanes a, int begin, int end, float filler) {
  const __m256 fill = _mm256_set1_ps(filler);
  return {_mm256_blendv_ps(fill, a.low, _mm256_castsi256_ps(lane_range(0, begin, end))),
          _mm256_blendv_ps(fill, a.high, _mm256_castsi256_ps(lane_range(8, begin, end)))};
}

// Adds (or takes the larger of) lanes 8, 4, 2, 1 apart.
inline float sum_of(Lanes a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
inline float max_of(Lanes a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  __m128 v = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  v = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
}
// 1 / sqrt(a), both correctly rounded.
inline float inverse_sqrt(float a) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

inline __m256 in_order(__m256 v) {  // 64-bit quarters 0 2 1 3 to 0 1 2 3
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xD8));
}
// (even, odd) elements of 32 consecutive numbers, and back.
inline void load_pairs(const float* p, Lanes& even, Lanes& odd) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8), c = _mm256_loadu_ps(p + 16),
               d = _mm256_loadu_ps(p + 24);
  even = {in_order(_mm256_shuffle_ps(a, b, 0x88)), in_order(_mm256_shuffle_ps(c, d, 0x88))};
  odd = {in_order(_mm256_shuffle_ps(a, b, 0xDD)), in_order(_mm256_shuffle_ps(c, d, 0xDD))};
}
inline void store_8_pairs(float* p, __m256 even, __m256 odd) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
inline void store_pairs(float* p, Lanes even, Lanes odd) {
  store_8_pairs(p, even.low, odd.low);
  store_8_pairs(p + 16, even.high, odd.high);
}

}  // namespace

}  // namespace v100::cpu
