// Expansion of the codebook kinds (IQ1, IQ2, IQ3) and of TQ1_0, written once in plain C++ but for the f16 scales.
//
// What      blocks of 16 columns to ExpandedBlock: codes q + bias, scales as in ops/ops.h (linear)
// Layout    the file's bytes, transposed (panel.h): row(i) is byte i of a block of all 16 columns
// Tile      a row of a codebook is one 8-byte (IQ3: two 4-byte) load; its signs are applied to all bytes at once
// Bound     loads and stores, about two cycles for 8 values; shared by all rows of x that are multiplied
#pragma once

#include "cpu/codecs.h"
#include "quants/codebooks.h"

namespace v100::cpu {

namespace {

// Eight bytes at once, none of which carries into the next.
constexpr uint64_t repeated(uint64_t byte) { return byte * 0x0101010101010101u; }

struct SignTable {
  uint64_t masks[256];
};

// Masks that turn bytes q, 1..127, to codes q + 128 or -q + 128 where the index has a sign bit: q ^ 128, or ~q ^ 128
// and one added. even: the index has seven bits, the eighth makes the number of signs even.
constexpr SignTable sign_table(bool even) {
  SignTable table{};
  for (uint32_t index = 0; index < 256; ++index) {
    uint32_t signs = index;
    if (even) signs = (index & 127) | ((0x6996u >> ((index ^ index >> 4) & 15) ^ index >> 7) & 1) << 7;
    for (int j = 0; j < 8; ++j) table.masks[index] |= uint64_t{(signs >> j & 1) != 0 ? 0x7Fu : 0x80u} << (8 * j);
  }
  return table;
}
constexpr SignTable kSigns = sign_table(false), kEvenSigns = sign_table(true);

inline uint64_t with_signs(uint64_t row, uint64_t mask) { return (row ^ mask) + (mask & repeated(1)); }

inline uint64_t row_of_8(const void* codebook, int32_t index) {
  uint64_t row;
  __builtin_memcpy(&row, static_cast<const char*>(codebook) + 8 * index, 8);
  return row;
}
inline uint64_t rows_of_4(const void* codebook, int32_t first, int32_t second) {
  uint32_t low, high;
  __builtin_memcpy(&low, static_cast<const char*>(codebook) + 4 * first, 4);
  __builtin_memcpy(&high, static_cast<const char*>(codebook) + 4 * second, 4);
  return low | uint64_t{high} << 32;
}
// Codes 8 q + 9 of values q = g + 1/8 or g - 1/8, g -1..1: 8 (g + 1) + 2 or + 0.
inline uint64_t shifted_row(uint64_t row, bool down) {
  return ((row ^ repeated(0x80)) - repeated(0x7F)) << 3 | (down ? 0 : repeated(2));
}

// Values 8 l .. 8 l + 7 of column c.
inline void put_8(ExpandedBlock& b, int l, int c, uint64_t codes) {
  const auto low = static_cast<uint32_t>(codes), high = static_cast<uint32_t>(codes >> 32);
  __builtin_memcpy(b.codes[2 * l] + 4 * c, &low, 4);
  __builtin_memcpy(b.codes[2 * l + 1] + 4 * c, &high, 4);
}

// A super-block of 256 values of 16 columns.
struct TransposedCell {
  const uint8_t* bytes;
  float d[16];

  const uint8_t* row(int i) const { return bytes + 16 * i; }
  int u16(int i, int c) const { return row(i)[c] | row(i + 1)[c] << 8; }
  uint32_t u32(int i, int c) const {
    return static_cast<uint32_t>(u16(i, c)) | static_cast<uint32_t>(u16(i + 2, c)) << 16;
  }
  void read_scales(const uint16_t* halves) {
    for (int c = 0; c < 16; c += kCodeColumns)
      store_scales(d + c, load_halves(reinterpret_cast<const std::byte*>(halves + c)));
  }
};

// (d * (2 s + 1)) * factor of the 4-bit (or narrower) numbers s(c).
template <class Number>
inline void put_odd_scales(const TransposedCell& cell, float factor, float* scale, Number&& s) {
  for (int c = 0; c < 16; ++c) scale[c] = cell.d[c] * static_cast<float>(2 * s(c) + 1) * factor;
}

// block(cell, j, b): block j of 8 of the cell.
template <PanelKind kind>
struct Codebook;

template <>
struct Codebook<PanelKind::iq2_xxs> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    const int at = 2 + 8 * j;  // four indices, then 4 x 7 bits of signs and the scale
    put_odd_scales(cell, 0.125f, b.scale[0], [&](int c) { return cell.row(at + 7)[c] >> 4; });
    for (int c = 0; c < 16; ++c) {
      const uint32_t signs = cell.u32(at + 4, c);
      for (int l = 0; l < 4; ++l)
        put_8(b, l, c,
              with_signs(row_of_8(&kIq2XxsCodebook, cell.row(at + l)[c]), kEvenSigns.masks[signs >> 7 * l & 127]));
    }
  }
};

template <>
struct Codebook<PanelKind::iq2_xs> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    for (int half = 0; half < 2; ++half)
      put_odd_scales(cell, 0.125f, b.scale[half], [&](int c) { return cell.row(66 + j)[c] >> 4 * half & 15; });
    for (int l = 0; l < 4; ++l)
      for (int c = 0; c < 16; ++c) {
        const int word = cell.u16(2 + 8 * j + 2 * l, c);
        put_8(b, l, c, with_signs(row_of_8(&kIq2XsCodebook, word & 511), kEvenSigns.masks[word >> 9]));
      }
  }
};

template <>
struct Codebook<PanelKind::iq2_s> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    for (int half = 0; half < 2; ++half)
      put_odd_scales(cell, 0.125f, b.scale[half], [&](int c) { return cell.row(74 + j)[c] >> 4 * half & 15; });
    for (int l = 0; l < 4; ++l)
      for (int c = 0; c < 16; ++c) {
        const int index = cell.row(2 + 4 * j + l)[c] | (cell.row(66 + j)[c] >> 2 * l & 3) << 8;
        put_8(b, l, c, with_signs(row_of_8(&kIq2SCodebook, index), kSigns.masks[cell.row(34 + 4 * j + l)[c]]));
      }
  }
};

template <>
struct Codebook<PanelKind::iq3_xxs> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    put_odd_scales(cell, 0.25f, b.scale[0], [&](int c) { return cell.row(66 + 4 * j + 3)[c] >> 4; });
    for (int c = 0; c < 16; ++c) {
      const uint32_t signs = cell.u32(66 + 4 * j, c);
      for (int l = 0; l < 4; ++l) {
        const int at = 2 + 8 * j + 2 * l;
        put_8(b, l, c,
              with_signs(rows_of_4(&kIq3XxsCodebook, cell.row(at)[c], cell.row(at + 1)[c]),
                         kEvenSigns.masks[signs >> 7 * l & 127]));
      }
    }
  }
};

template <>
struct Codebook<PanelKind::iq3_s> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    put_odd_scales(cell, 1.0f, b.scale[0], [&](int c) { return cell.row(106 + j / 2)[c] >> 4 * (j % 2) & 15; });
    for (int l = 0; l < 4; ++l)
      for (int c = 0; c < 16; ++c) {
        const int at = 2 + 8 * j + 2 * l, high = cell.row(66 + j)[c] >> 2 * l;
        const uint64_t rows =
            rows_of_4(&kIq3SCodebook, cell.row(at)[c] | (high & 1) << 8, cell.row(at + 1)[c] | (high >> 1 & 1) << 8);
        put_8(b, l, c, with_signs(rows, kSigns.masks[cell.row(74 + 4 * j + l)[c]]));
      }
  }
};

template <>
struct Codebook<PanelKind::iq1_s> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    put_odd_scales(cell, 0.125f, b.scale[0], [&](int c) { return cell.row(35 + 2 * j)[c] >> 4 & 7; });
    for (int c = 0; c < 16; ++c) {
      const int high = cell.u16(34 + 2 * j, c);
      for (int l = 0; l < 4; ++l) {
        const int index = cell.row(2 + 4 * j + l)[c] | (high >> 3 * l & 7) << 8;
        put_8(b, l, c, shifted_row(row_of_8(&kIq1Codebook, index), (high & 0x8000) != 0));
      }
    }
  }
};

template <>
struct Codebook<PanelKind::iq1_m> {
  static void block(const TransposedCell& cell, int j, ExpandedBlock& b) {
    for (int half = 0; half < 2; ++half)
      put_odd_scales(cell, 0.125f, b.scale[half],
                     [&](int c) { return cell.u16(48 + j / 2 * 2, c) >> (6 * (j % 2) + 3 * half) & 7; });
    for (int l = 0; l < 4; ++l)
      for (int c = 0; c < 16; ++c) {
        const int high = cell.row(32 + 2 * j + l / 2)[c] >> 4 * (l % 2);
        const int index = cell.row(4 * j + l)[c] | (high & 7) << 8;
        put_8(b, l, c, shifted_row(row_of_8(&kIq1Codebook, index), (high & 8) != 0));
      }
  }
};

// Offset of the f16 scale in a block; IQ1_M's lies in the top nibbles of four words.
template <PanelKind kind>
inline void read_cell_scales(TransposedCell& cell) {
  uint16_t halves[16];
  for (int c = 0; c < 16; ++c) {
    if constexpr (kind == PanelKind::iq1_m) {
      int bits = 0;
      for (int i = 0; i < 4; ++i) bits |= (cell.row(49 + 2 * i)[c] >> 4) << (4 * i);
      halves[c] = static_cast<uint16_t>(bits);
    } else {
      halves[c] = static_cast<uint16_t>(cell.u16(0, c));
    }
  }
  cell.read_scales(halves);
}

template <PanelKind kind>
void expand_codebook(const std::byte* panel, int32_t first_block, int32_t n_blocks, ExpandedBlock* blocks) {
  for (int32_t i = 0; i < n_blocks; i += 8) {
    const int64_t offset = static_cast<int64_t>((first_block + i) / 8) * panel_format(kind).cell_bytes;
    TransposedCell cell{reinterpret_cast<const uint8_t*>(panel + offset), {}};
    read_cell_scales<kind>(cell);
    for (int j = 0; j < 8; ++j) Codebook<kind>::block(cell, j, blocks[i + j]);
  }
}

// A byte holds five digits in base 3 as a fraction of 256: its first digit is 3 byte / 256; the rest is 3 byte % 256.
// Turns 0..7 have a digit of blocks 0..4, turns 8..11 one of either half of blocks 5..7, turn 12 four of the last turns.
void expand_tq1_0(const std::byte* panel, int32_t first_block, int32_t n_blocks, ExpandedBlock* blocks) {
  for (int32_t i = 0; i < n_blocks; i += 8) {
    const std::byte* cell =
        panel + static_cast<int64_t>((first_block + i) / 8) * panel_format(PanelKind::tq1_0).cell_bytes;
    TransposedCell scales{nullptr, {}};
    uint16_t halves[16];
    __builtin_memcpy(halves, cell, sizeof halves);
    scales.read_scales(halves);
    for (int j = 0; j < 8; ++j)
      for (int c = 0; c < 16; ++c) blocks[i + j].scale[0][c] = scales.d[c];
    for (int turn = 0; turn < 13; ++turn) {
      uint8_t rest[64];
      __builtin_memcpy(rest, cell + 32 + 64 * turn, 64);
      for (int digit = 0; digit < (turn < 12 ? 5 : 4); ++digit) {
        // Where the digit's four values lie, counted in turns of the cell.
        const int place = turn < 8 ? 8 * digit + turn : turn < 12 ? 40 + 4 * digit + turn - 8 : 60 + digit;
        uint8_t* codes = blocks[i + place / 8].codes[place % 8];
        for (int b = 0; b < 64; ++b) {
          codes[b] = static_cast<uint8_t>((rest[b] >= 86) + (rest[b] >= 171));
          rest[b] = static_cast<uint8_t>(3 * rest[b]);
        }
      }
    }
  }
}

}  // namespace

}  // namespace v100::cpu
