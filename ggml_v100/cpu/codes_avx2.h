// What the codecs are written in, with AVX2: codes, bytes and scales of 8 columns, half a panel.
#pragma once

#include "cpu/lanes_avx2.h"

namespace v100::cpu {

namespace {

constexpr int kCodeColumns = 8;

struct Codes {  // a turn: 4 values of k of each column
  __m256i v;
};
struct Bytes {  // one unsigned byte of each column
  __m128i v;
};
struct Scales {  // one f32 number of each column
  __m256 v;
};

inline Codes load_codes(const std::byte* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void store_codes(uint8_t* p, Codes a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
// Shifts move bits across bytes of 16-bit words: mask afterwards. Left by `bits`, right when negative.
template <int bits>
inline Codes shifted(Codes a) {
  if constexpr (bits > 0) return {_mm256_slli_epi16(a.v, bits)};
  if constexpr (bits < 0) return {_mm256_srli_epi16(a.v, -bits)};
  return a;
}
inline Codes masked(Codes a, int mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(static_cast<char>(mask)))}; }
// a | (b & mask)
inline Codes with_bits(Codes a, Codes b, int mask) { return {_mm256_or_si256(a.v, masked(b, mask).v)}; }
inline Codes lookup(Codes indices, const uint8_t* table) {  // indices below 16
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_128(table)), indices.v)};
}

inline Codes plus(Codes a, int b) { return {_mm256_add_epi8(a.v, _mm256_set1_epi8(static_cast<char>(b)))}; }
// Products of bytes with a constant, modulo 256.
inline Codes times(Codes a, int factor) {
  const __m256i even = _mm256_set1_epi16(255), by = _mm256_set1_epi16(static_cast<int16_t>(factor));
  return {_mm256_or_si256(_mm256_and_si256(even, _mm256_mullo_epi16(a.v, by)),
                          _mm256_mullo_epi16(_mm256_andnot_si256(even, a.v), by))};
}
// 3 a / 256, the first digit of a fraction in base 3.
inline Codes first_trit(Codes a) {
  const auto at_least = [&](int bound) {
    return _mm256_cmpeq_epi8(_mm256_max_epu8(a.v, _mm256_set1_epi8(static_cast<char>(bound))), a.v);
  };
  return {_mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(at_least(86), at_least(171)))};
}

inline Bytes load_bytes(const std::byte* p) { return {load_64(p)}; }
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
  const __m256i repeat =
      _mm256_set_epi32(0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0x00000000);
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(a.v), repeat)};
}
// q + 128, or -q + 128 where value t's bit first + t of the column's spread signs is set.
template <int first>
inline Codes with_signs(Codes q, Codes signs) {
  const __m256i bits = _mm256_set1_epi32(first == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
  const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(signs.v, bits), bits);
  return plus({_mm256_sub_epi8(_mm256_xor_si256(q.v, negative), negative)}, 128);
}

struct Indices {  // of a codebook's rows, one for each column
  alignas(16) uint16_t v[kCodeColumns];
};
inline Indices indices(Bytes low, Bytes high) {
  Indices y;
  _mm_store_si128(reinterpret_cast<__m128i*>(y.v), _mm_unpacklo_epi8(low.v, high.v));
  asm("" : "+m"(y.v));  // or gcc extracts them one by one from the register, which is slower
  return y;
}
// Rows of 8 bytes: values 0..3 and 4..7 of each column. Single loads are twice as fast as gathers (Zen 4).
inline void look_up_8(const void* codebook, const Indices& at, Codes& low, Codes& high) {
  const auto* rows = static_cast<const long long*>(codebook);
  const __m256 a = _mm256_castsi256_ps(_mm256_set_epi64x(rows[at.v[5]], rows[at.v[4]], rows[at.v[1]], rows[at.v[0]]));
  const __m256 b = _mm256_castsi256_ps(_mm256_set_epi64x(rows[at.v[7]], rows[at.v[6]], rows[at.v[3]], rows[at.v[2]]));
  low.v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
  high.v = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD));
}
// Rows of 4 bytes.
inline Codes look_up_4(const void* codebook, const Indices& at) {
  const auto* rows = static_cast<const int*>(codebook);
  return {_mm256_set_epi32(rows[at.v[7]], rows[at.v[6]], rows[at.v[5]], rows[at.v[4]], rows[at.v[3]], rows[at.v[2]],
                           rows[at.v[1]], rows[at.v[0]])};
}

inline Scales load_scales(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store_scales(float* p, Scales a) { _mm256_storeu_ps(p, a.v); }
inline Scales load_halves(const std::byte* p) { return {_mm256_cvtph_ps(load_128(p))}; }
inline Scales from_unsigned(Bytes a) { return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a.v))}; }
inline Scales from_signed(Bytes a) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a.v))}; }
inline Scales operator*(Scales a, Scales b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Scales operator*(Scales a, float b) { return {_mm256_mul_ps(a.v, _mm256_set1_ps(b))}; }
inline Scales operator-(Scales a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
// Half the value of E8M0 exponents: 2^(e - 128), subnormal for the two smallest.
inline Scales half_e8m0(Bytes e) {
  const __m256i wide = _mm256_cvtepu8_epi32(e.v);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(wide, _mm256_set1_epi32(1)), 23);
  const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), wide);
  const __m256i is_normal = _mm256_cmpgt_epi32(wide, _mm256_set1_epi32(1));
  return {_mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal))};
}
// Half the value of unsigned E4M3 numbers (bit 7 clear): as f16 they are 2^-7 of it.
inline Scales half_ue4m3(Bytes s) {
  return Scales{_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(s.v), 7))} * 128.0f;
}

}  // namespace

}  // namespace v100::cpu
