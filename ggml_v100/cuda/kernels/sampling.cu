// What comes before the choice of the largest logits: a check, token masks, biases and penalties.
//
// Shapes    FindFlawsParams, MaskLogitsParams: flat over a row; SteerLogitsParams: a block per row, over its listed tokens only.
// Bound     find_flaws, mask_logits: 4 and 8 bytes per logit from DRAM or L2; steer_logits: the launch.
// Budget    *                  256 threads, <= 40 registers
// Numerics  steer_logits: each operation rounded as on the CPU (sampling/penalties.cpp), so the bits are the same.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;
constexpr float kLargestFinite = 3.402823466e+38f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float bounded(float value) { return fminf(fmaxf(value, -kLargestFinite), kLargestFinite); }

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

extern "C" __global__ void __launch_bounds__(kThreads) steer_logits(SteerLogitsParams p) {
  const int row = static_cast<int>(blockIdx.x);
  float* logits = p.logits + static_cast<int64_t>(row) * p.n;
  const float repeat = p.penalties[3 * row], frequency = p.penalties[3 * row + 1], presence = p.penalties[3 * row + 2];
  for (int i = p.first_token[row] + static_cast<int>(threadIdx.x); i < p.first_token[row + 1]; i += kThreads) {
    const int token = p.tokens[i], count = p.counts[i];
    float logit = fminf(__fadd_rn(logits[token], p.biases[i]), kLargestFinite);
    if (count > 0 && logit > -infinity()) {
      const float scaled = bounded(logit <= 0.0f ? __fmul_rn(logit, repeat) : __fdiv_rn(logit, repeat));
      const float often = bounded(__fmul_rn(static_cast<float>(count), frequency));
      logit = bounded(__fsub_rn(scaled, bounded(__fadd_rn(often, presence))));
    }
    logits[token] = logit;
  }
}

}  // namespace v100::cuda
