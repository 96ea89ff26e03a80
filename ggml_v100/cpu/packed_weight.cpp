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

// q: 32 codes; the bits above the lowest four go to the plane.
void put_nibbles(std::byte* nibbles, int32_t c, const uint8_t* q) {
  for (int32_t k = 0; k < 16; ++k)
    nibbles[k / 4 * 64 + 4 * c + k % 4] = static_cast<std::byte>((q[k] & 15) | (q[k + 16] & 15) << 4);
}

void put_bit_plane(std::byte* plane, int32_t c, const std::byte* bits) {  // 32 bits, value i = bit i
  for (int32_t t = 0; t < 4; ++t) {
    uint32_t byte = 0;
    for (int32_t g = 0; g < 8; ++g) {
      const int32_t i = 4 * g + t;
      byte |= (as_byte(bits[i / 8]) >> (i % 8) & 1u) << g;
    }
    plane[4 * c + t] = static_cast<std::byte>(byte);
  }
}

void put_crumbs(std::byte* planes, int32_t c, const uint8_t* q) {
  for (int32_t half = 0; half < 2; ++half)
    for (int32_t t = 0; t < 4; ++t) {
      uint32_t byte = 0;
      for (int32_t g = 0; g < 4; ++g) byte |= (q[16 * half + 4 * g + t] >> 4 & 3u) << (2 * g);
      planes[64 * half + 4 * c + t] = static_cast<std::byte>(byte);
    }
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
    put_crumbs(cell + 320 + j * 384, c, q);
    put_nibbles(cell + 320 + j * 384 + 128, c, q);
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
      put_bit_plane(cell + 64 + 320 * second, c, block + 2);
      put_words(cell + 128 + 320 * second, c, block + 6, 4);
      return;
    case PanelKind::q5_1:
      put_half(cell, c, block);
      put_half(cell + 32, c, block + 2);
      put_bit_plane(cell + 64, c, block + 4);
      put_words(cell + 128, c, block + 8, 4);
      return;
    case PanelKind::q4_K: put_q4_k(cell, c, block); return;
    case PanelKind::q6_K: put_q6_k(cell, c, block); return;
  }
}

}  // namespace

std::optional<PanelKind> panel_kind(QuantType type) {
  switch (type) {
    case QuantType::Q8_0: return PanelKind::q8_0;
    case QuantType::Q4_0: return PanelKind::q4_0;
    case QuantType::Q4_1: return PanelKind::q4_1;
    case QuantType::Q5_0: return PanelKind::q5_0;
    case QuantType::Q5_1: return PanelKind::q5_1;
    case QuantType::Q4_K: return PanelKind::q4_K;
    case QuantType::Q6_K: return PanelKind::q6_K;
    default: return std::nullopt;
  }
}

PackedWeight::PackedWeight(QuantType type, int32_t in_features, int32_t out_features, const std::byte* rows,
                           ThreadPool& pool, WeightMemory& memory)
    : LinearWeight(type, in_features, out_features), row_bytes_(row_bytes(traits(type), in_features)) {
  if (const auto kind = panel_kind(type)) {
    form_ = Form::panels;
    kind_ = *kind;
    unit_bytes_ = panel_bytes(kind_, in_features);
    allocate(static_cast<size_t>(column_units() * unit_bytes_), memory);
    pack_panels(rows, pool);
  } else if (type == QuantType::F32 || type == QuantType::F16 || type == QuantType::BF16) {
    form_ = Form::dense;
    element_ = type == QuantType::F32 ? ElementType::f32 : type == QuantType::F16 ? ElementType::f16 : ElementType::bf16;
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
        for (int32_t c = 0; c < columns; ++c)
          put_block(kind_, data_.get() + p * unit_bytes_, c, index,
                    rows + (p * kPanelColumns + c) * row_bytes_ + static_cast<int64_t>(index) * t.block_bytes);
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
          std::memcpy(target + (static_cast<size_t>(k) * static_cast<size_t>(width) + static_cast<size_t>(c)) * element_bytes,
                      source + static_cast<size_t>(k) * element_bytes, element_bytes);
      }
    }
  });
}

}  // namespace v100::cpu
