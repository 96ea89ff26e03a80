// Row-wise operations whose result is multiplied next: they leave it as the panel of the streaming kernels, too.
//
// Shapes    *PanelParams. A block per row of the panel, that is 8 * tiles; rows behind the last become zeros.
// Bound     launch: what is saved is that of `panel`, and its wait for memory.
// Budget    *                  256 threads, <= 48 registers, 128 B shared
// Numerics  rows.cuh, then panel.cuh: the bits of the two kernels one after the other.
#include "panel.cuh"
#include "rows.cuh"

namespace v100::cuda {

constexpr int kThreads = kRowThreads;
static_assert(kRowThreads == kPanelThreads, "a block does both");

__device__ __forceinline__ void leave_panel(const PanelOutput& out, const float* rows, int count, int features) {
  const int row = static_cast<int>(blockIdx.x);
  __syncthreads();  // the row written before is read below
  panel_row(row < count ? rows + static_cast<int64_t>(row) * features : nullptr, features, out.tiles, row, out.panel,
            out.row_scale + row);
}

extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_panel(RmsNormPanelParams p) {
  const int row = static_cast<int>(blockIdx.x);
  if (row < p.norm.rows) rms_norm_row(p.norm, row);
  leave_panel(p.out, p.norm.y, p.norm.rows, p.norm.features);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_gate_panel(NormGatePanelParams p) {
  const int row = static_cast<int>(blockIdx.x);
  if (row < p.gate.rows)
    for (int head = warp_id(); head < p.gate.heads; head += kThreads / kWarp)
      norm_gate_head(p.gate, static_cast<int64_t>(row) * p.gate.heads + head);
  leave_panel(p.out, p.gate.x, p.gate.rows, p.gate.heads * p.gate.head_dim);
}

extern "C" __global__ void __launch_bounds__(kThreads) apply_gate_panel(ApplyGatePanelParams p) {
  const int row = static_cast<int>(blockIdx.x);
  const ApplyGateParams& gate = p.gate;
  const int32_t width = gate.features / gate.gates;
  if (row < gate.rows) {
    float* x = gate.x + static_cast<int64_t>(row) * gate.features;
    const float* gates = gate.gate + static_cast<int64_t>(row) * gate.gates;
    in_batches<8>(
        threadIdx.x, kThreads, gate.features, [&](int i) { return x[i] * sigmoid_f32(gates[i / width]); },
        [&](int i, float value) { x[i] = value; });
  }
  leave_panel(p.out, gate.x, gate.rows, gate.features);
}

}  // namespace v100::cuda
