// Residual streams (hyper-connections): a row holds several of them side by side. One pass over memory each.
//
// Shapes    x [rows, streams, features] and its gates; y [rows, features] is what a layer reads or writes. Norms and the memory
//           gate: a block per row and stream; the rest: four features of a row per thread, all streams of them.
// Bound     DRAM or L2: (reads + writes) * 4 bytes. At decode sizes (1..64 rows) the launch.
// Budget    norm_streams       256 threads, <= 40 registers, 64 B shared
// Budget    gate_memory        256 threads, <= 40 registers, 64 B shared
// Budget    *                  256 threads, <= 40 registers
// Numerics  ops.h. Sums over features: each thread over its elements ascending, then base.cuh's block sum; streams in order.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;
constexpr float kLeastGate = 1e-6f;

extern "C" __global__ void __launch_bounds__(kThreads) repeat_streams(RepeatStreamsParams p) {
  const int64_t row = blockIdx.x;
  for_features(p.features, [&](int i) {
    const float x = p.x[row * p.features + i];
    for (int s = 0; s < p.streams; ++s) p.y[(row * p.streams + s) * p.features + i] = x;
  });
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_streams(NormStreamsParams p) {
  __shared__ float sums[kThreads / kWarp];
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * p.streams + blockIdx.y) * p.features;
  const float* x = p.x + start;
  const float* weight = p.weight + static_cast<int64_t>(blockIdx.y) * p.features;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.features; i += kThreads) squares = fmaf(x[i], x[i], squares);
  const float mean = block_sum<kThreads / kWarp>(squares, sums) / static_cast<float>(p.features);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  for (int i = threadIdx.x; i < p.features; i += kThreads) p.y[start + i] = x[i] * scale * weight[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) scaled_silu(ScaleParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride)
    p.x[i] = silu_f32(p.x[i] * p.factor);
}

extern "C" __global__ void __launch_bounds__(kThreads) mix_streams(MixStreamsParams p) {
  const int64_t row = blockIdx.x;
  const float share = 1.0f / static_cast<float>(p.streams);
  for_features(p.features, [&](int i) {
    float y = 0.0f;
    for (int s = 0; s < p.streams; ++s) {
      const int64_t at = (row * p.streams + s) * p.features + i;
      y = fmaf(sigmoid_f32(p.gate[at]), p.x[at], y);
    }
    p.y[row * p.features + i] = y * share;
  });
}

extern "C" __global__ void __launch_bounds__(kThreads) add_to_streams(AddToStreamsParams p) {
  const int64_t row = blockIdx.x;
  const float share = 1.0f / static_cast<float>(p.streams);
  for (int s = 0; s < p.streams; ++s) {
    const float strength = 2.0f * sigmoid_f32(p.inject[row * p.streams + s] * share);
    float* x = p.x + (row * p.streams + s) * p.features;
    for_features(p.features, [&](int i) { x[i] = fmaf(strength, p.y[row * p.features + i], x[i]); });
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) gate_memory(GateMemoryParams p) {
  __shared__ float sums[kThreads / kWarp];
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * p.streams + blockIdx.y) * p.features;
  const float* value = p.value + static_cast<int64_t>(blockIdx.x) * p.features;
  float dot = 0.0f;
  for (int i = threadIdx.x; i < p.features; i += kThreads) dot = fmaf(p.key[start + i], p.query[start + i], dot);
  const float a = block_sum<kThreads / kWarp>(dot, sums) / sqrtf(static_cast<float>(p.features));
  const float u = a == 0.0f ? 0.0f : copysignf(sqrtf(fmaxf(fabsf(a), kLeastGate)), a);
  const float gate = sigmoid_f32(u);
  for (int i = threadIdx.x; i < p.features; i += kThreads) p.y[start + i] = gate * value[i];
}

}  // namespace v100::cuda
