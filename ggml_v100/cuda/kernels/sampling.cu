// What is done to logits beside the choice of the largest: a check, token masks, single values.
//
// Shapes    FindFlawsParams, MaskLogitsParams: flat over a row; PickColumnsParams: a block per row, over what is listed only.
// Bound     find_flaws, mask_logits: 4 and 8 bytes per logit from DRAM or L2; pick_columns: the launch.
// Budget    *                  256 threads, <= 40 registers
// Numerics  exact.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

extern "C" __global__ void __launch_bounds__(kThreads) find_flaws(FindFlawsParams p) {
  const float* logits = p.logits + static_cast<int64_t>(blockIdx.y) * p.n;
  int first = p.n;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < p.n;
       i += static_cast<int>(gridDim.x) * kThreads)
    if (!(logits[i] < infinity())) first = min(first, i);
  if (first < p.n) atomicMin(p.first + blockIdx.y, first);
}

extern "C" __global__ void __launch_bounds__(kThreads) mask_logits(MaskLogitsParams p) {
  const int mask = p.mask_of[blockIdx.y];
  if (mask < 0) return;
  const uint32_t* allowed = p.masks + static_cast<int64_t>(mask) * ((p.n + 31) / 32);
  float* logits = p.logits + static_cast<int64_t>(blockIdx.y) * p.n;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < p.n;
       i += static_cast<int>(gridDim.x) * kThreads)
    if ((allowed[i / 32] >> i % 32 & 1u) == 0) logits[i] = -infinity();
}

extern "C" __global__ void __launch_bounds__(kThreads) pick_columns(PickColumnsParams p) {
  const int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < p.listed; i += kThreads) {
    const int column = p.columns[row * p.listed + i];
    p.y[row * p.listed + i] = column < 0 ? 0.0f : p.x[row * p.n + column];
  }
}

}  // namespace v100::cuda
