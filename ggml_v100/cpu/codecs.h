// Codecs: how a block of 32 values of each kind of panel is unpacked, written once over codes_*.h. An instruction set's
// file includes its codes header first and this file second; all names are private to that file.
//
// What      read(panel, block, c, b): codes, scales and minimums of the kCodeColumns columns from c on; blocks are
//           read in order from a multiple of 8. The codebook formats are in codebook_codecs.h
// Layout    panel.h
// Numerics  scale and minimum as in ops/ops.h (linear); the codes carry the kind's bias
#pragma once

#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

struct PanelBlock {
  Codes codes[8];
  Scales scale[2], minimum[2];  // [1]: of the last 16 values where the group is 16
};

// 4-bit indices to levels + bias.
alignas(16) constexpr uint8_t kNonLinearLevels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                      129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kDoubledFp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Cell of the panel that holds a block, and the block's place in it.
template <PanelKind kind>
struct Place {
  static constexpr uint32_t kBlocks = panel_format(kind).cell_values / kBlockValues;
  const std::byte* cell;
  uint32_t block;
  Place(const std::byte* panel, int32_t index)
      : cell(panel + static_cast<size_t>(static_cast<uint32_t>(index) / kBlocks) * panel_format(kind).cell_bytes),
        block(static_cast<uint32_t>(index) % kBlocks) {}
};

// p: first byte of the columns in hand; turns are 64 bytes apart.
inline void read_nibbles(const std::byte* p, Codes* codes) {
  unroll<4>([&](auto v) V100_INLINE_LAMBDA {
    const Codes packed = load_codes(p + 64 * v);
    codes[v] = masked(packed, 15);
    codes[v + 4] = masked(shifted<-4>(packed), 15);
  });
}

inline void read_levels(const std::byte* p, const uint8_t* levels, Codes* codes) {
  read_nibbles(p, codes);
  unroll<8>([&](auto g) V100_INLINE_LAMBDA { codes[g] = lookup(codes[g], levels); });
}

// Bits 0 and 1 of the codes.
inline void read_crumbs(const std::byte* p, Codes* codes) {
  unroll<2>([&](auto half) V100_INLINE_LAMBDA {
    const Codes plane = load_codes(p + 64 * half);
    unroll<4>([&](auto g) V100_INLINE_LAMBDA { codes[4 * half + g] = masked(shifted<-2 * g>(plane), 3); });
  });
}

// Bits 4 and 5 of the codes.
inline void add_crumbs(const std::byte* p, Codes* codes) {
  unroll<2>([&](auto half) V100_INLINE_LAMBDA {
    const Codes plane = load_codes(p + 64 * half);
    unroll<4>([&](auto g) V100_INLINE_LAMBDA {
      codes[4 * half + g] = with_bits(codes[4 * half + g], shifted<4 - 2 * g>(plane), 0x30);
    });
  });
}

// Bit number `bit` of the codes.
template <int bit>
inline void add_bit_plane(const std::byte* p, Codes* codes) {
  const Codes plane = load_codes(p);
  unroll<8>([&](auto g) V100_INLINE_LAMBDA { codes[g] = with_bits(codes[g], shifted<bit - g>(plane), 1 << bit); });
}

// Numbers a and b of place j; p: first byte of the columns in hand.
inline void read_six_bit_pair(const std::byte* p, uint32_t j, Bytes& a, Bytes& b) {
  const Bytes low = load_bytes(p + 16 * j), high = load_bytes(p + 16 * (8 + j / 2)) >> (4 * (j % 2));
  a = (low & 15) | ((high << 4) & 0x30);
  b = ((low >> 4) & 15) | ((high << 2) & 0x30);
}

// Number j of six bits; the low nibbles are in lows, two to a byte, the upper bits in highs, four to a byte.
inline Bytes read_six_bits(const std::byte* lows, const std::byte* highs, uint32_t j) {
  const Bytes low = load_bytes(lows + 16 * (j / 2)) >> (4 * (j % 2));
  const Bytes high = load_bytes(highs + 16 * (j / 4)) >> (2 * (j % 4));
  return (low & 15) | ((high << 4) & 0x30);
}

template <PanelKind kind>
struct Codec;

template <>
struct Codec<PanelKind::q8_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q8_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * at.block + 2 * c);
    const std::byte* codes = at.cell + 64 + 512 * at.block + 4 * c;
    unroll<8>([&](auto g) V100_INLINE_LAMBDA { b.codes[g] = load_codes(codes + 64 * g); });
  }
};

template <>
struct Codec<PanelKind::q4_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q4_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * at.block + 2 * c);
    read_nibbles(at.cell + 64 + 256 * at.block + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::q4_1> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q4_1> at(panel, block);
    b.scale[0] = load_halves(at.cell + 2 * c);
    b.minimum[0] = load_halves(at.cell + 32 + 2 * c);
    read_nibbles(at.cell + 64 + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::q5_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q5_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * at.block + 2 * c);
    const std::byte* codes = at.cell + 64 + 320 * at.block + 4 * c;
    read_nibbles(codes + 64, b.codes);
    add_bit_plane<4>(codes, b.codes);
  }
};

template <>
struct Codec<PanelKind::q5_1> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q5_1> at(panel, block);
    b.scale[0] = load_halves(at.cell + 2 * c);
    b.minimum[0] = load_halves(at.cell + 32 + 2 * c);
    read_nibbles(at.cell + 128 + 4 * c, b.codes);
    add_bit_plane<4>(at.cell + 64 + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::q2_K> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q2_K> at(panel, block);
    const Scales d = load_halves(at.cell + 2 * c), dmin = load_halves(at.cell + 32 + 2 * c);
    for (int half = 0; half < 2; ++half) {
      const Bytes packed = load_bytes(at.cell + 64 + 16 * (2 * at.block + half) + c);
      b.scale[half] = d * from_unsigned(packed & 15);
      b.minimum[half] = -(dmin * from_unsigned((packed >> 4) & 15));
    }
    read_crumbs(at.cell + 320 + 128 * at.block + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::q3_K> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q3_K> at(panel, block);
    const Scales d = load_halves(at.cell + 2 * c);
    Bytes first, second;
    read_six_bit_pair(at.cell + 64 + c, at.block, first, second);
    b.scale[0] = d * from_signed(first + -32);
    b.scale[1] = d * from_signed(second + -32);
    const std::byte* codes = at.cell + 256 + 192 * at.block + 4 * c;
    read_crumbs(codes + 64, b.codes);
    add_bit_plane<2>(codes, b.codes);
  }
};

// Scales and minimums of Q4_K and Q5_K: those of a super-block are worked out when its first block is read.
class KScales {
 public:
  void read(const std::byte* cell, uint32_t block, int c, PanelBlock& b) {
    const int part = c / kCodeColumns;
    if (block == 0) work_out(cell, c, scales_[part], minimums_[part]);
    b.scale[0] = scales_[part][block];
    b.minimum[0] = minimums_[part][block];
  }

 private:
  static void work_out(const std::byte* cell, int c, Scales* scales, Scales* minimums) {
    const Scales d = load_halves(cell + 2 * c), negative_dmin = -load_halves(cell + 32 + 2 * c);
    for (uint32_t j = 0; j < 8; ++j) {
      Bytes scale, minimum;
      read_six_bit_pair(cell + 64 + c, j, scale, minimum);
      scales[j] = d * from_unsigned(scale);
      minimums[j] = negative_dmin * from_unsigned(minimum);
    }
  }

  static constexpr int kParts = kPanelColumns / kCodeColumns;
  Scales scales_[kParts][8], minimums_[kParts][8];
};

template <>
struct Codec<PanelKind::q4_K> {
  KScales scales;
  void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q4_K> at(panel, block);
    scales.read(at.cell, at.block, c, b);
    read_nibbles(at.cell + 256 + 256 * at.block + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::q5_K> {
  KScales scales;
  void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q5_K> at(panel, block);
    scales.read(at.cell, at.block, c, b);
    const std::byte* codes = at.cell + 256 + 320 * at.block + 4 * c;
    read_nibbles(codes + 64, b.codes);
    add_bit_plane<4>(codes, b.codes);
  }
};

template <>
struct Codec<PanelKind::q6_K> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q6_K> at(panel, block);
    const Scales d = load_halves(at.cell + 2 * c);
    for (int half = 0; half < 2; ++half)
      b.scale[half] = d * from_signed(load_bytes(at.cell + 64 + 16 * (2 * at.block + half) + c));
    const std::byte* codes = at.cell + 320 + 384 * at.block + 4 * c;
    read_nibbles(codes + 128, b.codes);
    add_crumbs(codes, b.codes);
  }
};

template <>
struct Codec<PanelKind::iq4_nl> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::iq4_nl> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * at.block + 2 * c);
    read_levels(at.cell + 64 + 256 * at.block + 4 * c, kNonLinearLevels, b.codes);
  }
};

template <>
struct Codec<PanelKind::iq4_xs> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::iq4_xs> at(panel, block);
    const Bytes scale = read_six_bits(at.cell + 64 + c, at.cell + 32 + c, at.block);
    b.scale[0] = load_halves(at.cell + 2 * c) * from_signed(scale + -32);
    read_levels(at.cell + 128 + 256 * at.block + 4 * c, kNonLinearLevels, b.codes);
  }
};

template <>
struct Codec<PanelKind::mxfp4> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::mxfp4> at(panel, block);
    b.scale[0] = half_e8m0(load_bytes(at.cell + 16 * at.block + c));
    read_levels(at.cell + 64 + 256 * at.block + 4 * c, kDoubledFp4Levels, b.codes);
  }
};

template <>
struct Codec<PanelKind::nvfp4> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::nvfp4> at(panel, block);
    for (int half = 0; half < 2; ++half)
      b.scale[half] = half_ue4m3(load_bytes(at.cell + 16 * (2 * at.block + half) + c));
    read_levels(at.cell + 64 + 256 * at.block + 4 * c, kDoubledFp4Levels, b.codes);
  }
};

template <>
struct Codec<PanelKind::q1_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q1_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * (at.block / 4) + 2 * c);
    const Codes plane = load_codes(at.cell + 64 + 64 * at.block + 4 * c);
    unroll<8>([&](auto g) V100_INLINE_LAMBDA { b.codes[g] = masked(shifted<1 - g>(plane), 2); });
  }
};

template <>
struct Codec<PanelKind::q2_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::q2_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * (at.block / 2) + 2 * c);
    read_crumbs(at.cell + 64 + 128 * at.block + 4 * c, b.codes);
  }
};

template <>
struct Codec<PanelKind::tq2_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const Place<PanelKind::tq2_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 32 * (at.block / 8) + 2 * c);
    read_crumbs(at.cell + 64 + 128 * at.block + 4 * c, b.codes);
  }
};

}  // namespace

}  // namespace v100::cpu
