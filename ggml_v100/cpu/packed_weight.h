// A linear layer's weights in the form the kernels stream, and the packing that makes it.
#pragma once

#include <memory>

#include "cpu/kernels.h"
#include "cpu/weight_memory.h"
#include "ops/ops.h"

namespace v100::cpu {

class PackedWeight final : public LinearWeight {
 public:
  enum class Form {
    panels,  // quantised panels of 16 columns, integer dot products (panel.h)
    dense,   // groups of 64 columns of f32, f16 or bf16
  };

  PackedWeight(QuantType type, int32_t in_features, int32_t out_features, const std::byte* rows, float scale,
               ThreadPool& pool, WeightMemory& memory);
  size_t bytes() const override { return bytes_; }
  // What one of this shape takes.
  static size_t bytes(QuantType type, int32_t in_features, int32_t out_features);

  Form form() const { return form_; }
  PanelKind kind() const { return kind_; }          // form panels
  ElementType element() const { return element_; }  // form dense

  // Units in which output columns are shared out: panels of 16 columns, or groups of 64 for form dense.
  int32_t column_units() const { return (out_features + unit_columns_ - 1) / unit_columns_; }
  int32_t unit_columns() const { return unit_columns_; }
  int64_t unit_bytes() const { return unit_bytes_; }

  const std::byte* panel(int32_t index) const { return data_.get() + index * unit_bytes_; }
  // Group of up to four panels, [in_features][16 * group_panels(index)].
  const std::byte* group(int32_t index) const { return data_.get() + index * unit_bytes_; }
  int32_t group_panels(int32_t index) const;

 private:
  void allocate(size_t bytes, WeightMemory& memory);
  void pack_panels(const std::byte* rows, ThreadPool& pool);
  void pack_dense(const std::byte* rows, ThreadPool& pool);

  Form form_;
  PanelKind kind_ = PanelKind::q8_0;
  ElementType element_ = ElementType::f32;
  int32_t unit_columns_ = kPanelColumns;
  int64_t unit_bytes_ = 0;
  size_t bytes_ = 0;
  std::shared_ptr<std::byte> data_;
};

}  // namespace v100::cpu
