// What every kernel needs: thread coordinates, fixed-order sums, the scalar functions of base/math.h.
//
// All sums have one order, whatever the number of rows or blocks: a row's bits do not depend on its batch. No atomics on
// floats anywhere.
#pragma once

#include <cuda_fp16.h>

#include "params.h"

namespace v100::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & (kWarp - 1); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// The features of a thread in kernels of grid (rows, wide_blocks(features)) and 256 threads: body(i) for each.
template <class Body>
__device__ __forceinline__ void for_features(int32_t features, const Body& body) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int i = static_cast<int>(blockIdx.y) * 1024 + part * 256 + static_cast<int>(threadIdx.x);
    if (i < features) body(i);
  }
}

// use(i, load(i)) for i = first, first + step, ... below n, in order; kBatch loads are on their way at a time. A store between
// two loads would make the second wait for the first, because the compiler cannot know that they do not meet.
template <int kBatch, class Load, class Use>
__device__ __forceinline__ void in_batches(int first, int step, int n, const Load& load, const Use& use) {
#pragma unroll 1
  for (int begin = first; begin < n; begin += kBatch * step) {
    decltype(load(0)) values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (begin + b * step < n) values[b] = load(begin + b * step);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (begin + b * step < n) use(begin + b * step, values[b]);
  }
}

// The same value in every lane: butterfly, partners 16, 8, 4, 2, 1 apart. a + b = b + a, so all lanes have the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(kAllLanes, value, apart);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, apart));
  return value;
}

// Sum over the block in the order of warps, the same in every thread. `shared` holds one float per warp and may be used
// again after the next barrier.
template <int kWarps>
__device__ __forceinline__ float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if (lane_id() == 0) shared[warp_id()] = value;
  __syncthreads();  // sums written above are read below
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared[w];
  return total;
}

// The largest over the block, as block_sum.
template <int kWarps>
__device__ __forceinline__ float block_max(float value, float* shared) {
  value = warp_max(value);
  if (lane_id() == 0) shared[warp_id()] = value;
  __syncthreads();  // maxima written above are read below
#pragma unroll
  for (int w = 0; w < kWarps; ++w) value = fmaxf(value, shared[w]);
  return value;
}

// 1 / x to an ulp: an exact division has branches, and costs a row of activations more than all else that is done with it.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef V100_EMULATED
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

__device__ __forceinline__ float sigmoid_f32(float x) { return reciprocal(1.0f + expf(-x)); }
__device__ __forceinline__ float silu_f32(float x) { return x * sigmoid_f32(x); }

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), tanh(u) = 1 - 2 / (1 + e^2u).
__device__ __forceinline__ float gelu_f32(float x) {
  const float u = 0.797884560802865f * x * fmaf(0.044715f * x, x, 1.0f);
  return x * (1.0f - reciprocal(1.0f + expf(u + u)));
}

__device__ __forceinline__ float activate(int32_t activation, float x) {
  return activation == 0 ? silu_f32(x) : gelu_f32(x);
}

}  // namespace v100::cuda
