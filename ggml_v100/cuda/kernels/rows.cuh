// Norms, rotations and gates of a row or of one of its heads, for the kernels that have them to themselves and for those
// that go on with the result.
//
// Numerics  sums of squares: each thread over its elements ascending, then base.cuh's sums.
#pragma once

#include "base.cuh"

namespace v100::cuda {

constexpr int kRowThreads = 256;

// A block together.
__device__ __forceinline__ void rms_norm_row(const RmsNormParams& p, int row) {
  __shared__ float sums[kRowThreads / kWarp];
  const int64_t start = static_cast<int64_t>(row) * p.features;
  float* x = const_cast<float*>(p.x) + start;
  float squares = 0.0f;
  in_batches<8>(
      threadIdx.x, kRowThreads, p.features,
      [&](int i) { return p.added != nullptr ? x[i] + p.added[start + i] : x[i]; },
      [&](int i, float value) {
        if (p.added != nullptr) x[i] = value;
        squares = fmaf(value, value, squares);
      });
  const float mean = block_sum<kRowThreads / kWarp>(squares, sums) / static_cast<float>(p.features);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  // A thread reads back what it wrote itself: no barrier is needed.
  in_batches<8>(
      threadIdx.x, kRowThreads, p.features, [&](int i) { return x[i] * scale * p.weight[i]; },
      [&](int i, float value) { p.y[start + i] = value; });
}

// What follows is done by a warp. `item` is a head: row * heads + head.

__device__ __forceinline__ float head_scale(const float* head, int32_t head_dim, float eps) {
  float squares = 0.0f;
  in_batches<4>(
      lane_id(), kWarp, head_dim, [&](int i) { return head[i]; },
      [&](int, float value) { squares = fmaf(value, value, squares); });
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
}

__device__ __forceinline__ void norm_rope_head(const NormRopeParams& p, int64_t item) {
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
    in_batches<4>(
        2 * p.pairs + lane_id(), kWarp, p.head_dim, [&](int i) { return head[i] * scale * p.weight[i]; },
        [&](int i, float value) { head[i] = value; });
}

__device__ __forceinline__ void norm_gate_head(const NormGateParams& p, int64_t item) {
  float* head = p.x + item * p.head_dim;
  const float* gate = p.gate + item * p.head_dim;
  const float scale = head_scale(head, p.head_dim, p.eps);
  in_batches<4>(
      lane_id(), kWarp, p.head_dim,
      [&](int i) {
        const float open = p.function == 0 ? silu_f32(gate[i]) : sigmoid_f32(gate[i]);
        return head[i] * scale * p.weight[i] * open;
      },
      [&](int i, float value) { head[i] = value; });
}

}  // namespace v100::cuda
