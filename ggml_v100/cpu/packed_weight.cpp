// Packing of whole matrices: quantised types to panels (pack_block.h), others to groups of dense panels.
#include "cpu/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "cpu/pack_block.h"
#include "quants/decode.h"

namespace v100::cpu {

namespace {

// nullopt for types that are multiplied as floats.
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
    case QuantType::Q2_K:
      return PanelKind::q2_K;
    case QuantType::Q3_K:
      return PanelKind::q3_K;
    case QuantType::Q4_K:
      return PanelKind::q4_K;
    case QuantType::Q5_K:
      return PanelKind::q5_K;
    case QuantType::Q6_K:
      return PanelKind::q6_K;
    case QuantType::IQ4_NL:
      return PanelKind::iq4_nl;
    case QuantType::IQ4_XS:
      return PanelKind::iq4_xs;
    case QuantType::MXFP4:
      return PanelKind::mxfp4;
    case QuantType::NVFP4:
      return PanelKind::nvfp4;
    case QuantType::Q1_0:
      return PanelKind::q1_0;
    case QuantType::Q2_0:
      return PanelKind::q2_0;
    case QuantType::TQ2_0:
      return PanelKind::tq2_0;
    case QuantType::TQ1_0:
      return PanelKind::tq1_0;
    case QuantType::IQ1_S:
      return PanelKind::iq1_s;
    case QuantType::IQ1_M:
      return PanelKind::iq1_m;
    case QuantType::IQ2_XXS:
      return PanelKind::iq2_xxs;
    case QuantType::IQ2_XS:
      return PanelKind::iq2_xs;
    case QuantType::IQ2_S:
      return PanelKind::iq2_s;
    case QuantType::IQ3_XXS:
      return PanelKind::iq3_xxs;
    case QuantType::IQ3_S:
      return PanelKind::iq3_s;
    default:
      return std::nullopt;
  }
}

// What a type without panels is stored as: F16 and BF16 as they are, F64 and the formats of activations as f32.
ElementType element_of(QuantType type) {
  switch (type) {
    case QuantType::F16:
      return ElementType::f16;
    case QuantType::BF16:
      return ElementType::bf16;
    case QuantType::F32:
    case QuantType::F64:
    case QuantType::Q8_1:
    case QuantType::Q8_K:
      return ElementType::f32;
    default:
      throw InvalidArgument("a weight matrix of type " + std::string(traits(type).name) + " cannot be multiplied");
  }
}

int64_t column_bytes(ElementType element, int32_t in_features) {
  return int64_t{in_features} * (element == ElementType::f32 ? 4 : 2);
}

}  // namespace

size_t PackedWeight::bytes(QuantType type, int32_t in_features, int32_t out_features) {
  const int64_t panels = (out_features + kPanelColumns - 1) / kPanelColumns;
  const auto kind = panel_kind(type);
  const int64_t one = kind ? panel_bytes(panel_format(*kind), in_features)
                           : column_bytes(element_of(type), in_features) * kPanelColumns;
  return static_cast<size_t>(panels * one);
}

PackedWeight::PackedWeight(QuantType type, int32_t in_features, int32_t out_features, const std::byte* rows,
                           float scale, ThreadPool& pool, WeightMemory& memory)
    : LinearWeight(type, in_features, out_features, scale) {
  if (const auto kind = panel_kind(type)) {
    form_ = Form::panels;
    kind_ = *kind;
    unit_bytes_ = panel_bytes(panel_format(kind_), in_features);
    allocate(bytes(type, in_features, out_features), memory);
    pack_panels(rows, pool);
  } else {
    form_ = Form::dense;
    element_ = element_of(type);
    unit_columns_ = kGroupColumns;
    unit_bytes_ = column_bytes(element_, in_features) * kGroupColumns;
    allocate(bytes(type, in_features, out_features), memory);
    pack_dense(rows, pool);
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
  const int64_t row_size = row_bytes(t, in_features);
  pool.parallel_for(column_units(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int32_t columns = static_cast<int32_t>(std::min<int64_t>(kPanelColumns, out_features - p * kPanelColumns));
      for (int32_t index = 0; index < blocks; ++index)
        for (int32_t c = 0; c < columns; ++c) {
          const std::byte* row = rows + (p * kPanelColumns + c) * row_size;
          put_block(kind_, data_.get() + p * unit_bytes_, c, index, row + int64_t{index} * t.block_bytes,
                    t.block_values);
        }
    }
  });
}

void PackedWeight::pack_dense(const std::byte* rows, ThreadPool& pool) {
  const bool widened = type != QuantType::F32 && element_ == ElementType::f32;
  const auto row_size = row_bytes(traits(type), in_features);
  const size_t element_bytes = element_ == ElementType::f32 ? 4 : 2;
  pool.parallel_for(column_units(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> decoded(widened ? static_cast<size_t>(in_features) : 0);
    for (int64_t g = begin; g < end; ++g) {
      const int32_t width = group_panels(static_cast<int32_t>(g)) * kPanelColumns;
      const int32_t columns = static_cast<int32_t>(std::min<int64_t>(width, out_features - g * kGroupColumns));
      std::byte* target = data_.get() + g * unit_bytes_;
      for (int32_t c = 0; c < columns; ++c) {
        const std::byte* source = rows + (g * kGroupColumns + c) * row_size;
        if (widened) {
          decode(type, source, decoded.data(), in_features);
          source = reinterpret_cast<const std::byte*>(decoded.data());
        }
        for (int32_t k = 0; k < in_features; ++k)
          std::memcpy(
              target + (static_cast<size_t>(k) * static_cast<size_t>(width) + static_cast<size_t>(c)) * element_bytes,
              source + static_cast<size_t>(k) * element_bytes, element_bytes);
      }
    }
  });
}

}  // namespace v100::cpu
