// Codecs of the codebook formats (IQ1, IQ2, IQ3) and of TQ1_0; see codecs.h.
//
// Layout    a cell is a super-block: d, then the other bytes of the file's block, transposed (panel.h)
// Bound     the loads of codebook rows: one for 8 values of a column (IQ3: for 4), shared by all rows of x
#pragma once

#include "cpu/codecs.h"
#include "quants/codebooks.h"

namespace v100::cpu {

namespace {

template <PanelKind kind>
struct TransposedCell : Place<kind> {
  int c;
  TransposedCell(const std::byte* panel, int32_t block, int c) : Place<kind>(panel, block), c(c) {}
  Scales d() const { return load_halves(this->cell + 2 * c); }
  Bytes byte(uint32_t i) const { return load_bytes(this->cell + 16 * i + c); }  // of the file's block
};

// (d * (2 s + 1)) * factor
inline Scales odd_scale(const Scales& d, const Bytes& s, float factor) {
  return d * from_unsigned(((s << 1) & 30) + 1) * factor;
}

// Eight sign bits from seven: the number of minus signs is even.
inline Bytes even_signs(const Bytes& seven_bits) {
  const Bytes s = seven_bits & 127;
  const Bytes fours = s ^ ((s >> 4) & 15), twos = fours ^ (fours >> 2), ones = twos ^ (twos >> 1);
  return s | ((ones << 7) & 128);
}

// Values 8 l .. 8 l + 7 of a block.
template <int l>
inline void put_signed_8(const void* codebook, const Indices& at, const Bytes& signs, PanelBlock& b) {
  Codes low, high;
  look_up_8(codebook, at, low, high);
  const Codes wide = spread(signs);
  b.codes[2 * l] = with_signs<0>(low, wide);
  b.codes[2 * l + 1] = with_signs<4>(high, wide);
}

template <int l>
inline void put_signed_4(const void* codebook, const Indices& low, const Indices& high, const Bytes& signs,
                         PanelBlock& b) {
  const Codes wide = spread(signs);
  b.codes[2 * l] = with_signs<0>(look_up_4(codebook, low), wide);
  b.codes[2 * l + 1] = with_signs<4>(look_up_4(codebook, high), wide);
}

// 8 q + 9 of values q = g + 1/8 or, where flags has 8, g - 1/8, with g -1..1: 8 (g + 1) + 2 or + 0.
template <int l>
inline void put_shifted_8(const Indices& at, const Bytes& flags, PanelBlock& b) {
  Codes low, high;
  look_up_8(&kIq1Codebook, at, low, high);
  const Codes two = spread((((flags >> 2) & 2) + 2) & 2);
  b.codes[2 * l] = with_bits(shifted<3>(plus(low, 1)), two, 2);
  b.codes[2 * l + 1] = with_bits(shifted<3>(plus(high, 1)), two, 2);
}

// Seven sign bits number l of four in 28 bits.
template <class Cell>
inline Bytes sign_field(const Cell& cell, uint32_t at, uint32_t l) {
  if (l == 0) return cell.byte(at);
  return ((cell.byte(at + l - 1) >> (8 - l)) & ((1 << l) - 1)) | ((cell.byte(at + l) << l) & (127 & -(1 << l)));
}

template <>
struct Codec<PanelKind::iq2_xxs> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq2_xxs> cell(panel, block, c);
    const uint32_t at = 2 + 8 * cell.block;  // four indices, then 4 x 7 bits of signs and the scale
    const Bytes none = cell.byte(at) & 0;
    b.scale[0] = odd_scale(cell.d(), (cell.byte(at + 7) >> 4) & 15, 0.125f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      put_signed_8<l>(&kIq2XxsCodebook, indices(cell.byte(at + l), none), even_signs(sign_field(cell, at + 4, l)), b);
    });
  }
};

template <>
struct Codec<PanelKind::iq2_xs> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq2_xs> cell(panel, block, c);
    const Bytes scales = cell.byte(66 + cell.block);
    b.scale[0] = odd_scale(cell.d(), scales & 15, 0.125f);
    b.scale[1] = odd_scale(cell.d(), (scales >> 4) & 15, 0.125f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      const uint32_t at = 2 + 8 * cell.block + 2 * l;  // a word of 9 bits of index and 7 of signs
      const Bytes high = cell.byte(at + 1);
      put_signed_8<l>(&kIq2XsCodebook, indices(cell.byte(at), high & 1), even_signs((high >> 1) & 127), b);
    });
  }
};

template <>
struct Codec<PanelKind::iq2_s> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq2_s> cell(panel, block, c);
    const Bytes scales = cell.byte(74 + cell.block), high = cell.byte(66 + cell.block);
    b.scale[0] = odd_scale(cell.d(), scales & 15, 0.125f);
    b.scale[1] = odd_scale(cell.d(), (scales >> 4) & 15, 0.125f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      const uint32_t k = 4 * cell.block + l;
      put_signed_8<l>(&kIq2SCodebook, indices(cell.byte(2 + k), (high >> (2 * l)) & 3), cell.byte(34 + k), b);
    });
  }
};

template <>
struct Codec<PanelKind::iq3_xxs> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq3_xxs> cell(panel, block, c);
    const uint32_t at = 66 + 4 * cell.block;  // 4 x 7 bits of signs and the scale
    const Bytes none = cell.byte(at) & 0;
    b.scale[0] = odd_scale(cell.d(), (cell.byte(at + 3) >> 4) & 15, 0.25f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      const uint32_t k = 2 + 8 * cell.block + 2 * l;
      put_signed_4<l>(&kIq3XxsCodebook, indices(cell.byte(k), none), indices(cell.byte(k + 1), none),
                      even_signs(sign_field(cell, at, l)), b);
    });
  }
};

template <>
struct Codec<PanelKind::iq3_s> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq3_s> cell(panel, block, c);
    const uint32_t j = cell.block;
    const Bytes high = cell.byte(66 + j);
    b.scale[0] = odd_scale(cell.d(), (cell.byte(106 + j / 2) >> (4 * (j % 2))) & 15, 1.0f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      const uint32_t k = 2 + 8 * j + 2 * l;
      put_signed_4<l>(&kIq3SCodebook, indices(cell.byte(k), (high >> (2 * l)) & 1),
                      indices(cell.byte(k + 1), (high >> (2 * l + 1)) & 1), cell.byte(74 + 4 * j + l), b);
    });
  }
};

template <>
struct Codec<PanelKind::iq1_s> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    const TransposedCell<PanelKind::iq1_s> cell(panel, block, c);
    // A word: 4 x 3 upper bits of indices, the scale, the shift's sign.
    const Bytes low = cell.byte(34 + 2 * cell.block), high = cell.byte(35 + 2 * cell.block);
    const Bytes upper[4] = {low & 7, (low >> 3) & 7, ((low >> 6) & 3) | ((high << 2) & 4), (high >> 1) & 7};
    b.scale[0] = odd_scale(cell.d(), (high >> 4) & 7, 0.125f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      put_shifted_8<l>(indices(cell.byte(2 + 4 * cell.block + l), upper[l]), (high >> 4) & 8, b);
    });
  }
};

template <>
struct Codec<PanelKind::iq1_m> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    // d, then the 3-bit scales 2 j and 2 j + 1 as numbers of six bits, then the indices' low and upper bits.
    const TransposedCell<PanelKind::iq1_m> cell(panel, block, c);
    const Bytes scales = read_six_bits(cell.cell + 64 + c, cell.cell + 32 + c, cell.block);
    b.scale[0] = odd_scale(cell.d(), scales & 7, 0.125f);
    b.scale[1] = odd_scale(cell.d(), (scales >> 3) & 7, 0.125f);
    unroll<4>([&](auto l) V100_INLINE_LAMBDA {
      const Bytes upper = (cell.byte(40 + 2 * cell.block + l / 2) >> (4 * (l % 2))) & 15;
      put_shifted_8<l>(indices(cell.byte(8 + 4 * cell.block + l), upper & 7), upper, b);
    });
  }
};

// A byte holds five digits in base 3 as a fraction of 256. Turns 0..7 have a digit of each of blocks 0..4, turns 8..11
// digits of the halves of blocks 5..7 in turn, turn 12 the digits of the last half of block 7.
template <>
struct Codec<PanelKind::tq1_0> {
  static void read(const std::byte* panel, int32_t block, int c, PanelBlock& b) {
    constexpr int kPowersOf3[5] = {1, 3, 9, 27, 81};
    const Place<PanelKind::tq1_0> at(panel, block);
    b.scale[0] = load_halves(at.cell + 2 * c);
    const auto digits = [&](uint32_t turn, int power) V100_INLINE_LAMBDA {
      return first_trit(times(load_codes(at.cell + 32 + 64 * turn + 4 * c), power));
    };
    if (at.block < 5) {
      for (uint32_t g = 0; g < 8; ++g) b.codes[g] = digits(g, kPowersOf3[at.block]);
    } else {
      for (uint32_t g = 0; g < 4; ++g) {
        b.codes[g] = digits(8 + g, kPowersOf3[2 * (at.block - 5)]);
        b.codes[4 + g] = at.block < 7 ? digits(8 + g, kPowersOf3[2 * (at.block - 5) + 1]) : digits(12, kPowersOf3[g]);
      }
    }
  }
};

}  // namespace

}  // namespace v100::cpu
