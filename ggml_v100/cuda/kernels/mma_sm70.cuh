// The tensor instruction of SM70 and where a lane's values stand in it. The only home of the fragment map.
//
// mma.m8n8k4 works in four quadpairs: quadpair p holds lanes 4p..4p+3 and 4p+16..4p+19 and makes its own 8x8x4 product.
// Where few rows meet many columns all quadpairs share A (8 rows of activations) and each has 8 columns of B of its own, so
// one instruction is an 8x32x4 product:
//   A   row = (lane & 3) + 4 * (lane / 16), k = 0..3                    two registers: (k0, k1), (k2, k3)
//   B   column = 8 * ((lane / 4) & 3) + (lane & 3) + 4 * (lane / 16)    the same, of its column
//   C   register i: row = (lane & 1) + (i & 2) + 4 * (lane / 16), column = 8 * ((lane / 4) & 3) + (i & 4) + (lane & 2) + (i & 1)
// Where both come from shared memory two quadpairs share each half of A and of B, a 16x16x4 product. The rows of a quadpair
// are not adjacent: 0..3 and 8..11 or 4..7 and 12..15, and the columns of B likewise, so that eight neighbouring lanes read
// eight adjacent rows of 16 bytes, which are all 32 banks:
//   A   row = (lane & 7) + 8 * (lane / 16)
//   B   column = (lane & 3) + 4 * ((lane / 8) & 1) + 8 * (lane / 16)
//   C   register i: row = (lane & 1) + (i & 2) + (lane & 4) + 8 * (lane / 16),
//       column = (lane & 2) + (i & 1) + 4 * ((lane / 8) & 1) + 2 * (i & 4)
#pragma once

#include "base.cuh"

namespace v100::cuda {

constexpr int kTileRows = 8;      // of activations in one instruction
constexpr int kTileColumns = 32;  // output features of one warp

__host__ __device__ __forceinline__ constexpr int column_of_lane(int lane) {
  return 8 * ((lane >> 2) & 3) + (lane & 3) + 4 * (lane >> 4);
}
__host__ __device__ __forceinline__ constexpr int lane_of_column(int column) {
  return (column & 3) | (((column >> 3) & 3) << 2) | (((column >> 2) & 1) << 4);
}
__device__ __forceinline__ int row_of_a(int lane) { return (lane & 3) + 4 * (lane >> 4); }
__device__ __forceinline__ int row_of_c(int lane, int i) { return (lane & 1) + (i & 2) + 4 * (lane >> 4); }
__device__ __forceinline__ int column_of_c(int lane, int i) {
  return 8 * ((lane >> 2) & 3) + (i & 4) + (lane & 2) + (i & 1);
}

__device__ __forceinline__ int row_of_square_a(int lane) { return (lane & 7) + 8 * (lane >> 4); }
__device__ __forceinline__ int column_of_square_b(int lane) { return (lane & 3) + ((lane >> 1) & 4) + 8 * (lane >> 4); }
__device__ __forceinline__ int row_of_square_c(int lane, int i) {
  return (lane & 1) + (i & 2) + (lane & 4) + 8 * (lane >> 4);
}
__device__ __forceinline__ int column_of_square_c(int lane, int i) {
  return (lane & 2) + (i & 1) + ((lane >> 1) & 4) + 2 * (i & 4);
}

// c += a * b^T for k = 4; sums in f32. Both products are this instruction: the lanes' operands make the difference. SM70.
// `turn` is for the stand-in: where each a meets several b and each b several a, the number of the one plus that of the other.
__device__ __forceinline__ void mma_8x32x4(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                                           [[maybe_unused]] int turn = -1) {
#ifdef V100_BENCH_NO_MMA
  // For timing the loads where the instruction is emulated; nothing is right. A multiply-add takes half of the operands. In
  // turns one each uses all of a and b, so that nothing before it falls away; without turns it takes two.
  if (turn < 0 || turn % 2 == 0) c[0] = fmaf(__uint_as_float(a0), __uint_as_float(b0), c[0]);
  if (turn < 0 || turn % 2 == 1) c[1] = fmaf(__uint_as_float(a1), __uint_as_float(b1), c[1]);
#elif defined(V100_EMULATED)
  emulated_cuda::mma_m8n8k4(c, a0, a1, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void mma_16x16x4(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  mma_8x32x4(c, a0, a1, b0, b1);
}

}  // namespace v100::cuda
