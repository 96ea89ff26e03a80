// Mixtures of experts: which experts a row goes to, and the sum of what they made of it.
//
// Shapes    RouteParams: a warp per row. MixExpertsParams: flat over rows * features.
// Bound     launch: a row of 512 logits is 2 KB. mix_experts: 4 * (used + 1) bytes per row and feature.
// Budget    route              128 threads, <= 48 registers
// Budget    mix_experts        256 threads, <= 40 registers
// Numerics  ops.h. The sum over all experts: each lane over its experts ascending, then base.cuh; that of the chosen in order.
#include "base.cuh"

namespace v100::cuda {

constexpr int kRouteWarps = 4;
constexpr int kThreads = 256;
constexpr float kLeastTotal = 6.103515625e-05f;  // 2^-14

// The nearest finite number, the lowest for NaN.
__device__ __forceinline__ float finite(float logit) {
  constexpr float kHighest = 3.402823466e+38f;
  return logit > -kHighest ? fminf(logit, kHighest) : -kHighest;
}

extern "C" __global__ void __launch_bounds__(kRouteWarps* kWarp) route(RouteParams p) {
  const int row = static_cast<int>(blockIdx.x) * kRouteWarps + warp_id(), lane = lane_id();
  if (row >= p.rows) return;
  const float* logits = p.logits + static_cast<int64_t>(row) * p.experts;

  uint32_t taken = 0;  // bit s: expert 32 s + lane is chosen
  int my_expert = 0;   // choice `lane` of the row
  float my_logit = 0.0f, largest = 0.0f;
  for (int j = 0; j < p.used; ++j) {
    float best = 0.0f;
    int expert = p.experts;  // none
    for (int s = 0; s * kWarp + lane < p.experts; ++s) {
      const float logit = finite(logits[s * kWarp + lane]);
      if ((taken >> s & 1u) == 0 && (expert == p.experts || logit > best)) best = logit, expert = s * kWarp + lane;
    }
#pragma unroll
    for (int apart = kWarp / 2; apart > 0; apart /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, apart);
      const int other_expert = __shfl_xor_sync(kAllLanes, expert, apart);
      const bool is_better = other > best || (other == best && other_expert < expert);
      if (other_expert < p.experts && (expert == p.experts || is_better)) best = other, expert = other_expert;
    }
    if (expert % kWarp == lane) taken |= 1u << (expert / kWarp);
    if (j == lane) my_expert = expert, my_logit = best;
    if (j == 0) largest = best;
  }

  float sum = 0.0f;
  for (int e = lane; e < p.experts; e += kWarp) sum += expf(finite(logits[e]) - largest);
  const float share = expf(my_logit - largest) / warp_sum(sum);
  float total = 0.0f;
  for (int j = 0; j < p.used; ++j) total += __shfl_sync(kAllLanes, share, j);
  if (lane < p.used) {
    p.expert[static_cast<int64_t>(row) * p.used + lane] = my_expert;
    p.weight[static_cast<int64_t>(row) * p.used + lane] = share / fmaxf(total, kLeastTotal);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) mix_experts(MixExpertsParams p) {
  const int64_t n = static_cast<int64_t>(p.rows) * p.features, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride) {
    const int64_t row = i / p.features, feature = i % p.features;
    float y = 0.0f;
    for (int j = 0; j < p.used; ++j)
      y = fmaf(p.weight[row * p.used + j], p.x[(row * p.used + j) * p.features + feature], y);
    p.y[i] = y;
  }
}

}  // namespace v100::cuda
