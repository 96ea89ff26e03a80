// Prompt attention: many new rows of each sequence over what each of them sees, in one pass and without a workspace.
//
// Shapes    AttentionParams; grid (row_blocks, kv_heads, sequences); a block has 64 rows (attention_pages.cuh) of a kv head.
//           HEAD_DIM is a macro of the unit, and COUNTED, as in attention_decode.cu.
// Bound     tensor cores: 8 x 1024 instructions per page of 256 features and block are 10.7 us; shared memory needs as long for
//           the A operands, so about half of the peak is to be had. L2: a block reads every page it sees, 262 KB in f16.
//           Quantised keys and values are decoded once for 64 rows, so no window of f16 copies is kept.
// Shared    attention_shared_bytes (attention_shape.h), dynamic: 70 KB for 256 features.
// Budget    attention_prompt   256 threads, <= 255 registers, <= 224 B stack
// Numerics  attention_pages.cuh, all pages in order.
// Rejected  scores of 32 tokens at a time through shared memory, features in slices: every key and value is then stored to and
//           loaded from shared memory, which is the limit already.
#include "attention_pages.cuh"

#ifndef COUNTED
#define COUNTED 0
#endif

namespace v100::cuda {

extern "C" __global__ void __launch_bounds__(kAttentionThreads, 1) attention_prompt(AttentionParams p) {
  using Block = Attention<HEAD_DIM, 8, COUNTED != 0>;
  extern __shared__ uint4 attention_memory[];
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(attention_memory);
  // The last rows see most: they go first.
  const auto find_rows = [&] {
    return attention_block(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y),
                           static_cast<int>(gridDim.x - 1 - blockIdx.x), Block::kRows);
  };
  if (find_rows().rows == 0) return;
  Block block;
  block.run(p, find_rows(), 0, 0x7fffffff, shared);
  const AttentionBlock b = find_rows();  // again: kept meanwhile, they would be registers of the loops

  __syncthreads();  // rescaling is used before its place takes the sums
  if (static_cast<int>(threadIdx.x) < Block::kRows) shared.rescale[0][threadIdx.x] = block.sum;
  __syncthreads();  // the sums written above are read below
  if (!Block::has_sums()) return;
  const int lane = lane_id();
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t * kTileRows + row_of_c(lane, 2 * half);
      if (row >= b.rows) continue;
      const int2 view = reinterpret_cast<const int2*>(p.visible)[b.query_row(row)];
      const float sum = shared.rescale[0][row];
      float* to = p.y + (static_cast<int64_t>(b.query_row(row)) * p.heads + b.head(row)) * HEAD_DIM;
#pragma unroll
      for (int j = 0; j < kBeside; ++j)
#pragma unroll
        for (int i = 2 * half; i < 8; i += 4) {
          const int feature = Block::feature_block(j) * kTileColumns + column_of_c(lane, i);
          float2 y = {0.0f, 0.0f};
          if (view.x < view.y) y = {block.y[t][j][i] / sum, block.y[t][j][i + 1] / sum};
          if (feature < HEAD_DIM) *reinterpret_cast<float2*>(to + feature) = y;
        }
    }
}

}  // namespace v100::cuda
