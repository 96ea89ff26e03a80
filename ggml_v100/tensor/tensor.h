// Activations as the forward pass sees them: f32 matrices, row-major [rows, features], borrowed from the Ops arena.
#pragma once

#include <cstdint>

namespace v100 {

struct Tensor {
  float* data = nullptr;  // in the memory of the Ops' device
  int32_t rows = 0;
  int32_t features = 0;

  float* row(int32_t i) const { return data + static_cast<int64_t>(i) * features; }
  int64_t size() const { return static_cast<int64_t>(rows) * features; }
};

}  // namespace v100
