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

inline Codes plus(Codes a, int b) { return {_mm512_add_epi8(a.v, _mm512_set1_epi8(static_cast<char>(b)))}; }
// Products of bytes with a constant, modulo 256.
inline Codes times(Codes a, int factor) {
  const __m512i even = _mm512_set1_epi16(255), by = _mm512_set1_epi16(static_cast<int16_t>(factor));
  const __m512i high = _mm512_mullo_epi16(_mm512_andnot_si512(even, a.v), by);
  return {_mm512_ternarylogic_epi64(high, _mm512_mullo_epi16(a.v, by), even, 0xF8)};
}
// 3 a / 256, the first digit of a fraction in base 3.
inline Codes first_trit(Codes a) {
  const __m512i one = _mm512_maskz_set1_epi8(_mm512_cmpge_epu8_mask(a.v, _mm512_set1_epi8(86)), 1);
  return {_mm512_mask_set1_epi8(one, _mm512_cmpge_epu8_mask(a.v, _mm512_set1_epi8(static_cast<char>(171))), 2)};
}

inline Bytes load_bytes(const std::byte* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm_or_si128(a.v, b.v)}; }
inline Bytes operator^(Bytes a, Bytes b) { return {_mm_xor_si128(a.v, b.v)}; }
inline Bytes operator&(Bytes a, int mask) { return {_mm_and_si128(a.v, _mm_set1_epi8(static_cast<char>(mask)))}; }
inline Bytes operator>>(Bytes a, uint32_t bits) {
  return {_mm_srl_epi16(a.v, _mm_cvtsi32_si128(static_cast<int>(bits)))};
}  // mask afterwards
inline Bytes operator<<(Bytes a, uint32_t bits) {
  return {_mm_sll_epi16(a.v, _mm_cvtsi32_si128(static_cast<int>(bits)))};
}  // mask afterwards
inline Bytes operator+(Bytes a, int b) { return {_mm_add_epi8(a.v, _mm_set1_epi8(static_cast<char>(b)))}; }

// Each column's byte in all four values of its turn.
inline Codes spread(Bytes a) {
  const __m512i repeat =
      _mm512_set_epi32(0x0F0F0F0F, 0x0E0E0E0E, 0x0D0D0D0D, 0x0C0C0C0C, 0x0B0B0B0B, 0x0A0A0A0A, 0x09090909, 0x08080808,
                       0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0x00000000);
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(a.v), repeat)};
}
// q + 128, or -q + 128 where value t's bit first + t of the column's spread signs is set.
template <int first>
inline Codes with_signs(Codes q, Codes signs) {
  const __m512i bits = _mm512_set1_epi32(first == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
  const __m512i bias = _mm512_set1_epi8(-128);
  return {_mm512_mask_sub_epi8(_mm512_add_epi8(bias, q.v), _mm512_test_epi8_mask(signs.v, bits), bias, q.v)};
}

struct Indices {  // of a codebook's rows, one for each column
  alignas(32) uint16_t v[kCodeColumns];
};
inline Indices indices(Bytes low, Bytes high) {
  Indices y;
  _mm_store_si128(reinterpret_cast<__m128i*>(y.v), _mm_unpacklo_epi8(low.v, high.v));
  _mm_store_si128(reinterpret_cast<__m128i*>(y.v + 8), _mm_unpackhi_epi8(low.v, high.v));
  asm("" : "+m"(y.v));  // or gcc extracts them one by one from the registers, which is slower
  return y;
}
// Rows of 8 bytes: values 0..3 and 4..7 of each column. Single loads are twice as fast as gathers (Zen 4).
inline void look_up_8(const void* codebook, const Indices& at, Codes& low, Codes& high) {
  const auto* rows = static_cast<const long long*>(codebook);
  const __m512i first = _mm512_set_epi64(rows[at.v[7]], rows[at.v[6]], rows[at.v[5]], rows[at.v[4]], rows[at.v[3]],
                                         rows[at.v[2]], rows[at.v[1]], rows[at.v[0]]);
  const __m512i second = _mm512_set_epi64(rows[at.v[15]], rows[at.v[14]], rows[at.v[13]], rows[at.v[12]],
                                          rows[at.v[11]], rows[at.v[10]], rows[at.v[9]], rows[at.v[8]]);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  low.v = _mm512_permutex2var_epi32(first, even, second);
  high.v = _mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
}
// Rows of 4 bytes.
inline Codes look_up_4(const void* codebook, const Indices& at) {
  const auto* rows = static_cast<const int*>(codebook);
  return {_mm512_set_epi32(rows[at.v[15]], rows[at.v[14]], rows[at.v[13]], rows[at.v[12]], rows[at.v[11]],
                           rows[at.v[10]], rows[at.v[9]], rows[at.v[8]], rows[at.v[7]], rows[at.v[6]], rows[at.v[5]],
                           rows[at.v[4]], rows[at.v[3]], rows[at.v[2]], rows[at.v[1]], rows[at.v[0]])};
}

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
