// Activations from f32 rows to the f16 panels that tensor-core kernels read: once per distinct input, for all its weights.
//
// Shapes    x [rows, K] f32 -> panel [K / 8][tiles][8 rows][8] f16, row_scale [rows]. One block per row.
//           expert_panel gathers the rows that experts get: a panel per item (ExpertItem).
// Bound     DRAM or L2: 4 K + 2 K bytes per row; of a few rows the latency of one load.
// Budget    *                  512 threads, <= 80 registers, 64 B shared
// Numerics  panel.cuh
#include "panel.cuh"

namespace v100::cuda {

constexpr int kThreads = kRowThreads;

extern "C" __global__ void __launch_bounds__(kThreads) panel(PanelParams p) {
  const int row = static_cast<int>(blockIdx.x);
  panel_row(p.x + static_cast<int64_t>(row) * p.features, p.features, p.tiles, row, p.panel, p.row_scale + row);
}

extern "C" __global__ void __launch_bounds__(kThreads) expert_panel(ExpertPanelParams p) {
  const int row = static_cast<int>(blockIdx.x);
  const ExpertItem item = p.items[blockIdx.y];
  if (row >= item.rows) return;
  const int place = item.first + row, from = p.order[place] / p.slots_per_row;
  uint16_t* panel = p.panel + static_cast<int64_t>(blockIdx.y) * p.features * (8 * p.tiles);
  panel_row(p.x + static_cast<int64_t>(from) * p.features, p.features, p.tiles, row, panel, p.row_scale + place);
}

}  // namespace v100::cuda
