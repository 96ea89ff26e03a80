// Weights from the file's rows of blocks to the records that linear.cu streams. Runs once per matrix, at load.
//
// Shapes    [N, K / block] blocks -> [N / 32][K / block] records (codecs.cuh). One thread per block of a row.
// Bound     Uncoalesced bytes through L1, about a tenth of DRAM's rate: far above what a disk or PCIe delivers.
// Budget    *                  256 threads, <= 64 registers
#include "codecs.cuh"

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

}  // namespace v100::cuda
