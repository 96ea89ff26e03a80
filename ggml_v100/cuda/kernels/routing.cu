// Mixtures of experts: which experts a row goes to, which rows an expert gets, and the sum of what they made of a row.
//
// Shapes    RouteParams: a warp per row. GroupSlotsParams: a warp per expert. MixExpertsParams: flat over rows * features.
// Bound     launch: a row of 512 logits is 2 KB. group_slots: every warp reads all slots, 32 of them in about 15 cycles: 8
//           us for 16,384. mix_experts: 4 * (used + 1) bytes per row and feature.
// Budget    route              128 threads, <= 48 registers
// Budget    group_slots        256 threads, <= 40 registers, 4096 B shared
// Budget    mix_experts        256 threads, <= 40 registers
// Numerics  ops.h. The sum over all experts: each lane over its experts ascending, then base.cuh; that of the chosen in order.
#include "base.cuh"

namespace v100::cuda {

constexpr int kRouteWarps = 4;
constexpr int kThreads = 256;
constexpr int kMostExperts = 1024;
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

// The same value in every lane.
__device__ __forceinline__ int warp_sum_of(int value) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(kAllLanes, value, apart);
  return value;
}

// Every block counts the slots of all experts, then each warp places those of its own. Integers only: any order gives the
// same counts.
extern "C" __global__ void __launch_bounds__(kThreads) group_slots(GroupSlotsParams p) {
  __shared__ int32_t count[kMostExperts];
  for (int e = threadIdx.x; e < p.experts; e += kThreads) count[e] = 0;
  __syncthreads();  // counts are zero before any slot is counted
  for (int slot = threadIdx.x; slot < p.slots; slot += kThreads) atomicAdd(&count[p.expert[slot]], 1);
  __syncthreads();  // all slots are counted before the counts are read

  const int lane = lane_id();
  const int expert = static_cast<int>(blockIdx.x) * (kThreads / kWarp) + warp_id();
  const int rows_of_item = p.rows_of_item;
  int slots_before = 0, items_before = 0;
  for (int e = lane; e < min(expert, p.experts); e += kWarp) {
    slots_before += count[e];
    items_before += (count[e] + rows_of_item - 1) / rows_of_item;
  }
  slots_before = warp_sum_of(slots_before);
  items_before = warp_sum_of(items_before);

  if (expert >= p.experts) {  // the warp after the last expert's, or none: what is left of the items is empty
    if (expert == p.experts)
      for (int i = items_before + lane; i < p.most_items; i += kWarp) p.items[i] = {0, 0, 0};
    return;
  }
  const int end = slots_before + count[expert];
  for (int i = lane; slots_before + i * rows_of_item < end; i += kWarp) {
    const int first = slots_before + i * rows_of_item;
    p.items[items_before + i] = {expert, first, min(rows_of_item, end - first)};
  }

  constexpr int kAhead = 4;  // loads in flight
  int place = slots_before;
#pragma unroll 1
  for (int begin = 0; begin < p.slots && place < end; begin += kAhead * kWarp) {
    bool is_mine[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = begin + i * kWarp + lane;
      is_mine[i] = slot < p.slots && p.expert[slot] == expert;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t mine = __ballot_sync(kAllLanes, is_mine[i]);
      if (is_mine[i]) p.order[place + __popc(mine & ((1u << lane) - 1u))] = begin + i * kWarp + lane;
      place += __popc(mine);
    }
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
