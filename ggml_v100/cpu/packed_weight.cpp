// Packing: file blocks of 16 rows to interleaved panels. File nibble order (byte j holds values j and j + 16) is the
// panel's nibble order too, so that most types only move 32-bit words; the K types are regrouped value by value.
#include "cpu/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/thread_pool.h"

namespace v100::cpu {

namespace {

constexpr uint8_t as_byte(std::byte b) { return std::to_integer<uint8_t>(b); }

// Pieces of a panel for column c; source: the column's block in the file.

void put_half(std::byte* panel_vector, int32_t c, const std::byte* half) { std::memcpy(panel_vector + 2 * c, half, 2); }

// 4-byte words, one per group of 4 values.
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

void put_q4_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  put_half(cell + 32, c, block + 2);
  for (int32_t i = 0; i < 12; ++i) cell[64 + 16 * i + c] = block[4 + i];
  for (int32_t j = 0; j < 8; ++j) {
    uint8_t q[32];
    for (int32_t i = 0; i < 32; ++i) q[i] = as_byte(block[16 + 32 * (j / 2) + i]) >> (4 * (j % 2)) & 15;
    put_nibbles(cell + 256 + j * 256, c, q);
  }
}

void put_q6_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 208);
  for (int32_t i = 0; i < 16; ++i) cell[64 + 16 * i + c] = block[192 + i];
  for (int32_t j = 0; j < 8; ++j) {
    uint8_t q[32];
    for (int32_t i = 0; i < 32; ++i) {
      const int32_t value = 32 * j + i, n = value / 128, r = value % 128;
      const int32_t low = as_byte(block[64 * n + r % 64]) >> (r / 64 * 4) & 15;
      const int32_t high = as_byte(block[128 + 32 * n + r % 32]) >> (r / 32 * 2) & 3;
      q[i] = static_cast<uint8_t>(low | high << 4);
    }
    put_crumbs(cell + 320 + j * 384, c, q, 4);
    put_nibbles(cell + 320 + j * 384 + 128, c, q);
  }
}

// Value i of a super-block with 2-bit fields in 4 turns of 32 per 128 values (Q2_K, Q3_K).
uint8_t two_bits(const std::byte* quants, int32_t i) {
  return as_byte(quants[32 * (i / 128) + i % 32]) >> (i / 32 % 4 * 2) & 3;
}

void put_q2_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 80);
  put_half(cell + 32, c, block + 82);
  for (int32_t i = 0; i < 16; ++i) cell[64 + 16 * i + c] = block[i];
  for (int32_t j = 0; j < 8; ++j) {
    uint8_t q[32];
    for (int32_t i = 0; i < 32; ++i) q[i] = two_bits(block + 16, 32 * j + i);
    put_crumbs(cell + 320 + j * 128, c, q, 0);
  }
}

void put_q3_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block + 108);
  const std::byte* s = block + 96;
  for (int32_t j = 0; j < 16; ++j) {
    const int32_t low = (j < 8 ? as_byte(s[j]) : as_byte(s[j - 8]) >> 4) & 15;
    const int32_t scale = low | (as_byte(s[8 + j % 4]) >> (2 * (j / 4)) & 3) << 4;
    cell[64 + 16 * j + c] = static_cast<std::byte>(scale - 32);
  }
  for (int32_t j = 0; j < 8; ++j) {
    uint8_t q[32];
    for (int32_t i = 0; i < 32; ++i)
      q[i] = static_cast<uint8_t>(two_bits(block + 32, 32 * j + i) | (as_byte(block[i]) >> j & 1) << 2);
    put_code_bits(cell + 320 + j * 192, c, q, 2);
    put_crumbs(cell + 320 + j * 192 + 64, c, q, 0);
  }
}

void put_q5_k(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  put_half(cell + 32, c, block + 2);
  for (int32_t j = 0; j < 8; ++j) {
    cell[64 + 16 * j + c] = static_cast<std::byte>(k_scale(block + 4, j));
    cell[192 + 16 * j + c] = static_cast<std::byte>(k_minimum(block + 4, j));
    uint8_t q[32];
    for (int32_t i = 0; i < 32; ++i)
      q[i] = static_cast<uint8_t>((as_byte(block[48 + 32 * (j / 2) + i]) >> (4 * (j % 2)) & 15) |
                                  (as_byte(block[16 + i]) >> j & 1) << 4);
    put_code_bits(cell + 320 + j * 320, c, q, 4);
    put_nibbles(cell + 320 + j * 320 + 64, c, q);
  }
}

void put_iq4_xs(std::byte* cell, int32_t c, const std::byte* block) {
  put_half(cell, c, block);
  const int32_t high = as_byte(block[2]) | as_byte(block[3]) << 8;
  for (int32_t j = 0; j < 8; ++j) {
    const int32_t scale = (as_byte(block[4 + j / 2]) >> (4 * (j % 2)) & 15) | (high >> (2 * j) & 3) << 4;
    cell[64 + 16 * j + c] = static_cast<std::byte>(scale - 32);
    put_words(cell + 192 + j * 256, c, block + 8 + 16 * j, 4);
  }
}

// Block number `index` of a row, as column c of a coded panel.
void put_coded_block(CodedKind kind, std::byte* panel, int32_t c, int32_t index, const std::byte* block) {
  const PanelFormat& format = kCodedFormats[static_cast<int32_t>(kind)];
  const bool paired = format.cell_values == 64;
  std::byte* cell = panel + static_cast<int64_t>(paired ? index / 2 : index) * format.cell_bytes;
  const int32_t second = paired ? index % 2 : 0;
  switch (kind) {
    case CodedKind::q2_K:
      put_q2_k(cell, c, block);
      return;
    case CodedKind::q3_K:
      put_q3_k(cell, c, block);
      return;
    case CodedKind::q5_K:
      put_q5_k(cell, c, block);
      return;
    case CodedKind::iq4_xs:
      put_iq4_xs(cell, c, block);
      return;
    case CodedKind::iq4_nl:
      put_half(cell + 32 * second, c, block);
      put_words(cell + 64 + 256 * second, c, block + 2, 4);
      return;
    case CodedKind::mxfp4: {
      // Half of the E8M0 value, 2^(e - 128), is a bf16 number: subnormal for e < 2.
      const uint32_t e = as_byte(block[0]);
      const auto scale = static_cast<uint16_t>(e < 2 ? 0x20u << e : (e - 1) << 7);
      std::memcpy(cell + 32 * second + 2 * c, &scale, 2);
      put_words(cell + 64 + 256 * second, c, block + 1, 4);
      return;
    }
  }
}

// Block number `index` of a row, which is column c of the panel.
void put_block(PanelKind kind, std::byte* panel, int32_t c, int32_t index, const std::byte* block) {
  const PanelFormat& format = panel_format(kind);
  const bool paired = format.cell_values == 64;
  std::byte* cell = panel + static_cast<int64_t>(paired ? index / 2 : index) * format.cell_bytes;
  const int32_t second = paired ? index % 2 : 0;
  switch (kind) {
    case PanelKind::q8_0:
      put_half(cell + 32 * second, c, block);
      put_words(cell + 64 + 512 * second, c, block + 2, 8, 0x80808080u);
      return;
    case PanelKind::q4_0:
      put_half(cell + 32 * second, c, block);
      put_words(cell + 64 + 256 * second, c, block + 2, 4);
      return;
    case PanelKind::q4_1:
      put_half(cell, c, block);
      put_half(cell + 32, c, block + 2);
      put_words(cell + 64, c, block + 4, 4);
      return;
    case PanelKind::q5_0:
      put_half(cell + 32 * second, c, block);
      put_file_bits(cell + 64 + 320 * second, c, block + 2);
      put_words(cell + 128 + 320 * second, c, block + 6, 4);
      return;
    case PanelKind::q5_1:
      put_half(cell, c, block);
      put_half(cell + 32, c, block + 2);
      put_file_bits(cell + 64, c, block + 4);
      put_words(cell + 128, c, block + 8, 4);
      return;
    case PanelKind::q4_K:
      put_q4_k(cell, c, block);
      return;
    case PanelKind::q6_K:
      put_q6_k(cell, c, block);
      return;
  }
}

}  // namespace

std::optional<PanelKind> panel_kind(QuantType type) {
  switch (type) {
    case QuantType::Q8_0:
      return PanelKind::q8_0;
    case QuantType::Q4_0:
      return PanelKind::q4_0;
    case QuantType::Q4_1:
      return PanelKind::q4_1;
    case QuantType::Q5_0:
      return PanelKind::q5_0;
    case QuantType::Q5_1:
      return PanelKind::q5_1;
    case QuantType::Q4_K:
      return PanelKind::q4_K;
    case QuantType::Q6_K:
      return PanelKind::q6_K;
    default:
      return std::nullopt;
  }
}

std::optional<CodedKind> coded_kind(QuantType type) {
  switch (type) {
    case QuantType::Q2_K:
      return CodedKind::q2_K;
    case QuantType::Q3_K:
      return CodedKind::q3_K;
    case QuantType::Q5_K:
      return CodedKind::q5_K;
    case QuantType::IQ4_NL:
      return CodedKind::iq4_nl;
    case QuantType::IQ4_XS:
      return CodedKind::iq4_xs;
    case QuantType::MXFP4:
      return CodedKind::mxfp4;
    default:
      return std::nullopt;
  }
}

PackedWeight::PackedWeight(QuantType type, int32_t in_features, int32_t out_features, const std::byte* rows,
                           ThreadPool& pool, WeightMemory& memory)
    : LinearWeight(type, in_features, out_features), row_bytes_(row_bytes(traits(type), in_features)) {
  if (const auto kind = panel_kind(type)) {
    form_ = Form::panels;
    kind_ = *kind;
    unit_bytes_ = cells_bytes(panel_format(kind_), in_features);
    allocate(static_cast<size_t>(column_units() * unit_bytes_), memory);
    pack_panels(rows, pool);
  } else if (const auto coded = coded_kind(type)) {
    form_ = Form::coded;
    coded_ = *coded;
    unit_bytes_ = cells_bytes(kCodedFormats[static_cast<int32_t>(coded_)], in_features);
    allocate(static_cast<size_t>(column_units() * unit_bytes_), memory);
    pack_panels(rows, pool);
  } else if (type == QuantType::F32 || type == QuantType::F16 || type == QuantType::BF16) {
    form_ = Form::dense;
    element_ = type == QuantType::F32   ? ElementType::f32
               : type == QuantType::F16 ? ElementType::f16
                                        : ElementType::bf16;
    unit_columns_ = kGroupColumns;
    unit_bytes_ = row_bytes_ * kGroupColumns;
    const int32_t panels = (out_features + kPanelColumns - 1) / kPanelColumns;
    allocate(static_cast<size_t>(row_bytes_) * kPanelColumns * static_cast<size_t>(panels), memory);
    pack_dense(rows, pool);
  } else {
    form_ = Form::rows;
    if (traits(type).block_values == 1 && type != QuantType::F64)
      throw InvalidArgument("a weight matrix of type " + std::string(traits(type).name) + " cannot be multiplied");
    unit_bytes_ = row_bytes_ * kPanelColumns;
    allocate(static_cast<size_t>(row_bytes_ * out_features), memory);
    pool.parallel_for(out_features, 64, [&](int64_t begin, int64_t end) {
      std::memcpy(data_.get() + begin * row_bytes_, rows + begin * row_bytes_,
                  static_cast<size_t>((end - begin) * row_bytes_));
    });
  }
}

void PackedWeight::allocate(size_t bytes, WeightMemory& memory) {
  bytes_ = bytes;
  data_ = memory.allocate(bytes);
}

int32_t PackedWeight::group_panels(int32_t index) const {
  const int32_t panels = (out_features + kPanelColumns - 1) / kPanelColumns;
  return std::min(kGroupPanels, panels - index * kGroupPanels);
}

void PackedWeight::pack_panels(const std::byte* rows, ThreadPool& pool) {
  const QuantTraits& t = traits(type);
  const int32_t blocks = in_features / t.block_values;
  pool.parallel_for(column_units(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int32_t columns = static_cast<int32_t>(std::min<int64_t>(kPanelColumns, out_features - p * kPanelColumns));
      for (int32_t index = 0; index < blocks; ++index)
        for (int32_t c = 0; c < columns; ++c) {
          const std::byte* block =
              rows + (p * kPanelColumns + c) * row_bytes_ + static_cast<int64_t>(index) * t.block_bytes;
          if (form_ == Form::panels)
            put_block(kind_, data_.get() + p * unit_bytes_, c, index, block);
          else
            put_coded_block(coded_, data_.get() + p * unit_bytes_, c, index, block);
        }
    }
  });
}

void PackedWeight::pack_dense(const std::byte* rows, ThreadPool& pool) {
  const auto element_bytes = static_cast<size_t>(traits(type).block_bytes);
  pool.parallel_for(column_units(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int32_t width = group_panels(static_cast<int32_t>(g)) * kPanelColumns;
      const int32_t columns = static_cast<int32_t>(std::min<int64_t>(width, out_features - g * kGroupColumns));
      std::byte* target = data_.get() + g * unit_bytes_;
      for (int32_t c = 0; c < columns; ++c) {
        const std::byte* source = rows + (g * kGroupColumns + c) * row_bytes_;
        for (int32_t k = 0; k < in_features; ++k)
          std::memcpy(
              target + (static_cast<size_t>(k) * static_cast<size_t>(width) + static_cast<size_t>(c)) * element_bytes,
              source + static_cast<size_t>(k) * element_bytes, element_bytes);
      }
    }
  });
}

}  // namespace v100::cpu
