// Packing: a file block of one row becomes a column of a panel's cell. File nibble order (byte j holds values j and
// j + 16) is the panel's nibble order too, so that many types only move 32-bit words; others are regrouped value by
// value.
#include "cpu/pack_block.h"

#include <array>
#include <cstring>

namespace v100::cpu {

namespace {

constexpr uint8_t as_byte(std::byte b) { return std::to_integer<uint8_t>(b); }

// Pieces of a panel for column c; source: the column's block in the file.

void put_half(std::byte* vector, int32_t c, const std::byte* half) { std::memcpy(vector + 2 * c, half, 2); }

void put_byte(std::byte* vector, int32_t c, int32_t byte) { vector[c] = static_cast<std::byte>(byte); }

// 4-byte words, one per turn of 4 values.
void put_words(std::byte* codes, int32_t c, const std::byte* source, int32_t words, uint32_t flip = 0) {
  for (int32_t w = 0; w < words; ++w) {
    uint32_t word;
    std::memcpy(&word, source + 4 * w, 4);
    word ^= flip;
    std::memcpy(codes + 64 * w + 4 * c, &word, 4);
  }
}

// q: 32 codes, of which the lowest four bits are taken.
void put_nibbles(std::byte* nibbles, int32_t c, const uint8_t* q) {
  for (int32_t k = 0; k < 16; ++k)
    nibbles[k / 4 * 64 + 4 * c + k % 4] = static_cast<std::byte>((q[k] & 15) | (q[k + 16] & 15) << 4);
}

// Bits `shift` and `shift` + 1 of 32 codes.
void put_crumbs(std::byte* planes, int32_t c, const uint8_t* q, int32_t shift) {
  for (int32_t half = 0; half < 2; ++half)
    for (int32_t t = 0; t < 4; ++t) {
      uint32_t byte = 0;
      for (int32_t g = 0; g < 4; ++g) byte |= (q[16 * half + 4 * g + t] >> shift & 3u) << (2 * g);
      planes[64 * half + 4 * c + t] = static_cast<std::byte>(byte);
    }
}

// Bit `shift` of 32 codes.
void put_code_bits(std::byte* plane, int32_t c, const uint8_t* q, int32_t shift) {
  for (int32_t t = 0; t < 4; ++t) {
    uint32_t byte = 0;
    for (int32_t g = 0; g < 8; ++g) byte |= (q[4 * g + t] >> shift & 1u) << g;
    plane[4 * c + t] = static_cast<std::byte>(byte);
  }
}

void put_file_bits(std::byte* plane, int32_t c, const std::byte* bits) {  // value i = bit i
  uint8_t q[32];
  for (int32_t i = 0; i < 32; ++i) q[i] = as_byte(bits[i / 8]) >> (i % 8) & 1;
  put_code_bits(plane, c, q, 0);
}

// Scale and minimum j of the 12 packed bytes of Q4_K and Q5_K.
uint8_t k_scale(const std::byte* s, int32_t j) {
  return j < 4 ? as_byte(s[j]) & 63 : static_cast<uint8_t>((as_byte(s[j + 4]) & 15) | (as_byte(s[j - 4]) >> 6) << 4);
}
uint8_t k_minimum(const std::byte* s, int32_t j) {
  return j < 4 ? as_byte(s[j + 4]) & 63 : static_cast<uint8_t>((as_byte(s[j + 4]) >> 4) | (as_byte(s[j]) >> 6) << 4);
}

// Numbers a and b of six bits, at place j of the pairs.
void put_six_bit_pair(std::byte* pairs, int32_t c, int32_t j, int32_t a, int32_t b) {
  put_byte(pairs + 16 * j, c, (a & 15) | (b & 15) << 4);
  std::byte& high = pairs[16 * (8 + j / 2) + c];
  high |= static_cast<std::byte>((a >> 4 | b >> 4 << 2) << (4 * (j % 2)));
}

// Value i of a super-block with 2-bit fields in 4 turns of 32 per 128 values (Q2_K, Q3_K, TQ2_0).
uint8_t two_bits(const std::byte* quants, int32_t i) {
  return as_byte(quants[32 * (i / 128) + i % 32]) >> (i / 32 % 4 * 2) & 3;
}

// A block of 32 codes code(i).
template <class Code>
std::array<uint8_t, 32> block_of(Code&& code) {
  std::array<uint8_t, 32> q;
  for (int32_t i = 0; i < 32; ++i) q[static_cast<size_t>(i)] = static_cast<uint8_t>(code(i));
  return q;
}

void put_q2_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 80);
  put_half(cell + 32, c, block + 82);
  for (int32_t i = 0; i < 16; ++i) cell[64 + 16 * i + c] = block[i];
  for (int32_t j = 0; j < 8; ++j)
    put_crumbs(cell + 320 + j * 128, c, block_of([&](int32_t i) { return two_bits(block + 16, 32 * j + i); }).data(),
               0);
}

void put_q3_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 108);
  const auto scale = [s = block + 96](int32_t j) {
    const int32_t low = (j < 8 ? as_byte(s[j]) : as_byte(s[j - 8]) >> 4) & 15;
    return low | (as_byte(s[8 + j % 4]) >> (2 * (j / 4)) & 3) << 4;
  };
  for (int32_t j = 0; j < 8; ++j) {
    put_six_bit_pair(cell + 64, c, j, scale(2 * j), scale(2 * j + 1));
    const auto q =
        block_of([&](int32_t i) { return two_bits(block + 32, 32 * j + i) | (as_byte(block[i]) >> j & 1) << 2; });
    put_code_bits(cell + 256 + j * 192, c, q.data(), 2);
    put_crumbs(cell + 256 + j * 192 + 64, c, q.data(), 0);
  }
}

void put_q4_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  put_half(cell + 32, c, block + 2);
  for (int32_t j = 0; j < 8; ++j) {
    put_six_bit_pair(cell + 64, c, j, k_scale(block + 4, j), k_minimum(block + 4, j));
    const auto q = block_of([&](int32_t i) { return as_byte(block[16 + 32 * (j / 2) + i]) >> (4 * (j % 2)) & 15; });
    put_nibbles(cell + 256 + j * 256, c, q.data());
  }
}

void put_q5_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  put_half(cell + 32, c, block + 2);
  for (int32_t j = 0; j < 8; ++j) {
    put_six_bit_pair(cell + 64, c, j, k_scale(block + 4, j), k_minimum(block + 4, j));
    const auto q = block_of([&](int32_t i) {
      return (as_byte(block[48 + 32 * (j / 2) + i]) >> (4 * (j % 2)) & 15) | (as_byte(block[16 + i]) >> j & 1) << 4;
    });
    put_code_bits(cell + 256 + j * 320, c, q.data(), 4);
    put_nibbles(cell + 256 + j * 320 + 64, c, q.data());
  }
}

void put_q6_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 208);
  for (int32_t i = 0; i < 16; ++i) cell[64 + 16 * i + c] = block[192 + i];
  for (int32_t j = 0; j < 8; ++j) {
    const auto q = block_of([&](int32_t i) {
      const int32_t value = 32 * j + i, n = value / 128, r = value % 128;
      const int32_t low = as_byte(block[64 * n + r % 64]) >> (r / 64 * 4) & 15;
      const int32_t high = as_byte(block[128 + 32 * n + r % 32]) >> (r / 32 * 2) & 3;
      return low | high << 4;
    });
    put_crumbs(cell + 320 + j * 384, c, q.data(), 4);
    put_nibbles(cell + 320 + j * 384 + 128, c, q.data());
  }
}

void put_iq4_xs(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  for (int32_t i = 0; i < 6; ++i) cell[32 + 16 * i + c] = block[2 + i];
  for (int32_t j = 0; j < 8; ++j) put_words(cell + 128 + j * 256, c, block + 8 + 16 * j, 4);
}

// The bits of d are the top nibbles of four words, which hold four 3-bit scales each below.
void put_iq1_m(std::byte* cell, int32_t c, const std::byte* block) {
  const auto word = [&](int32_t i) { return as_byte(block[48 + 2 * i]) | as_byte(block[49 + 2 * i]) << 8; };
  const auto d = static_cast<uint16_t>(word(0) >> 12 | word(1) >> 12 << 4 | word(2) >> 12 << 8 | word(3) >> 12 << 12);
  std::memcpy(cell + 2 * c, &d, 2);
  for (int32_t j = 0; j < 8; ++j) {
    const int32_t pair = word(j / 2) >> (6 * (j % 2)) & 63;
    cell[64 + 16 * (j / 2) + c] |= static_cast<std::byte>((pair & 15) << (4 * (j % 2)));
    cell[32 + 16 * (j / 4) + c] |= static_cast<std::byte>(pair >> 4 << (2 * (j % 4)));
  }
  for (int32_t i = 0; i < 48; ++i) cell[128 + 16 * i + c] = block[i];
}

// Two blocks of 32; a sub-block of 16 pairs value j with value j + 8 in a byte.
void put_nvfp4(std::byte* cell, int32_t c, const std::byte* block) {
  for (int32_t k = 0; k < 4; ++k) {
    const int32_t s = as_byte(block[k]);
    put_byte(cell + 16 * k, c, s == 0x7F ? 0 : s & 0x7F);  // 0x7F counts as zero, bit 7 as clear
  }
  for (int32_t j = 0; j < 2; ++j) {
    const auto q =
        block_of([&](int32_t i) { return as_byte(block[4 + 8 * (2 * j + i / 16) + i % 8]) >> (i / 8 % 2 * 4) & 15; });
    put_nibbles(cell + 64 + 256 * j, c, q.data());
  }
}

}  // namespace

void put_block(PanelKind kind, std::byte* panel, int32_t c, int32_t index, const std::byte* block,
               int32_t block_values) {
  const PanelFormat& format = panel_format(kind);
  const int32_t per_cell = format.cell_values / block_values;
  std::byte* cell = panel + static_cast<int64_t>(index / per_cell) * format.cell_bytes;
  const int32_t place = index % per_cell;  // of the block in the cell
  switch (kind) {
    case PanelKind::q8_0:
      put_half(cell + 32 * place, c, block);
      put_words(cell + 64 + 512 * place, c, block + 2, 8, 0x80808080u);
      return;
    case PanelKind::q4_0:
    case PanelKind::iq4_nl:
      put_half(cell + 32 * place, c, block);
      put_words(cell + 64 + 256 * place, c, block + 2, 4);
      return;
    case PanelKind::q4_1:
      put_half(cell, c, block);
      put_half(cell + 32, c, block + 2);
      put_words(cell + 64, c, block + 4, 4);
      return;
    case PanelKind::q5_0:
      put_half(cell + 32 * place, c, block);
      put_file_bits(cell + 64 + 320 * place, c, block + 2);
      put_words(cell + 128 + 320 * place, c, block + 6, 4);
      return;
    case PanelKind::q5_1:
      put_half(cell, c, block);
      put_half(cell + 32, c, block + 2);
      put_file_bits(cell + 64, c, block + 4);
      put_words(cell + 128, c, block + 8, 4);
      return;
    case PanelKind::q2_K:
      return put_q2_k(cell, c, block);
    case PanelKind::q3_K:
      return put_q3_k(cell, c, block);
    case PanelKind::q4_K:
      return put_q4_k(cell, c, block);
    case PanelKind::q5_K:
      return put_q5_k(cell, c, block);
    case PanelKind::q6_K:
      return put_q6_k(cell, c, block);
    case PanelKind::iq4_xs:
      return put_iq4_xs(cell, c, block);
    case PanelKind::mxfp4:
      cell[16 * place + c] = block[0];
      put_words(cell + 64 + 256 * place, c, block + 1, 4);
      return;
    case PanelKind::nvfp4:
      return put_nvfp4(cell, c, block);
    case PanelKind::q1_0:
      put_half(cell + 32 * place, c, block);
      for (int32_t j = 0; j < 4; ++j) put_file_bits(cell + 64 + 64 * (4 * place + j), c, block + 2 + 4 * j);
      return;
    case PanelKind::q2_0:
      put_half(cell + 32 * place, c, block);
      for (int32_t j = 0; j < 2; ++j) {
        const auto q = block_of([&](int32_t i) { return as_byte(block[2 + 8 * j + i / 4]) >> (2 * (i % 4)) & 3; });
        put_crumbs(cell + 64 + 128 * (2 * place + j), c, q.data(), 0);
      }
      return;
    case PanelKind::tq2_0:
      put_half(cell + 32 * place, c, block + 64);
      for (int32_t j = 0; j < 8; ++j)
        put_crumbs(cell + 64 + 128 * (8 * place + j), c,
                   block_of([&](int32_t i) { return two_bits(block, 32 * j + i); }).data(), 0);
      return;
    case PanelKind::tq1_0:
      put_half(cell, c, block + 52);
      put_words(cell + 32, c, block, 13);
      return;
    case PanelKind::iq1_m:
      return put_iq1_m(cell, c, block);
    case PanelKind::iq1_s:
    case PanelKind::iq2_xxs:
    case PanelKind::iq2_xs:
    case PanelKind::iq2_s:
    case PanelKind::iq3_xxs:
    case PanelKind::iq3_s:
      put_half(cell, c, block);
      for (int32_t i = 2; i < format.cell_bytes / kPanelColumns; ++i) cell[16 * i + c] = block[i];
      return;
  }
}

}  // namespace v100::cpu
