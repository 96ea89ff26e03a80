// Linear layers on packed weights: rounding of the input, splitting of the work, tails and biases.
#pragma once

#include <span>

#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "cpu/packed_weight.h"
#include "ops/arena.h"

namespace v100::cpu {

// The rows that a call's products read: row i is row `order[i]` of x, or row i without an order.
struct LinearInput {
  Tensor x;
  std::span<const int32_t> order{};

  int32_t rows() const { return order.empty() ? x.rows : static_cast<int32_t>(order.size()); }
  const float* row(int32_t i) const { return x.row(order.empty() ? i : order[static_cast<size_t>(i)]); }
};

// One product y = W x (+ bias), or y = act(W x + bias) * (W_up x + bias_up) with `up`, for some rows of the input. Both
// weights have one shape and form.
struct LinearJob {
  const PackedWeight* weight = nullptr;
  const float* bias = nullptr;  // [out_features], or none
  const PackedWeight* up = nullptr;
  const float* up_bias = nullptr;
  Activation activation = Activation::silu;
  RowRange rows{};
  Tensor y{};
  const int32_t* y_rows = nullptr;  // row i of the input gives row y_rows[i] of y, or row i

  float* target(int32_t i) const { return y.row(y_rows == nullptr ? i : y_rows[i]); }
};

// Jobs read either the same rows or, ascending, rows of their own. Rows are rounded once per kind of panel, however often
// they occur in the order. Scratch is taken from the arena and given back.
void run_linear_jobs(const LinearInput& input, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena,
                     ThreadPool& pool);

}  // namespace v100::cpu
