// What the codecs are written in, with AVX-512: codes, bytes and scales of all 16 columns of a panel.
#pragma once

#include "cpu/lanes_avx512.h"

namespace v100::cpu {

namespace {

constexpr int kCodeColumns = 16;

struct Codes {  // a turn: 4 values of k of each column
  __m512i v;
};
struct Bytes {  // one unsigned byte of each column
  __m128i v;
};
struct Scales {  // one f32 number of each column
  __m512 v;
};

inline Codes load_codes(const std::byte* p) { return {_mm512_loadu_si512(p)}; }
inline void store_codes(uint8_t* p, Codes a) { _mm512_storeu_si512(p, a.v); }
// Shifts move bits across bytes of 16-bit words: mask afterwards. Left by `bits`, right when negative.
template <int bits>
inline Codes shifted(Codes a) {
  if constexpr (bits > 0) return {_mm512_slli_epi16(a.v, bits)};
  if constexpr (bits < 0) return {_mm512_srli_epi16(a.v, -bits)};
  return a;
}
inline Codes masked(Codes a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))}; }
// a | (b & mask)
inline Codes with_bits(Codes a, Codes b, int mask) {
  return {_mm512_ternarylogic_epi64(a.v, b.v, _mm512_set1_epi8(static_cast<char>(mask)), 0xF8)};
}
inline Codes lookup(Codes indices, const uint8_t* table) {  // indices below 16
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), indices.v)};
}

inline Bytes load_bytes(const std::byte* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm_or_si128(a.v, b.v)}; }
inline Bytes operator&(Bytes a, int mask) { return {_mm_and_si128(a.v, _mm_set1_epi8(static_cast<char>(mask)))}; }
inline Bytes operator>>(Bytes a, uint32_t bits) { return {_mm_srl_epi16(a.v, _mm_cvtsi32_si128(static_cast<int>(bits)))}; }  // mask afterwards
inline Bytes operator<<(Bytes a, uint32_t bits) { return {_mm_sll_epi16(a.v, _mm_cvtsi32_si128(static_cast<int>(bits)))}; }  // mask afterwards
inline Bytes operator-(Bytes a, int b) { return {_mm_sub_epi8(a.v, _mm_set1_epi8(static_cast<char>(b)))}; }

inline Scales load_scales(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_scales(float* p, Scales a) { _mm512_storeu_ps(p, a.v); }
inline Scales load_halves(const std::byte* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Scales from_unsigned(Bytes a) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a.v))}; }
inline Scales from_signed(Bytes a) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a.v))}; }
inline Scales operator*(Scales a, Scales b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Scales operator*(Scales a, float b) { return {_mm512_mul_ps(a.v, _mm512_set1_ps(b))}; }
inline Scales operator-(Scales a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
// Half the value of E8M0 exponents: 2^(e - 128), subnormal for the two smallest.
inline Scales half_e8m0(Bytes e) {
  const __m512i wide = _mm512_cvtepu8_epi32(e.v);
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(wide, _mm512_set1_epi32(1)), 23);
  const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x200000), wide);
  return {_mm512_castsi512_ps(
      _mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(wide, _mm512_set1_epi32(2)), subnormal))};
}
// Half the value of unsigned E4M3 numbers (bit 7 clear): as f16 they are 2^-7 of it.
inline Scales half_ue4m3(Bytes s) {
  return Scales{_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(s.v), 7))} * 128.0f;
}

}  // namespace

}  // namespace v100::cpu
