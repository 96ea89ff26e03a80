// Weights from the file's rows of blocks to the records that linear.cu streams. Runs once per matrix, at load.
//
// Shapes    [N, K / block] blocks -> [N / 32][K / block] records (codecs.cuh). One thread per block of a row.
//           BF16 becomes F16, times a power of two; largest_BF16 finds which (bf16_exponent in params.h).
// Bound     Uncoalesced bytes through L1, about a tenth of DRAM's rate: far above what a disk or PCIe delivers.
// Budget    largest_BF16       256 threads, <= 40 registers, 32 B shared
// Budget    *                  256 threads, <= 64 registers, <= 16 B stack
// Numerics  Codes and scales as they are. BF16: exact down to 2^-31 of the matrix's largest value, then to f16, nearest even.
#include "codebook_codecs.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

template <class Codec>
__device__ __forceinline__ void repack(const RepackParams& p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= static_cast<int64_t>(p.out_features) * p.blocks) return;
  const int64_t row = item / p.blocks, block = item % p.blocks;
  const uint8_t* from = p.rows + item * Codec::kBytes;
  uint8_t* record = p.packed + (row / 32 * p.blocks + block) * 32 * Codec::kBytes;
  Codec::pack(from, record, lane_of_column(static_cast<int>(row % 32)));
}

#define V100_REPACK(codec) \
  extern "C" __global__ void __launch_bounds__(kThreads) repack_##codec(RepackParams p) { repack<codec>(p); }

V100_REPACK(F16)
V100_REPACK(Q8_0)
V100_REPACK(Q4_0)
V100_REPACK(Q4_1)
V100_REPACK(Q5_0)
V100_REPACK(Q5_1)
V100_REPACK(Q2_K)
V100_REPACK(Q3_K)
V100_REPACK(Q4_K)
V100_REPACK(Q5_K)
V100_REPACK(Q6_K)
V100_REPACK(IQ4_NL)
V100_REPACK(IQ4_XS)
V100_REPACK(MXFP4)
V100_REPACK(IQ2_XXS)
V100_REPACK(IQ2_XS)
V100_REPACK(IQ2_S)
V100_REPACK(IQ3_XXS)
V100_REPACK(IQ3_S)
V100_REPACK(IQ1_S)
V100_REPACK(IQ1_M)
V100_REPACK(NVFP4)
V100_REPACK(Q1_0)
V100_REPACK(Q2_0)
V100_REPACK(TQ2_0)

// 32 values to a thread, as a block of F16 is.
extern "C" __global__ void __launch_bounds__(kThreads) repack_BF16(RepackParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= static_cast<int64_t>(p.out_features) * p.blocks) return;
  const int64_t row = item / p.blocks, block = item % p.blocks;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p.rows) + item * F16::kValues;
  const float factor = __uint_as_float(static_cast<uint32_t>(127 + p.exponent) << 23);
  const auto value = [&](int i) { return __uint_as_float(static_cast<uint32_t>(from[i]) << 16) * factor; };
  uint32_t pairs[F16::kValues / 2];
  for (int i = 0; i < F16::kValues / 2; ++i) pairs[i] = as_bits(__floats2half2_rn(value(2 * i), value(2 * i + 1)));
  uint8_t* record = p.packed + (row / 32 * p.blocks + block) * 32 * F16::kBytes;
  F16::pack(reinterpret_cast<const uint8_t*>(pairs), record, lane_of_column(static_cast<int>(row % 32)));
}

// Infinities and NaN do not count: they stay what they are.
extern "C" __global__ void __launch_bounds__(kThreads) largest_BF16(LargestParams p) {
  __shared__ uint32_t largest[kThreads / kWarp];
  uint32_t most = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.n; i += stride) {
    const uint32_t magnitude = p.values[i] & 0x7fffu;
    if (magnitude < 0x7f80u) most = max(most, magnitude);
  }
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, apart));
  if (lane_id() == 0) largest[warp_id()] = most;
  __syncthreads();  // maxima written above are read below
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / kWarp; ++w) most = max(most, largest[w]);
    p.largest[blockIdx.x] = most;
  }
}

}  // namespace v100::cuda
