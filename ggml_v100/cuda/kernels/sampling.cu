// What is done to logits beside the choice of the largest: a check, token masks, single values, sums for probabilities.
//
// Shapes    FindFlawsParams, MaskLogitsParams: flat over a row; PickColumnsParams: a block per row, over what is listed only;
//           SumExpParams: a block per chunk, a thread per four values.
// Bound     find_flaws, mask_logits, sum_exp: 4 to 8 bytes per logit from DRAM or L2; pick_columns: the launch.
// Budget    sum_exp            512 threads, <= 40 registers, 2048 B shared
// Budget    *                  256 threads, <= 40 registers
// Numerics  exact; sum_exp: every operation rounded as in sampling/row_scan.cpp and in its order, so the bits are the same.
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
  const uint32_t* allowed = p.masks + static_cast<int64_t>(max(mask, 0)) * p.words;
  const float* logits = p.logits + static_cast<int64_t>(blockIdx.y) * p.n;
  float* y = p.y + static_cast<int64_t>(blockIdx.y) * p.n;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < p.n;
       i += static_cast<int>(gridDim.x) * kThreads) {
    const int bit = i + p.first_bit;
    y[i] = mask < 0 || (allowed[bit / 32] >> bit % 32 & 1u) != 0 ? logits[i] : -infinity();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) pick_columns(PickColumnsParams p) {
  const int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < p.listed; i += kThreads) {
    const int column = p.columns[row * p.listed + i];
    p.y[row * p.listed + i] = column < 0 ? 0.0f : p.x[row * p.n + column];
  }
}

// e^x for x <= 0, as exp_lanes of row_scan.cpp.
__device__ __forceinline__ float exp_of(float x) {
  x = x > -87.0f ? x : -87.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it becomes an integer
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896341f), kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693145751953125f)), __fmul_rn(n, 1.42860682030941723e-6f));
  float p = 1.0f / 720;
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  const uint32_t exponent = (__float_as_uint(shifted) + 127u) << 23;
  return __fmul_rn(p, __uint_as_float(exponent));
}

constexpr int kSumChunk = 2048, kSumLanes = 4, kSumBlock = 4 * kSumLanes;
constexpr int kSumThreads = kSumChunk / kSumLanes;

extern "C" __global__ void __launch_bounds__(kSumThreads) sum_exp(SumExpParams p) {
  __shared__ float parts[kSumThreads];  // [block of 16 values][lane]
  const int chunk = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const float* row = p.logits + static_cast<int64_t>(blockIdx.y) * p.n;
  const float shift = p.largest[static_cast<int64_t>(blockIdx.y) * p.stride];
  const int begin = chunk * kSumChunk, count = min(kSumChunk, p.n - begin), blocks = count / kSumBlock;
  if (thread / kSumLanes < blocks) {
    const float* x = row + begin + thread / kSumLanes * kSumBlock + thread % kSumLanes;
    const auto term = [&](int i) { return exp_of(__fsub_rn(x[i * kSumLanes], shift)); };
    parts[thread] = __fadd_rn(__fadd_rn(term(0), term(1)), __fadd_rn(term(2), term(3)));
  }
  __syncthreads();  // the parts written above are summed below
  if (thread >= kSumLanes) return;
  double sum = 0.0;
#pragma unroll 8
  for (int block = 0; block < blocks; ++block) sum += static_cast<double>(parts[block * kSumLanes + thread]);
  sum += __shfl_xor_sync(0xfu, sum, 1);
  sum += __shfl_xor_sync(0xfu, sum, 2);
  if (thread > 0) return;
#pragma unroll 1
  for (int i = begin + blocks * kSumBlock; i < begin + count; ++i)
    sum += static_cast<double>(exp_of(__fsub_rn(row[i], shift)));
  p.y[static_cast<int64_t>(blockIdx.y) * gridDim.x + chunk] = sum;
}

}  // namespace v100::cuda
