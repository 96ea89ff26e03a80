// Moves of rows and rectangles: nothing is computed.
//
// Shapes    CopyColumnsParams, FillParams, PreviousRowsParams.
// Bound     DRAM or L2: 8 bytes per value (fill 4). At decode sizes the launch.
// Budget    *                  256 threads, <= 40 registers
// Numerics  exact.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) copy_columns(CopyColumnsParams p) {
  const float* from = p.x + static_cast<int64_t>(blockIdx.x) * p.from_stride;
  float* to = p.y + static_cast<int64_t>(blockIdx.x) * p.to_stride;
  for_features(p.columns, [&](int i) { to[i] = from[i]; });
}

extern "C" __global__ void __launch_bounds__(kThreads) fill(FillParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride) p.x[i] = p.value;
}

// The threads of a sequence's first row also renew its record, after they have read what was there: no other reads it.
extern "C" __global__ void __launch_bounds__(kThreads) previous_rows(PreviousRowsParams p) {
  const int row = static_cast<int>(blockIdx.x), sequence = p.sequence[row];
  if (sequence < 0) return;
  float* y = p.y + static_cast<int64_t>(row) * p.features;
  if (row > p.first_row[sequence]) {
    const float* before = p.x + (static_cast<int64_t>(row) - 1) * p.features;
    for_features(p.features, [&](int i) { y[i] = before[i]; });
    return;
  }
  const int from = p.state_from[sequence], to = p.state_to[sequence];
  const float* newest = p.x + (static_cast<int64_t>(p.end_row[sequence]) - 1) * p.features;
  for_features(p.features, [&](int i) {
    y[i] = from < 0 ? 0.0f : p.last[from * p.slot_values + i];
    if (to >= 0) p.last[to * p.slot_values + i] = newest[i];
  });
}

}  // namespace v100::cuda
