// How the weights of each type lie on the device, and how a lane turns 16 of them into f16 pairs. One codec per type.
//
// A matrix [N, K] is [N / 32][K / block] records of 32 * block_bytes bytes: as many bytes as in the file. A record holds one
// block of 32 rows; lane `lane_of_column(n % 32)` owns row n. It begins with the header (what belongs to the block), one
// stretch per part with all lanes side by side; then come its units of 32 values, each the same way: codes first, then what
// belongs to the unit. So a warp reads a unit in a few requests of 16, 8, 4, 2 or 1 adjacent bytes per lane, front to back.
// N is filled up to a multiple of 32 with rows of zero bytes.
//
// Codes become halves without a conversion: a small integer or'ed into the bits of 1024.0 is 1024 + integer, exactly, and
// subtracting gives the integer. Bits stand so that one mask takes a pair of neighbours out of a word:
//   4 bits   word j holds k = 8j..8j+7; k stands in nibble (k % 8) / 2 + 4 * (k % 2)
//   2 bits   word j holds k = 16j..16j+15; k stands at bit 2 * (k % 16 / 2) + 16 * (k % 2)
//   above    the fifth bit of Q5, the third of Q3: one word; the upper two of Q6: two words. See below.
// Where a shift leaves the integer times 4, 16 or 64, the multiplication of the fused subtraction undoes it, exactly.
//
// Every codec has
//   kValues, kBytes        of a block in the file; kUnits of a record
//   kHeadBytes, kUnitBytes of a record: unit i begins at kHeadBytes + i * kUnitBytes
//   kLaneBytes             16 where head and unit begin with 16 bytes per lane, else 0: what lies between the pointers that
//                          neighbouring lanes pass to load_header and load_unit. A loop needs no sum for those bytes then
//   Header, load_header    what the record's head says to a lane
//   Unit, load_unit        a unit's bytes of a lane
//   end_unit               what a lane does with the header after each unit: units are decoded in order. Nothing, for most
//   decode<g>              the 16 values of half g of a unit, as w[8] pairs (k, k + 1): rounded once per operation below
//   pack                   a row's block from the file into its lane's bytes of the record
#pragma once

#include "logic.cuh"
#include "memory.cuh"
#include "mma_sm70.cuh"

namespace v100::cuda {

constexpr int kUnitValues = 32;
constexpr uint32_t kMagic = 0x64006400u;  // 1024, 1024

__device__ __forceinline__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t as_bits(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
// The low or high half of a word, twice.
__device__ __forceinline__ __half2 low_twice(uint32_t word) { return as_half2(__byte_perm(word, 0, 0x1010)); }
__device__ __forceinline__ __half2 high_twice(uint32_t word) { return as_half2(__byte_perm(word, 0, 0x3232)); }
// An integer of 0..255, twice.
__device__ __forceinline__ __half2 integer_twice(uint32_t value) {
  return __hsub2(as_half2(__byte_perm(value, kMagic, 0x5050)), as_half2(kMagic));
}
__device__ __forceinline__ uint32_t rotate_right(uint32_t word, int by) { return __funnelshift_r(word, word, by); }

// Pair p (0..3) of a word of eight 4-bit codes, with `extra` bits already at 4.. (even p) or 8.. (odd p), minus offset.
template <int p, int kOffset>
__device__ __forceinline__ __half2 pair_of_nibbles(uint32_t word, uint32_t extra) {
  const uint32_t shifted = p >= 2 ? word >> 8 : word;
  if (p % 2 == 0)
    return __hsub2(as_half2((shifted & 0x000f000fu) | kMagic | extra), __float2half2_rn(1024.0f + kOffset));
  return __hfma2(as_half2((shifted & 0x00f000f0u) | kMagic | extra), __float2half2_rn(0.0625f),
                 __float2half2_rn(-(64.0f + kOffset)));
}
// The same with `base`, kMagic and the extra bits: an instruction less, for a register that keeps kMagic.
template <int p, int kOffset>
__device__ __forceinline__ __half2 pair_over(uint32_t word, uint32_t base) {
  const uint32_t shifted = p >= 2 ? word >> 8 : word;
  if (p % 2 == 0) return __hsub2(as_half2(and_or<0x000f000fu>(shifted, base)), __float2half2_rn(1024.0f + kOffset));
  return __hfma2(as_half2(and_or<0x00f000f0u>(shifted, base)), __float2half2_rn(0.0625f),
                 __float2half2_rn(-(64.0f + kOffset)));
}

// Pair p (0..7) of a word of sixteen 2-bit codes, minus offset. `base` is kMagic and an extra bit at 2 + 2 * (p % 4).
template <int p, int kOffset>
__device__ __forceinline__ __half2 pair_of_two_bits(uint32_t word, uint32_t base = kMagic) {
  constexpr int r = p % 4;
  const uint32_t bits = and_or<(0x00030003u << 2 * r)>(p >= 4 ? word >> 8 : word, base);
  constexpr float kPart = 1.0f / (1 << 2 * r);
  if (r == 0) return __hsub2(as_half2(bits), __float2half2_rn(1024.0f + kOffset));
  return __hfma2(as_half2(bits), __float2half2_rn(kPart), __float2half2_rn(-(1024.0f * kPart + kOffset)));
}

// Calls body<p>() for p = 0..n-1: pairs need their number at compile time.
template <int n, int p = 0, class Body>
__device__ __forceinline__ void for_each(const Body& body) {
  if constexpr (p < n) {
    body.template operator()<p>();
    for_each<n, p + 1>(body);
  }
}

// --- packing: the inverse, one value after the other ---------------------------------------------------------------

__device__ __forceinline__ int nibble_place(int k) { return 4 * ((k % 8) / 2 + 4 * (k % 2)); }     // in word k / 8
__device__ __forceinline__ int two_bit_place(int k) { return 2 * ((k % 16) / 2) + 16 * (k % 2); }  // in word k / 16
// The fifth bit: after a rotation by j + 8 q the bits of word j's pairs 2q and 2q + 1 stand at 4 and 8.
__device__ __forceinline__ int fifth_bit_place(int k) {
  const int j = k / 8, p = k % 8 / 2;
  return (4 + 4 * (p % 2) + 16 * (k % 2) + j + 8 * (p / 2)) % 32;
}
// The upper two bits of six: word q; after a rotation by 2 (j % 2) + 8 (j / 2) they stand at 4 and 8.
__device__ __forceinline__ int upper_bits_place(int k) {
  const int j = k / 8, p = k % 8 / 2;
  return (4 + 4 * (p % 2) + 16 * (k % 2) + 2 * (j % 2) + 8 * (j / 2)) % 32;
}
// The third bit: after a rotation by j + 8 q the bits of word j's pairs 4q + r stand at 2 + 2 r.
__device__ __forceinline__ int third_bit_place(int k) {
  const int j = k / 16, p = k % 16 / 2;
  return (2 + 2 * (p % 4) + 16 * (k % 2) + j + 8 * (p / 4)) % 32;
}

__device__ __forceinline__ void put_2(uint8_t* to, uint32_t value) {
  *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(value);
}
__device__ __forceinline__ void put_4(uint8_t* to, uint32_t value) { *reinterpret_cast<uint32_t*>(to) = value; }
__device__ __forceinline__ uint32_t get_2(const uint8_t* from) { return from[0] | from[1] << 8; }
__device__ __forceinline__ uint32_t get_4(const uint8_t* from) { return get_2(from) | get_2(from + 2) << 16; }

template <class CodeOf>
__device__ __forceinline__ void put_nibbles(uint8_t* to, const CodeOf& code) {
  for (int j = 0; j < 4; ++j) {
    uint32_t word = 0;
    for (int k = 8 * j; k < 8 * j + 8; ++k) word |= (code(k) & 15u) << nibble_place(k);
    put_4(to + 4 * j, word);
  }
}
template <class CodeOf>
__device__ __forceinline__ void put_two_bits(uint8_t* to, const CodeOf& code) {
  for (int j = 0; j < 2; ++j) {
    uint32_t word = 0;
    for (int k = 16 * j; k < 16 * j + 16; ++k) word |= (code(k) & 3u) << two_bit_place(k);
    put_4(to + 4 * j, word);
  }
}

// --- codecs of blocks of 32 values ---------------------------------------------------------------------------------

struct NoHeader {};
// Of codecs whose header stays as it was loaded.
struct SteadyHeader {
  static constexpr int kLaneBytes = 0;  // unless a codec says otherwise
  template <class Header>
  static __device__ __forceinline__ void end_unit(Header&, int) {}
};

// d [f16], 32 int8. On the device codes are q + 128.
struct Q8_0 : SteadyHeader {
  static constexpr int kValues = 32, kBytes = 34, kUnits = 1, kHeadBytes = 0, kUnitBytes = 32 * kBytes;
  using Header = NoHeader;
  struct Unit {
    uint4 codes[2];
    uint32_t d;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t*, int) { return {}; }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {{stream_16(at + 16 * lane), stream_16(at + 512 + 16 * lane)}, stream_2(at + 1024 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header&, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t words[4] = {unit.codes[g].x, unit.codes[g].y, unit.codes[g].z, unit.codes[g].w};
    const __half2 d = low_twice(unit.d), offset = __float2half2_rn(1152.0f);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[2 * j] = as_bits(__hmul2(__hsub2(as_half2(__byte_perm(words[j], 0x64646464u, 0x4140)), offset), d));
      w[2 * j + 1] = as_bits(__hmul2(__hsub2(as_half2(__byte_perm(words[j], 0x64646464u, 0x4342)), offset), d));
    }
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int k = 0; k < 32; ++k) record[512 * (k / 16) + 16 * lane + k % 16] = block[2 + k] ^ 0x80;
    put_2(record + 1024 + 2 * lane, get_2(block));
  }
};

// 4-bit codes with one scale and perhaps a minimum; 5-bit codes with their fifth bits in a word.
//   Q4_0  d, 16 bytes: code k in the low nibble of byte k, k + 16 in the high       value d * (q - 8)
//   Q4_1  d, m, 16 bytes                                                            value d * q + m
//   Q5_0  d, 4 bytes of fifth bits, 16 bytes                                        value d * (q - 16)
//   Q5_1  d, m, 4 bytes, 16 bytes                                                   value d * q + m
template <bool kMinimum, bool kFifthBit>
struct SmallBlocks : SteadyHeader {
  static constexpr int kScaleBytes = kMinimum ? 4 : 2;
  static constexpr int kValues = 32, kBytes = kScaleBytes + (kFifthBit ? 4 : 0) + 16;
  static constexpr int kUnits = 1, kHeadBytes = 0, kUnitBytes = 32 * kBytes, kLaneBytes = 16;
  static constexpr int kOffset = kMinimum ? 0 : kFifthBit ? 16 : 8;
  using Header = NoHeader;
  struct Unit {
    uint4 codes;
    uint32_t fifth;
    uint32_t scale;  // d, or d and m
  };
  static __device__ __forceinline__ Header load_header(const uint8_t*, int) { return {}; }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    Unit unit;
    unit.codes = stream_16(at);
    unit.fifth = kFifthBit ? stream_4(at + static_cast<uint32_t>(512 - 12 * lane)) : 0;
    const uint8_t* scales = at + static_cast<uint32_t>((kFifthBit ? 640 : 512) - (16 - kScaleBytes) * lane);
    unit.scale = kMinimum ? stream_4(scales) : stream_2(scales);
    return unit;
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header&, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t words[2] = {g == 0 ? unit.codes.x : unit.codes.z, g == 0 ? unit.codes.y : unit.codes.w};
    const __half2 d = low_twice(unit.scale), m = high_twice(unit.scale);
    for_each<8>([&]<int p>() {
      constexpr int j = 2 * g + p / 4, q = p % 4 / 2;
      const uint32_t turned = rotate_right(unit.fifth, j + 8 * q);
      const uint32_t base = kFifthBit ? and_or<(p % 2 == 0 ? 0x00100010u : 0x01000100u)>(turned, kMagic) : kMagic;
      const __half2 code = pair_over<p % 4, kOffset>(words[p / 4], base);
      w[p] = as_bits(kMinimum ? __hfma2(code, d, m) : __hmul2(code, d));
    });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    const uint8_t* codes = block + kScaleBytes + (kFifthBit ? 4 : 0);
    put_nibbles(record + 16 * lane,
                [&](int k) { return static_cast<uint32_t>(k < 16 ? codes[k] & 15 : codes[k - 16] >> 4); });
    if (kFifthBit) {
      const uint32_t bits = get_4(block + kScaleBytes);
      uint32_t fifth = 0;
      for (int k = 0; k < 32; ++k) fifth |= (bits >> k & 1u) << fifth_bit_place(k);
      put_4(record + 512 + 4 * lane, fifth);
    }
    uint8_t* scales = record + (kFifthBit ? 640 : 512);
    if (kMinimum)
      put_4(scales + 4 * lane, get_4(block));
    else
      put_2(scales + 2 * lane, get_2(block));
  }
};
using Q4_0 = SmallBlocks<false, false>;
using Q4_1 = SmallBlocks<true, false>;
using Q5_0 = SmallBlocks<false, true>;
using Q5_1 = SmallBlocks<true, true>;

// Sixteen levels, looked up as bytes by the byte permutation: 8 entries per instruction, the code's top bit chooses between
// two. Nibble i of word j is k = 8j + i here. Levels stand in the table plus 128 and are taken times 2^-kShift.
struct LevelTable {
  uint32_t t[4];
};

template <int kShift = 0>
__device__ __forceinline__ void decode_levels(const LevelTable& table, uint32_t word, __half2 d, uint32_t* w) {
  const __half2 part = __float2half2_rn(1.0f / (1 << kShift)), offset = __float2half2_rn(-1152.0f / (1 << kShift));
  const auto value = [&](uint32_t pair) {
    return kShift == 0 ? __hadd2(as_half2(pair), offset) : __hfma2(as_half2(pair), part, offset);
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t codes = half == 0 ? word : word >> 16;
    const uint32_t place = codes & 0x7777u;
    const uint32_t low = __byte_perm(table.t[0], table.t[1], place), high = __byte_perm(table.t[2], table.t[3], place);
    const uint32_t bytes = __byte_perm(low, high, 0x3210u | (codes & 0x8888u) >> 1);
    w[2 * half] = as_bits(__hmul2(value(__byte_perm(bytes, 0x64646464u, 0x4140)), d));
    w[2 * half + 1] = as_bits(__hmul2(value(__byte_perm(bytes, 0x64646464u, 0x4342)), d));
  }
}

template <class CodeOf>
__device__ __forceinline__ void put_nibbles_in_order(uint8_t* to, const CodeOf& code) {
  for (int j = 0; j < 4; ++j) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= (code(8 * j + i) & 15u) << 4 * i;
    put_4(to + 4 * j, word);
  }
}

// The levels of IQ4: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
__device__ __forceinline__ LevelTable iq4_levels() { return {{0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}}; }
// Twice the values of E2M1: 0 1 2 3 4 6 8 12 and their negatives.
__device__ __forceinline__ LevelTable e2m1_levels() { return {{0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu}}; }

// IQ4_NL: d [f16], 16 bytes as Q4_0. MXFP4: the exponent of a power of two, 16 bytes.
template <bool kPowerOfTwo>
struct LevelBlocks : SteadyHeader {
  static constexpr int kScaleBytes = kPowerOfTwo ? 1 : 2;
  static constexpr int kValues = 32, kBytes = kScaleBytes + 16;
  static constexpr int kUnits = 1, kHeadBytes = 0, kUnitBytes = 32 * kBytes;
  using Header = NoHeader;
  struct Unit {
    uint4 codes;
    uint32_t scale;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t*, int) { return {}; }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    const uint8_t* scales = at + 512 + kScaleBytes * lane;
    return {stream_16(at + 16 * lane), kPowerOfTwo ? stream_1(scales) : stream_2(scales)};
  }
  // 2^(e - 128) as f16 bits: half of 2^(e - 127), since the levels are doubled. Above 2^15 it stays there, below 2^-24 it is 0.
  static __device__ __forceinline__ uint32_t power_of_two(uint32_t e) {
    const int biased = static_cast<int>(e) - 113;
    if (biased > 0) return static_cast<uint32_t>(min(biased, 30)) << 10;
    return biased > -10 ? 512u >> -biased : 0u;
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header&, const Unit& unit, int, uint32_t (&w)[8]) {
    const LevelTable table = kPowerOfTwo ? e2m1_levels() : iq4_levels();
    const __half2 d = low_twice(kPowerOfTwo ? power_of_two(unit.scale) : unit.scale);
    decode_levels(table, g == 0 ? unit.codes.x : unit.codes.z, d, w);
    decode_levels(table, g == 0 ? unit.codes.y : unit.codes.w, d, w + 4);
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    const uint8_t* codes = block + kScaleBytes;
    put_nibbles_in_order(record + 16 * lane,
                         [&](int k) { return static_cast<uint32_t>(k < 16 ? codes[k] & 15 : codes[k - 16] >> 4); });
    if (kPowerOfTwo)
      record[512 + lane] = block[0];
    else
      put_2(record + 512 + 2 * lane, get_2(block));
  }
};
using IQ4_NL = LevelBlocks<false>;
using MXFP4 = LevelBlocks<true>;

// NVFP4: 4 scales [unsigned E4M3] of 16 values each, then 8 bytes of each 16: code k in the low nibble of byte k, k + 8 in the
// high.
struct NVFP4 : SteadyHeader {
  static constexpr int kValues = 64, kBytes = 36, kUnits = 2, kHeadBytes = 0, kUnitBytes = 576;
  using Header = NoHeader;
  struct Unit {
    uint4 codes;
    uint32_t scales;  // a byte per half
  };
  static __device__ __forceinline__ Header load_header(const uint8_t*, int) { return {}; }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_16(at + 16 * lane), stream_2(at + 512 + 2 * lane)};
  }
  // Half the scale, since the levels are doubled. Its bits are those of an f16 that is 2^7 times too small, subnormals too.
  static __device__ __forceinline__ __half2 half_scale(uint32_t byte) {
    const uint32_t bits = (byte & 127u) == 127u ? 0 : (byte & 127u) << 7;
    return __hmul2(low_twice(bits), __float2half2_rn(128.0f));
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header&, const Unit& unit, int, uint32_t (&w)[8]) {
    const __half2 d = half_scale(unit.scales >> 8 * g);
    decode_levels(e2m1_levels(), g == 0 ? unit.codes.x : unit.codes.z, d, w);
    decode_levels(e2m1_levels(), g == 0 ? unit.codes.y : unit.codes.w, d, w + 4);
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 2; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_nibbles_in_order(at + 16 * lane, [&](int k) {
        const uint8_t* codes = block + 4 + 16 * u + 8 * (k / 16);
        return static_cast<uint32_t>(k % 16 < 8 ? codes[k % 8] & 15 : codes[k % 8] >> 4);
      });
      put_2(at + 512 + 2 * lane, get_2(block + 2 * u));
    }
  }
};

// Q1_0: d [f16], 16 bytes of bits: value d or, where the bit is 0, -d. On the device the bits are signs: of unit u's value k at
// bit 15 - k / 2 of a word, at 31 - k / 2 for odd k.
struct Q1_0 : SteadyHeader {
  static constexpr int kValues = 128, kBytes = 18, kUnits = 4, kHeadBytes = 64, kUnitBytes = 128;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint32_t signs;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) { return {stream_4(at + 4 * lane)}; }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t d = as_bits(low_twice(header.d));
#pragma unroll
    for (int p = 0; p < 8; ++p) w[p] = d ^ (unit.signs << (8 * g + p) & 0x80008000u);
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 4; ++u) {
      const uint32_t bits = get_4(block + 2 + 4 * u);
      uint32_t signs = 0;
      for (int k = 0; k < 32; ++k) signs |= (~bits >> k & 1u) << (15 + 16 * (k % 2) - k / 2);
      put_4(record + kHeadBytes + kUnitBytes * u + 4 * lane, signs);
    }
    put_2(record + 2 * lane, get_2(block));
  }
};

// Codes of two bits with one scale, value d * (q - 1).
//   Q2_0   64 values: d [f16], 16 bytes: code k at bit 2 (k % 4) of byte k / 4
//   TQ2_0  256 values: 64 bytes: code k at bit 2 (k / 32 % 4) of byte 32 (k / 128) + k % 32; d [f16]
template <bool kSuper>
struct TwoBitBlocks : SteadyHeader {
  static constexpr int kValues = kSuper ? 256 : 64, kBytes = kSuper ? 66 : 18, kUnits = kValues / 32, kHeadBytes = 64,
                       kUnitBytes = 256;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 codes;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) { return {stream_8(at + 8 * lane)}; }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const __half2 d = low_twice(header.d);
    for_each<8>(
        [&]<int p>() { w[p] = as_bits(__hmul2(pair_of_two_bits<p, 1>(g == 0 ? unit.codes.x : unit.codes.y), d)); });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < kUnits; ++u)
      put_two_bits(record + kHeadBytes + kUnitBytes * u + 8 * lane, [&](int k) {
        return kSuper ? static_cast<uint32_t>(block[32 * (u / 4) + k]) >> 2 * (u % 4)
                      : static_cast<uint32_t>(block[2 + 8 * u + k / 4]) >> 2 * (k % 4);
      });
    put_2(record + 2 * lane, get_2(block + (kSuper ? 64 : 0)));
  }
};
using Q2_0 = TwoBitBlocks<false>;
using TQ2_0 = TwoBitBlocks<true>;

// Values as they are. BF16 becomes this when a model is loaded (repack.cu). 32 values are a block.
struct F16 : SteadyHeader {
  static constexpr int kValues = 32, kBytes = 64, kUnits = 1, kHeadBytes = 0, kUnitBytes = 32 * kBytes;
  static constexpr int kLaneBytes = 16;
  using Header = NoHeader;
  struct Unit {
    uint4 values[4];
  };
  static __device__ __forceinline__ Header load_header(const uint8_t*, int) { return {}; }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int) {
    Unit unit;
#pragma unroll
    for (int i = 0; i < 4; ++i) unit.values[i] = stream_16(at + 512 * i);
    return unit;
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header&, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint4 a = unit.values[2 * g], b = unit.values[2 * g + 1];
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int i = 0; i < 32; ++i) put_2(record + 512 * (i / 8) + 16 * lane + 2 * (i % 8), get_2(block + 2 * i));
  }
};

// --- codecs of super-blocks of 256 values: 8 units -----------------------------------------------------------------

// Q4_K, Q5_K: d, dmin [f16], 12 bytes of 6-bit scales and minima, then 32 bytes of fifth bits (Q5_K), 128 bytes of nibbles:
// unit 2i in the low and 2i + 1 in the high nibbles of bytes 32i... Value d * scale * q - dmin * min.
// The record's head has a block's first 16 bytes per lane, as in the file: d and dmin, a word of scales and one of minima of
// units 0 to 3, a byte each with upper bits of units 4 to 7 above the six, and a word of those units' lower four bits. So a
// byte permutation takes scale and minimum of a unit at once, to the places of a pair of halves, and one multiplication
// applies d and dmin.
template <bool kFifthBit>
struct KBlocks {
  static constexpr int kValues = 256, kBytes = kFifthBit ? 176 : 144, kUnits = 8;
  static constexpr int kHeadBytes = 512, kUnitBytes = kFifthBit ? 640 : 512, kLaneBytes = 16;
  struct Header {
    uint32_t d;               // d, dmin
    uint32_t scales, minima;  // of units 0 to 3; of units 4 to 7 the other way round
    uint32_t lower;           // of units 4 to 7
  };
  struct Unit {
    uint4 codes;
    uint32_t fifth;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int) {
    const uint4 head = stream_16(record);
    return {head.x, head.y, head.z, head.w};
  }
  static __device__ __forceinline__ void end_unit(Header& header, int index) {
    if (index != 3) return;
    const uint32_t scales = header.scales;
    header.scales = and_or<0x30303030u>(header.minima >> 2, header.lower >> 4 & 0x0f0f0f0fu);
    header.minima = and_or<0x30303030u>(scales >> 2, header.lower & 0x0f0f0f0fu);
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_16(at), kFifthBit ? stream_4(at + static_cast<uint32_t>(512 - 12 * lane)) : 0};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int index, uint32_t (&w)[8]) {
    const uint32_t place = static_cast<uint32_t>(index << 8 | index) ^ 0x0400u;
    const uint32_t six = and_or<0x003f003fu>(__byte_perm(header.scales, header.minima, place), kMagic);
    const __half2 scales = __hmul2(as_half2(header.d), __hsub2(as_half2(six), as_half2(kMagic)));
    const __half2 d = __low2half2(scales), m = __hneg2(__high2half2(scales));
    const uint32_t words[2] = {g == 0 ? unit.codes.x : unit.codes.z, g == 0 ? unit.codes.y : unit.codes.w};
    for_each<8>([&]<int p>() {
      constexpr int j = 2 * g + p / 4, q = p % 4 / 2;
      const uint32_t turned = rotate_right(unit.fifth, j + 8 * q);
      const uint32_t base = kFifthBit ? and_or<(p % 2 == 0 ? 0x00100010u : 0x01000100u)>(turned, kMagic) : kMagic;
      w[p] = as_bits(__hfma2(pair_over<p % 4, 0>(words[p / 4], base), d, m));
    });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    const uint8_t* high = block + 16;
    const uint8_t* codes = block + (kFifthBit ? 48 : 16);
    for (int i = 0; i < 16; i += 4) put_4(record + 16 * lane + i, get_4(block + i));
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_nibbles(at + 16 * lane, [&](int k) { return static_cast<uint32_t>(codes[32 * (u / 2) + k]) >> 4 * (u % 2); });
      if (kFifthBit) {
        uint32_t fifth = 0;
        for (int k = 0; k < 32; ++k) fifth |= (high[k] >> u & 1u) << fifth_bit_place(k);
        put_4(at + 512 + 4 * lane, fifth);
      }
    }
  }
};
using Q4_K = KBlocks<false>;
using Q5_K = KBlocks<true>;

// Q6_K: 128 bytes of low nibbles, 64 of upper bits, 16 scales [int8] of 16 values each, d [f16]. Value d * scale * (q - 32).
struct Q6_K : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 210, kUnits = 8, kHeadBytes = 64, kUnitBytes = 832;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint4 codes;
    uint2 upper;
    uint32_t scales;  // of the two halves, each plus 128
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_16(at + 16 * lane), stream_8(at + 512 + 8 * lane), stream_2(at + 768 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t scale = __byte_perm(unit.scales, 0x64646464u, g == 0 ? 0x4040 : 0x4141);
    const __half2 d = __hmul2(low_twice(header.d), __hsub2(as_half2(scale), __float2half2_rn(1152.0f)));
    const uint32_t words[2] = {g == 0 ? unit.codes.x : unit.codes.z, g == 0 ? unit.codes.y : unit.codes.w};
    for_each<8>([&]<int p>() {
      constexpr int j = 2 * g + p / 4, q = p % 4 / 2;
      const uint32_t turned = rotate_right(q == 0 ? unit.upper.x : unit.upper.y, 2 * (j % 2) + 8 * (j / 2));
      const uint32_t base = and_or<(p % 2 == 0 ? 0x00300030u : 0x03000300u)>(turned, kMagic);
      w[p] = as_bits(__hmul2(pair_over<p % 4, 32>(words[p / 4], base), d));
    });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      const auto code = [&](int k) {
        const int half = u / 4, i = 32 * (u % 4) + k;  // value i of the half of 128
        const uint32_t low = block[64 * half + i % 64] >> 4 * (i / 64) & 15u;
        return low | (block[128 + 32 * half + i % 32] >> 2 * (i / 32) & 3u) << 4;
      };
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_nibbles(at + 16 * lane, code);
      uint32_t upper[2] = {0, 0};
      for (int k = 0; k < 32; ++k) upper[k % 8 / 4] |= (code(k) >> 4) << upper_bits_place(k);
      put_4(at + 512 + 8 * lane, upper[0]);
      put_4(at + 516 + 8 * lane, upper[1]);
      at[768 + 2 * lane] = block[192 + 2 * u] ^ 0x80;
      at[769 + 2 * lane] = block[193 + 2 * u] ^ 0x80;
    }
    put_2(record + 2 * lane, get_2(block + 208));
  }
};

// Q2_K: 16 bytes of 4-bit scales and minima of 16 values each, 64 bytes of 2-bit codes, d, dmin. Value d * scale * q - dmin * min.
struct Q2_K : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 84, kUnits = 8, kHeadBytes = 128, kUnitBytes = 320;
  struct Header {
    uint32_t d;
  };
  struct Unit {
    uint2 codes;
    uint32_t scales;  // a byte per half
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_4(record + 4 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_2(at + 256 + 2 * lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int, uint32_t (&w)[8]) {
    const uint32_t byte = unit.scales >> 8 * g;
    const __half2 d = __hmul2(low_twice(header.d), integer_twice(byte & 15u));
    const __half2 m = __hneg2(__hmul2(high_twice(header.d), integer_twice(byte >> 4 & 15u)));
    for_each<8>(
        [&]<int p>() { w[p] = as_bits(__hfma2(pair_of_two_bits<p, 0>(g == 0 ? unit.codes.x : unit.codes.y), d, m)); });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u) {
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_two_bits(at + 8 * lane,
                   [&](int k) { return static_cast<uint32_t>(block[16 + 32 * (u / 4) + k]) >> 2 * (u % 4); });
      put_2(at + 256 + 2 * lane, get_2(block + 2 * u));
    }
    put_4(record + 4 * lane, get_4(block + 80));
  }
};

// Q3_K: 32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales (minus 32) of 16 values each, d [f16].
// Value d * (scale - 32) * (q - 4) with q of three bits.
struct Q3_K : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 110, kUnits = 8, kHeadBytes = 192, kUnitBytes = 416;
  struct Header {
    uint32_t d;
    uint32_t upper;  // 4 bits per unit: the upper two of each half's scale
  };
  struct Unit {
    uint2 codes;
    uint32_t third;
    uint32_t scales;  // low nibbles of the halves' scales
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_2(record + 2 * lane), stream_4(record + 64 + 4 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) {
    return {stream_8(at + 8 * lane), stream_4(at + 256 + 4 * lane), stream_1(at + 384 + lane)};
  }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int index, uint32_t (&w)[8]) {
    const uint32_t top = header.upper >> 4 * index;
    const uint32_t six = g == 0 ? (unit.scales & 15u) | (top & 3u) << 4 : unit.scales >> 4 | (top & 12u) << 2;
    const __half2 scale = __hsub2(integer_twice(six), __float2half2_rn(32.0f));
    const __half2 d = __hmul2(low_twice(header.d), scale);
    for_each<8>([&]<int p>() {
      const uint32_t turned = rotate_right(unit.third, g + 8 * (p / 4));
      const uint32_t base = and_or<(0x00040004u << 2 * (p % 4))>(turned, kMagic);
      w[p] = as_bits(__hmul2(pair_of_two_bits<p, 4>(g == 0 ? unit.codes.x : unit.codes.y, base), d));
    });
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    const uint8_t* packed = block + 96;
    uint32_t upper = 0;
    for (int u = 0; u < 8; ++u) {
      uint32_t scale[2];
      for (int h = 0; h < 2; ++h) {
        const int s = 2 * u + h;
        scale[h] = (packed[s % 8] >> 4 * (s / 8) & 15u) | (packed[8 + s % 4] >> 2 * (s / 4) & 3u) << 4;
      }
      upper |= (scale[0] >> 4 | (scale[1] >> 4) << 2) << 4 * u;
      uint8_t* at = record + kHeadBytes + kUnitBytes * u;
      put_two_bits(at + 8 * lane,
                   [&](int k) { return static_cast<uint32_t>(block[32 + 32 * (u / 4) + k]) >> 2 * (u % 4); });
      uint32_t third = 0;
      for (int k = 0; k < 32; ++k) third |= (block[k] >> u & 1u) << third_bit_place(k);
      put_4(at + 256 + 4 * lane, third);
      at[384 + lane] = static_cast<uint8_t>((scale[0] & 15u) | (scale[1] & 15u) << 4);
    }
    put_2(record + 2 * lane, get_2(block + 108));
    put_4(record + 64 + 4 * lane, upper);
  }
};

// IQ4_XS: d [f16], upper two bits of 8 scales [u16], their low nibbles [4 bytes], 128 bytes: unit u in bytes 16u..., code k in
// the low nibble of byte k, k + 16 in the high. Value d * (scale - 32) * level.
struct IQ4_XS : SteadyHeader {
  static constexpr int kValues = 256, kBytes = 136, kUnits = 8, kHeadBytes = 256, kUnitBytes = 512;
  struct Header {
    uint32_t d;      // d, upper bits
    uint32_t lower;  // nibbles
  };
  struct Unit {
    uint4 codes;
  };
  static __device__ __forceinline__ Header load_header(const uint8_t* record, int lane) {
    return {stream_4(record + 4 * lane), stream_4(record + 128 + 4 * lane)};
  }
  static __device__ __forceinline__ Unit load_unit(const uint8_t* at, int lane) { return {stream_16(at + 16 * lane)}; }
  template <int g>
  static __device__ __forceinline__ void decode(const Header& header, const Unit& unit, int index, uint32_t (&w)[8]) {
    const uint32_t scale = (header.lower >> 4 * index & 15u) | (header.d >> (16 + 2 * index) & 3u) << 4;
    const __half2 d = __hmul2(low_twice(header.d), __hsub2(integer_twice(scale), __float2half2_rn(32.0f)));
    decode_levels(iq4_levels(), g == 0 ? unit.codes.x : unit.codes.z, d, w);
    decode_levels(iq4_levels(), g == 0 ? unit.codes.y : unit.codes.w, d, w + 4);
  }
  static __device__ void pack(const uint8_t* block, uint8_t* record, int lane) {
    for (int u = 0; u < 8; ++u)
      put_nibbles_in_order(record + kHeadBytes + kUnitBytes * u + 16 * lane, [&](int k) {
        const uint8_t* codes = block + 8 + 16 * u;
        return static_cast<uint32_t>(k < 16 ? codes[k] & 15 : codes[k - 16] >> 4);
      });
    put_4(record + 4 * lane, get_4(block));
    put_4(record + 128 + 4 * lane, get_4(block + 4));
  }
};

}  // namespace v100::cuda
