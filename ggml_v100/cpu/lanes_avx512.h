// Lanes: 16 f32 numbers in one AVX-512 register. For inclusion by files of that instruction set only.
#pragma once

// gcc 11 and 12 warn about the deliberately undefined operands inside their own header.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstddef>
#include <cstdint>

namespace v100::cpu {

namespace {

struct Lanes {
  __m512 v;
};

// Sums that fit the registers of a dense product beside its operands.
constexpr int kDenseSums = 24;
constexpr int kDenseRows = 6;
constexpr int kDeltaPanels = 2;  // of the delta rule: 4 sums each

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
// Writes memory without reading it into the caches first; p is aligned to 64 bytes. Other threads see the values after
// finish_past_caches.
inline void store_past_caches(float* p, Lanes a) { _mm512_stream_ps(p, a.v); }
inline void finish_past_caches() { _mm_sfence(); }
inline void store_first(float* p, Lanes a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Lanes splat(float a) { return {_mm512_set1_ps(a)}; }
inline Lanes load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Lanes splat_f16(uint16_t a) { return {_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(a)))}; }
inline Lanes load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Lanes load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// The low (shift 0) or high (shift 4) nibbles of 16 bytes.
inline Lanes load_nibbles(const uint8_t* p, int shift) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i shifted = _mm512_srl_epi32(wide, _mm_cvtsi32_si128(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(15)))};
}
inline void store_f16(uint16_t* p, Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// Each lane is an integer of -128..127.
inline void store_i8(int8_t* p, Lanes a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes negate(Lanes a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MIN)))};
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.v)}; }
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes power_of_two(Lanes n) {  // n integer, -126..127
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// a < bound ? 0 : b
inline Lanes zero_below(Lanes a, float bound, Lanes b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), b.v)};
}
// The lanes [begin, end) of a, the others are filler.
inline Lanes only(Lanes a, int begin, int end, float filler) {
  return {
      _mm512_mask_mov_ps(_mm512_set1_ps(filler), static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin)), a.v)};
}

inline __m128 halves_to_4(__m512 v, bool maximum) {
  const __m256 low = _mm512_castps512_ps256(v), high = _mm512_extractf32x8_ps(v, 1);
  const __m256 eight = maximum ? _mm256_max_ps(low, high) : _mm256_add_ps(low, high);
  const __m128 low4 = _mm256_castps256_ps128(eight), high4 = _mm256_extractf128_ps(eight, 1);
  return maximum ? _mm_max_ps(low4, high4) : _mm_add_ps(low4, high4);
}
// Adds (or takes the larger of) lanes 8, 4, 2, 1 apart.
inline float sum_of(Lanes a) {
  __m128 v = halves_to_4(a.v, false);
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
inline float max_of(Lanes a) {
  __m128 v = halves_to_4(a.v, true);
  v = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
}
// 1 / sqrt(a), both correctly rounded.
inline float inverse_sqrt(float a) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

// (even, odd) elements of 32 consecutive numbers, and back.
inline void load_pairs(const float* p, Lanes& even, Lanes& odd) {
  const __m512i even_index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  even.v = _mm512_permutex2var_ps(a, even_index, b);
  odd.v = _mm512_permutex2var_ps(a, _mm512_add_epi32(even_index, _mm512_set1_epi32(1)), b);
}
inline void store_pairs(float* p, Lanes even, Lanes odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, low, odd.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even.v, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd.v));
}

}  // namespace

}  // namespace v100::cpu
