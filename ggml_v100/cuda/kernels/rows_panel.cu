// Row-wise operations whose result is multiplied next: they leave it as the panel of the streaming kernels, too.
//
// Shapes    *PanelParams. A block per row.
// Bound     latency: a row is loaded at once, into registers, and everything is made of those (rows that do not fit, and heads
//           of other sizes than 128, go through memory).
// Budget    rms_norm_panel     256 threads, <= 128 registers, 96 B shared
// Budget    gated_panel        512 threads, <= 128 registers, 64 B shared
// Budget    *                  512 threads, <= 80 registers, 64 B shared
// Numerics  rows.cuh, then panel.cuh: the bits of the two kernels one after the other.
#include "panel.cuh"
#include "rows.cuh"

namespace v100::cuda {

constexpr int kThreads = kRowThreads;

// Up to 8192 features: what a row is multiplied by is held beside it.
using NormRow = HeldRow<8, kNormThreads>;
using Row = HeldRow<4, kThreads>;

template <class Row>
__device__ __forceinline__ void leave_held(const PanelOutput& out, int row, Row& x, int features) {
  panel_row_of(x, features, out.tiles, row, out.panel, out.row_scale + row);
}

template <int kThreads>
__device__ __forceinline__ void leave_panel(const PanelOutput& out, int row, const float* rows, int features) {
  __syncthreads();  // the row written before is read below
  panel_row<kThreads>(rows + static_cast<int64_t>(row) * features, features, out.tiles, row, out.panel,
                      out.row_scale + row);
}

extern "C" __global__ void __launch_bounds__(kNormThreads) rms_norm_panel(RmsNormPanelParams p) {
  __shared__ float sums[kNormThreads / kWarp];
  const int row = static_cast<int>(blockIdx.x), features = p.norm.features;
  if (!NormRow::fits(features)) {
    rms_norm_row(p.norm, row);
    return leave_panel<kNormThreads>(p.out, row, p.norm.y, features);
  }
  const int64_t start = static_cast<int64_t>(row) * features;
  NormRow x, weight;
  x.load(p.norm.x + start, features);
  weight.load(p.norm.weight, features);
  if (p.norm.added != nullptr) {
    x.each(features, [&](int first, float4& quad) { quad = quad + quad_at(p.norm.added + start, first); });
    x.store(const_cast<float*>(p.norm.x) + start, features);
  }
  norm_held(x, weight, features, p.norm.eps, sums);
  x.store(p.norm.y + start, features);
  leave_held(p.out, row, x, features);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_gate_panel(NormGatePanelParams p) {
  const NormGateParams& gate = p.gate;
  const int row = static_cast<int>(blockIdx.x), features = gate.heads * gate.head_dim;
  if (!Row::fits(features) || gate.head_dim != 4 * kWarp) {
    for (int head = warp_id(); head < gate.heads; head += kThreads / kWarp)
      norm_gate_head(gate, static_cast<int64_t>(row) * gate.heads + head);
    return leave_panel<kThreads>(p.out, row, gate.y, features);
  }
  const int64_t start = static_cast<int64_t>(row) * features;
  Row x, open;
  x.load(gate.x + start, features);
  open.load(gate.gate + start, features);
  norm_gate_held(gate, x, open);
  x.store(gate.y + start, features);
  leave_held(p.out, row, x, features);
}

extern "C" __global__ void __launch_bounds__(kThreads) gated_panel(GatedPanelParams p) {
  const GatedParams& gated = p.gated;
  const int row = static_cast<int>(blockIdx.x), features = p.features;
  const int64_t start = static_cast<int64_t>(row) * features;
  if (!PanelRow::fits(features)) {
    in_batches<4>(
        4 * static_cast<int>(threadIdx.x), 4 * kThreads, features,
        [&](int i) {
          return activated(gated.activation, quad_at(gated.gate + start, i), quad_at(gated.up + start, i));
        },
        [&](int i, const float4& quad) { *reinterpret_cast<float4*>(gated.y + start + i) = quad; });
    return leave_panel<kThreads>(p.out, row, gated.y, features);
  }
  PanelRow x, up;
  x.load(gated.gate + start, features);
  up.load(gated.up + start, features);
  x.each_with(up, features, [&](int, float4& quad, const float4& u) { quad = activated(gated.activation, quad, u); });
  x.store(gated.y + start, features);
  leave_held(p.out, row, x, features);
}

extern "C" __global__ void __launch_bounds__(kThreads) apply_gate_panel(ApplyGatePanelParams p) {
  const ApplyGateParams& gate = p.gate;
  const int row = static_cast<int>(blockIdx.x), features = gate.features, width = features / gate.gates;
  float* x = gate.x + static_cast<int64_t>(row) * features;
  const float* gates = gate.gate + static_cast<int64_t>(row) * gate.gates;
  if (!Row::fits(features)) {
    in_batches<8>(
        threadIdx.x, kThreads, features, [&](int i) { return x[i] * sigmoid_f32(gates[i / width]); },
        [&](int i, float value) { x[i] = value; });
    return leave_panel<kThreads>(p.out, row, gate.x, features);
  }
  Row held, open;
  held.load(x, features);
  if (width == 1)
    open.load(gates, features);
  else
    open.each(features, [&](int i, float4& quad) {
      quad = {gates[i / width], gates[(i + 1) / width], gates[(i + 2) / width], gates[(i + 3) / width]};
    });
  held.each_with(open, features, [](int, float4& quad, const float4& o) {
    quad = quad * float4{sigmoid_f32(o.x), sigmoid_f32(o.y), sigmoid_f32(o.z), sigmoid_f32(o.w)};
  });
  held.store(x, features);
  leave_held(p.out, row, held, features);
}

}  // namespace v100::cuda
