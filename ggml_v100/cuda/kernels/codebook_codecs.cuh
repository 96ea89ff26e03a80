// Codecs of the formats whose blocks hold rows of a codebook (IQ1, IQ2, IQ3). As codecs.cuh, which says what a codec is.
//
// A row is 8 values (IQ3: 4), stored as a word of 4-bit digits; bytes of a table of levels are looked up with them, 8 levels
// per byte permutation. A sign, or the shift of IQ1, is one more bit of the digit: the table has levels of both signs.
// Signs stand in a word per unit: that of value j of row l (IQ3: of pair of rows) at bit 4 j + l, so one shift and one mask put
// the eight signs of a row beside its digits. Where the file holds seven of eight signs, because an even number of them is
// minus, bits 28 to 31 are free: they hold what is left of the unit's bits, and the eighth signs are made for all rows at once.
// Tables lie in global memory and are read through L1: at most 8 KB.
#pragma once

#include "codecs.cuh"

#include "../../quants/codebook_codes.h"  // after codecs.cuh: wants the types of params.h

namespace v100::cuda {

// Digits of 2 or 3 bits as nibbles: digit p of a row at bit 4 p.
template <class Word, int n>
struct DigitTable {
  Word rows[n];
};
template <class Word, int kBits, int n>
constexpr DigitTable<Word, n> digits_of(const uint16_t (&codes)[n]) {
  DigitTable<Word, n> table{};
  for (int row = 0; row < n; ++row)
    for (int p = 0; p < static_cast<int>(2 * sizeof(Word)); ++p)
      table.rows[row] = static_cast<Word>(table.rows[row] | (codes[row] >> kBits * p & ((1 << kBits) - 1)) << 4 * p);
  return table;
}
static __device__ const DigitTable<uint32_t, 256> kIq2XxsDigits = digits_of<uint32_t, 2>(kIq2XxsCodes);
static __device__ const DigitTable<uint32_t, 512> kIq2XsDigits = digits_of<uint32_t, 2>(kIq2XsCodes);
static __device__ const DigitTable<uint32_t, 1024> kIq2SDigits = digits_of<uint32_t, 2>(kIq2SCodes);
static __device__ const DigitTable<uint16_t, 256> kIq3XxsDigits = digits_of<uint16_t, 3>(kIq3XxsCodes);
static __device__ const DigitTable<uint16_t, 512> kIq3SDigits = digits_of<uint16_t, 3>(kIq3SCodes);
static __device__ const DigitTable<uint32_t, 2048> kIq1Digits = digits_of<uint32_t, 2>(kIq1Codes);

constexpr uint32_t kEighthSigns = 0xf0000000u;

// The signs of all four rows from seven of each: the eighth makes their number even.
__device__ __forceinline__ uint32_t even_signs(uint32_t word) {
  const uint32_t seven = word & ~kEighthSigns;
  uint32_t odd = seven ^ seven >> 16;
  odd ^= odd >> 8;
  odd ^= odd >> 4;
  return seven | odd << 28;
}
// Bit `at` of each nibble: the signs of row l.
template <int at>
__device__ __forceinline__ uint32_t signs_of(uint32_t signs, int l) {
  return (at >= l ? signs << (at - l) : signs >> (l - at)) & (0x11111111u << at);
}

// Eight values of levels of the table's eight bytes (plus 128), times 2^-kShift and d; nibbles in order.
template <int kShift>
__device__ __forceinline__ void decode_eight_levels(uint32_t low, uint32_t high, uint32_t word, __half2 d,
                                                    uint32_t* w) {
  const __half2 part = __float2half2_rn(1.0f / (1 << kShift)), offset = __float2half2_rn(-1152.0f / (1 << kShift));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bytes = __byte_perm(low, high, half == 0 ? word : word >> 16);
    w[2 * half] = as_bits(__hmul2(__hfma2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4140)), part, offset), d));
    w[2 * half + 1] = as_bits(__hmul2(__hfma2(as_half2(__byte_perm(bytes, 0x64646464u, 0x4342)), part, offset), d));
  }
}

// d * (2 s + 1) for a scale of 4 bits (3 of IQ1).
__device__ __forceinline__ __half2 odd_scale(uint32_t d, uint32_t s) {
  return __hmul2(low_twice(d), integer_twice(2 * s + 1));
}

// --- packing ----------------------------------------------------------------------------------------------------------

// Signs of rows l as bytes of a word, value j at bit j of byte l.
__device__ __forceinline__ uint32_t spread_signs(uint32_t bytes) {
  uint32_t word = 0;
  for (int l = 0; l < 4; ++l)
    for (int j = 0; j < 8; ++j) word |= (bytes >> (8 * l + j) & 1u) << (4 * j + l);
  return word;
}
// The same of seven signs each, row l at bit 7 l, with what else the word is to hold.
__device__ __forceinline__ uint32_t spread_seven(uint32_t fields, uint32_t rest) {
  uint32_t bytes = 0;
  for (int l = 0; l < 4; ++l) bytes |= (fields >> 7 * l & 127u) << 8 * l;
  return spread_signs(bytes) | rest << 28;
}

// --- IQ2: levels 8, 25, 43; value d * (2 s + 1) / 8 * level -------------------------------------------------------------

constexpr uint32_t kIq2Plus = 0x80ab9988u, kIq2Minus = 0x80556778u;  // by digit; the fourth is not used

// IQ2_XXS: d [f16], then of each unit 4 indices [bytes] and a word: four times 7 signs, a scale.
struct IQ2_XXS : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 66, kUnits = 8, kHeadBytes = 64, kUnitBytes = 256;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 word;  // indices; signs and scale
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) { return {stream_8(at + 8 * lane)}; }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t signs = even_signs(unit.word.y);
    const __half2 d = odd_scale(header.d, unit.word.y >> 28);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t digits = __ldg(&kIq2XxsDigits.rows[unit.word.x >> 8 * l & 255u]);
      decode_eight_levels<3>(kIq2Plus, kIq2Minus, digits | signs_of<2>(signs, l), d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      const uint32_t word = get_4(block + 6 + 8 * u);
      put_4(record + kHeadBytes + kUnitBytes * u + 8 * lane, get_4(block + 2 + 8 * u));
      put_4(record + kHeadBytes + kUnitBytes * u + 4 + 8 * lane, spread_seven(word, word >> 28));
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// IQ2_XS: d, 32 words of a 9-bit index and 7 signs, 8 bytes of two scales, of 16 values each.
struct IQ2_XS : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 74, kUnits = 8, kHeadBytes = 64, kUnitBytes = 288;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 word;       // indices; signs and the indices' upper bits
    uint32_t scales;  // a nibble per half
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_1(at + 256 + lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t signs = even_signs(unit.word.y);
    const __half2 d = odd_scale(header.d, unit.scales >> 4 * g & 15u);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t row = (unit.word.x >> 8 * l & 255u) | (unit.word.y >> (28 + l) & 1u) << 8;
      const uint32_t digits = __ldg(&kIq2XsDigits.rows[row]);
      decode_eight_levels<3>(kIq2Plus, kIq2Minus, digits | signs_of<2>(signs, l), d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint32_t indices = 0, upper = 0, fields = 0;
      for (int l = 0; l < 4; ++l) {
        const uint32_t word = get_2(block + 2 + 8 * u + 2 * l);
        indices |= (word & 255u) << 8 * l;
        upper |= (word >> 8 & 1u) << l;
        fields |= word >> 9 << 7 * l;
      }
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_4(at + 8 * lane, indices);
      put_4(at + 4 + 8 * lane, spread_seven(fields, upper));
      at[256 + lane] = block[66 + u];
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// IQ2_S: d, 32 indices [bytes], 32 bytes of eight signs, 8 bytes of the indices' upper two bits, 8 bytes of two scales.
struct IQ2_S : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 82, kUnits = 8, kHeadBytes = 64, kUnitBytes = 320;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 word;      // indices; signs
    uint32_t extra;  // upper bits, scales
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_2(at + 256 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const __half2 d = odd_scale(header.d, unit.extra >> (8 + 4 * g) & 15u);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t row = (unit.word.x >> 8 * l & 255u) | (unit.extra >> 2 * l & 3u) << 8;
      const uint32_t digits = __ldg(&kIq2SDigits.rows[row]);
      decode_eight_levels<3>(kIq2Plus, kIq2Minus, digits | signs_of<2>(unit.word.y, l), d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_4(at + 8 * lane, get_4(block + 2 + 4 * u));
      put_4(at + 4 + 8 * lane, spread_signs(get_4(block + 34 + 4 * u)));
      at[256 + 2 * lane] = block[66 + u];
      at[257 + 2 * lane] = block[74 + u];
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// --- IQ3: eight levels, so a digit with its sign takes all sixteen of a LevelTable --------------------------------------

// Levels 4 12 20 28 36 44 52 62, and 1 3 5 7 9 11 13 15, and their negatives.
__device__ __forceinline__ LevelTable iq3_xxs_levels() {
  return {{0x9c948c84u, 0xbeb4aca4u, 0x646c747cu, 0x424c545cu}};
}
__device__ __forceinline__ LevelTable iq3_s_levels() { return {{0x87858381u, 0x8f8d8b89u, 0x797b7d7fu, 0x71737577u}}; }

// IQ3_XXS: d, 64 indices [bytes], then a word of each unit: four times 7 signs, a scale. Value d * (2 s + 1) / 4 * level.
struct IQ3_XXS : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 98, kUnits = 8, kHeadBytes = 64, kUnitBytes = 384;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 indices;
    uint32_t word;  // signs and scale
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_4(at + 256 + 4 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t signs = even_signs(unit.word), indices = g == 0 ? unit.indices.x : unit.indices.y;
    // Levels are 4 times too large. The quarter of d * (2 s + 1) may be subnormal, that of a level is exact.
    const __half2 d = odd_scale(header.d, unit.word >> 28);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t pair = indices >> 16 * (l % 2);
      const uint32_t digits = __ldg(&kIq3XxsDigits.rows[pair & 255u]) |
                              static_cast<uint32_t>(__ldg(&kIq3XxsDigits.rows[pair >> 8 & 255u])) << 16;
      decode_levels<2>(iq3_xxs_levels(), digits | signs_of<3>(signs, l), d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      const uint32_t word = get_4(block + 66 + 4 * u);
      put_4(at + 8 * lane, get_4(block + 2 + 8 * u));
      put_4(at + 4 + 8 * lane, get_4(block + 6 + 8 * u));
      put_4(at + 256 + 4 * lane, spread_seven(word, word >> 28));
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// IQ3_S: d, 64 indices [bytes], 8 bytes of their upper bits, 32 bytes of eight signs, 4 bytes of two units' scales. Value
// d * (2 s + 1) * level.
struct IQ3_S : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 110, kUnits = 8, kHeadBytes = 192, kUnitBytes = 416;
  struct Header {
    uint32_t d;
    uint32_t scales;  // a nibble per unit
  };
  struct Unit {
    uint2 indices;
    uint32_t signs;
    uint32_t upper;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane), stream_4(record + 64 + 4 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_4(at + 256 + 4 * lane), stream_1(at + 384 + lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int index, uint32_t (&w)[8]) {
    const uint32_t indices = g == 0 ? unit.indices.x : unit.indices.y;
    const __half2 d = odd_scale(header.d, header.scales >> 4 * index & 15u);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t pair = indices >> 16 * (l % 2), upper = unit.upper >> 2 * l;
      const uint32_t digits = __ldg(&kIq3SDigits.rows[(pair & 255u) | (upper & 1u) << 8]) |
                              static_cast<uint32_t>(__ldg(&kIq3SDigits.rows[(pair >> 8 & 255u) | (upper & 2u) << 7]))
                                  << 16;
      decode_levels<0>(iq3_s_levels(), digits | signs_of<3>(unit.signs, l), d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_4(at + 8 * lane, get_4(block + 2 + 8 * u));
      put_4(at + 4 + 8 * lane, get_4(block + 6 + 8 * u));
      put_4(at + 256 + 4 * lane, spread_signs(get_4(block + 74 + 4 * u)));
      at[384 + lane] = block[66 + u];
    }
    put_2(record + 2 * lane, get_2(block));
    put_4(record + 64 + 4 * lane, get_4(block + 106));
  }
};

// --- IQ1: levels -1, 0, 1, shifted by an eighth: value d * (2 s + 1) / 8 * (8 level + 1 or - 1) -------------------------

constexpr uint32_t kIq1Up = 0x80898179u, kIq1Down = 0x80877f77u;  // by digit; the fourth is not used

// IQ1_S: d, 32 indices [bytes], of each unit 2 bytes: four times three upper bits of an index, a scale of 3 bits, a shift.
struct IQ1_S : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 50, kUnits = 8, kHeadBytes = 64, kUnitBytes = 192;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint32_t indices, upper;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_4(at + 4 * lane), stream_2(at + 128 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const __half2 d = odd_scale(header.d, unit.upper >> 12 & 7u);
    const uint32_t down = (unit.upper >> 15) * 0x44444444u;
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t digits = __ldg(&kIq1Digits.rows[(unit.indices >> 8 * l & 255u) | (unit.upper >> 3 * l & 7u) << 8]);
      decode_eight_levels<3>(kIq1Up, kIq1Down, digits | down, d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_4(at + 4 * lane, get_4(block + 2 + 4 * u));
      put_2(at + 128 + 2 * lane, get_2(block + 34 + 2 * u));
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// IQ1_M: 32 indices [bytes], of each row a nibble: three upper bits of its index, its shift; then 4 halves of four scales of 3
// bits and 4 bits of d [f16].
struct IQ1_M : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 56, kUnits = 8, kHeadBytes = 256, kUnitBytes = 192;
  struct Header {
    uint32_t d;
    uint32_t scales;  // of units 0 to 4 at bit 6 u: 3 bits per half
    uint32_t more;    // of units 5 to 7: the scales' bits 32 to 47
  };
  struct Unit {
    uint32_t indices, upper;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane), stream_4(record + 64 + 4 * lane), stream_2(record + 192 + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_4(at + 4 * lane), stream_2(at + 128 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int index, uint32_t (&w)[8]) {
    const int bit = 6 * index + 3 * g;
    const uint32_t scales = bit < 32 ? __funnelshift_r(header.scales, header.more, bit) : header.more >> (bit - 32);
    const __half2 d = odd_scale(header.d, scales & 7u);
#pragma unroll
    for (int l = 2 * g; l < 2 * g + 2; ++l) {
      const uint32_t nibble = unit.upper >> 4 * l;
      const uint32_t digits = __ldg(&kIq1Digits.rows[(unit.indices >> 8 * l & 255u) | (nibble & 7u) << 8]);
      decode_eight_levels<3>(kIq1Up, kIq1Down, digits | (nibble >> 3 & 1u) * 0x44444444u, d, w + 4 * (l % 2));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_4(at + 4 * lane, get_4(block + 4 * u));
      put_2(at + 128 + 2 * lane, get_2(block + 32 + 2 * u));
    }
    uint32_t d = 0;
    uint64_t scales = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = get_2(block + 48 + 2 * i);
      d |= word >> 12 << 4 * i;
      scales |= static_cast<uint64_t>(word & 4095u) << 12 * i;
    }
    put_2(record + 2 * lane, d);
    put_4(record + 64 + 4 * lane, static_cast<uint32_t>(scales));
    put_2(record + 192 + 2 * lane, static_cast<uint32_t>(scales >> 32));
  }
};

}  // namespace v100::cuda
