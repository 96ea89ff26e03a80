// Row-wise and element-wise operations on f32: norms, residual sums, rotations, gates. One pass over memory each.
//
// Shapes    [rows, features], row-major. Norms and rotations: one block or warp per row or head; the rest: flat.
// Bound     DRAM: (reads + writes) * 4 bytes. At decode sizes (1..64 rows) a launch is shorter than its own latency; what
//           counts then is the number of launches, so norms take the residual sum with them.
// Budget    rms_norm           256 threads, <= 48 registers, 64 B shared
// Budget    *                  256 threads, <= 40 registers
// Numerics  sums of squares: each thread over its elements ascending, then base.cuh's block sum.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

// One block per row.
extern "C" __global__ void __launch_bounds__(kThreads) rms_norm(RmsNormParams p) {
  __shared__ float sums[kThreads / kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * p.features;
  float* x = const_cast<float*>(p.x) + start;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.features; i += kThreads) {
    float value = x[i];
    if (p.added != nullptr) {
      value += p.added[start + i];
      x[i] = value;
    }
    squares = fmaf(value, value, squares);
  }
  const float mean = block_sum<kThreads / kWarp>(squares, sums) / static_cast<float>(p.features);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  // A thread reads back what it wrote itself: no barrier is needed.
  for (int i = threadIdx.x; i < p.features; i += kThreads) p.y[start + i] = x[i] * scale * p.weight[i];
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

extern "C" __global__ void __launch_bounds__(kThreads) apply_gate(ApplyGateParams p) {
  const int32_t width = p.features / p.gates;
  const int64_t n = static_cast<int64_t>(p.rows) * p.features;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride)
    p.x[i] *= sigmoid_f32(p.gate[i / width]);  // features = gates * width, so rows need no care
}

// One warp per head: its values stay in registers between the norm and the rotation.

__device__ __forceinline__ float head_scale(const float* head, int32_t head_dim, float eps) {
  float squares = 0.0f;
  for (int i = lane_id(); i < head_dim; i += kWarp) squares = fmaf(head[i], head[i], squares);
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_rope(NormRopeParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (item >= static_cast<int64_t>(p.rows) * p.heads) return;
  float* head = p.x + item * p.head_dim;
  const int64_t angles = item / p.heads * p.pairs;
  const bool norm = p.weight != nullptr;
  const float scale = norm ? head_scale(head, p.head_dim, p.eps) : 1.0f;
  const int apart = p.halves ? p.pairs : 1, step = p.halves ? 1 : 2;
  for (int pair = lane_id(); pair < p.pairs; pair += kWarp) {
    const int i = pair * step, j = i + apart;
    float a = head[i], b = head[j];
    if (norm) a = a * scale * p.weight[i], b = b * scale * p.weight[j];
    const float c = p.cosine[angles + pair], s = p.sine[angles + pair];
    head[i] = fmaf(a, c, -(b * s));
    head[j] = fmaf(a, s, b * c);
  }
  if (norm)  // features after the rotated ones
    for (int i = 2 * p.pairs + lane_id(); i < p.head_dim; i += kWarp) head[i] = head[i] * scale * p.weight[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_gate(NormGateParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  if (item >= static_cast<int64_t>(p.rows) * p.heads) return;
  float* head = p.x + item * p.head_dim;
  const float* gate = p.gate + item * p.head_dim;
  const float scale = head_scale(head, p.head_dim, p.eps);
  for (int i = lane_id(); i < p.head_dim; i += kWarp) {
    const float open = p.function == 0 ? silu_f32(gate[i]) : sigmoid_f32(gate[i]);
    head[i] = head[i] * scale * p.weight[i] * open;
  }
}

// One block per row.
extern "C" __global__ void __launch_bounds__(kThreads) gather_rows(GatherRowsParams p) {
  const float* from = p.x + static_cast<int64_t>(p.indices[blockIdx.x]) * p.features;
  float* to = p.y + static_cast<int64_t>(blockIdx.x) * p.features;
  for (int i = threadIdx.x; i < p.features; i += kThreads) to[i] = from[i];
}

}  // namespace v100::cuda
