// Row-wise and element-wise operations on f32: norms, residual sums, rotations, gates. One pass over memory each.
//
// Shapes    [rows, features], row-major. Norms and rotations: one block or warp per row or head; the rest: flat.
// Bound     DRAM: (reads + writes) * 4 bytes. At decode sizes (1..64 rows) a launch is shorter than its own latency; what
//           counts then is the number of launches, so norms take the residual sum with them.
// Budget    rms_norm           256 threads, <= 64 registers, 64 B shared
// Budget    gated_largest      256 threads, <= 40 registers, 32 B shared
// Budget    *                  256 threads, <= 40 registers
// Numerics  rows.cuh
#include "rows.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

// One block per row.
extern "C" __global__ void __launch_bounds__(kNormThreads) rms_norm(RmsNormParams p) {
  rms_norm_row(p, static_cast<int>(blockIdx.x));
}

extern "C" __global__ void __launch_bounds__(kThreads) add(AddParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride)
    p.x[i] += p.added[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) add_vector(AddVectorParams p) {
  float* x = p.x + static_cast<int64_t>(blockIdx.x) * p.features;
  for_features(p.features, [&](int i) { x[i] += p.vector[i]; });
}

extern "C" __global__ void __launch_bounds__(kThreads) add_scaled_rows(AddScaledRowsParams p) {
  float* x = p.x + static_cast<int64_t>(p.indices[blockIdx.x]) * p.features;
  const float* added = p.added + static_cast<int64_t>(blockIdx.x) * p.features;
  const float factor = p.factors[blockIdx.x];
  for_features(p.features, [&](int i) { x[i] = fmaf(factor, added[i], x[i]); });
}

extern "C" __global__ void __launch_bounds__(kThreads) scale(ScaleParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride) p.x[i] *= p.factor;
}

// x = cap * tanh(x / cap), tanh(u) = 1 - 2 / (1 + e^2u).
extern "C" __global__ void __launch_bounds__(kThreads) soft_cap(ScaleParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride) {
    const float u = p.x[i] / p.factor;
    p.x[i] = p.factor * (1.0f - 2.0f / (1.0f + expf(u + u)));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gated(GatedParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride)
    p.y[i] = activate(p.activation, p.gate[i]) * p.up[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) gated_largest(GatedLargestParams p) {
  __shared__ float largest[kThreads / kWarp];
  const GatedParams& gated = p.gated;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  float most = 0.0f;
  if (i < gated.n) {
    const float4 quad = activated(gated.activation, *reinterpret_cast<const float4*>(gated.gate + i),
                                  *reinterpret_cast<const float4*>(gated.up + i));
    *reinterpret_cast<float4*>(gated.y + i) = quad;
    most = fmaxf(most, largest_of(quad));
  }
  most = block_max<kThreads / kWarp>(most, largest);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(kThreads) apply_gate(ApplyGateParams p) {
  const int32_t width = p.features / p.gates;
  const int64_t n = static_cast<int64_t>(p.rows) * p.features;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride)
    p.x[i] *= sigmoid_f32(p.gate[i / width]);  // features = gates * width, so rows need no care
}

// One warp per head.

extern "C" __global__ void __launch_bounds__(kThreads) norm_rope(NormRopeParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (item < static_cast<int64_t>(p.rows) * p.heads) norm_rope_head(p, item);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_gate(NormGateParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (item < static_cast<int64_t>(p.rows) * p.heads) norm_gate_head(p, item);
}

// One block per row.
extern "C" __global__ void __launch_bounds__(kThreads) gather_rows(GatherRowsParams p) {
  const float* from = p.x + static_cast<int64_t>(p.indices[blockIdx.x]) * p.features;
  float* to = p.y + static_cast<int64_t>(blockIdx.x) * p.features;
  for (int i = threadIdx.x; i < p.features; i += kThreads) to[i] = from[i];
}

}  // namespace v100::cuda
