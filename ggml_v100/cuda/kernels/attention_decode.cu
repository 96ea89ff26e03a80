// Decode and verify attention: the few new rows of each sequence over all it has, split over its keys.
//
// Shapes    AttentionParams. attention_decode: grid (kv_heads * row_blocks, partitions, sequences); a block has up to 8, 16, 32,
//           48 or 64 rows (attention.cuh) of a kv head and one partition (attention_shape.h). attention_combine: grid (heads, rows).
//           HEAD_DIM is a macro of the unit. COUNTED, another, is for caches with q4_1, q5_0 or q5_1, whose code costs registers
//           and is rarely wanted: units of their own, with fewer kernels.
// Bound     DRAM: keys and values once per 64 rows. A page of q8_0 keys and values of 256 features is 139 KB, 12.4 us of an SM's
//           share of 900 GB/s; 64 rows take 8 x 1024 tensor instructions and as many cycles of shared memory, 10.7 us.
//           A partition's sums are 4 * head_dim bytes per row, written and read once: 12 % of the bytes for 48 rows, 256 K, q8_0.
// Shared    attention_shared_bytes (attention_shape.h), dynamic: 70 KB for 64 rows of 256 features, 12 KB for 8.
// Budget    attention_decode_8   256 threads, <= 128 registers
// Budget    attention_decode_16  256 threads, <= 128 registers, <= 64 B stack
// Budget    attention_combine    256 threads, <= 40 registers, 1088 B shared
// Budget    attention_decode_64_counted  256 threads, <= 255 registers, <= 64 B stack
// Budget    *                    256 threads, <= 255 registers
// Numerics  attention.cuh per partition, pages in order; partitions are brought to the largest score of all and added in order.
#include "attention.cuh"

#ifndef COUNTED
#define COUNTED 0
#endif

namespace v100::cuda {

template <int kTiles>
__device__ __forceinline__ void decode(const AttentionParams& p) {
  using Block = Attention<HEAD_DIM, kTiles, COUNTED != 0>;
  extern __shared__ uint4 attention_memory[];
  typename Block::Shared& shared = *reinterpret_cast<typename Block::Shared*>(attention_memory);
  // The longest partitions first, so that the short ones fill the gaps at the end.
  const int partition = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  const AttentionBlock b = attention_block(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x) / p.row_blocks,
                                           static_cast<int>(blockIdx.x) % p.row_blocks, Block::kRows);
  if (b.rows == 0) return;
  Block block;
  if (!block.run(p, b, partition_begin(partition), partition_begin(partition + 1), shared)) return;

  const auto place = [&](int m) {
    return (static_cast<int64_t>(b.query_row(m)) * p.heads + b.head(m)) * p.partitions + partition;
  };
  const int m = static_cast<int>(threadIdx.x), lane = lane_id();
  if (m < b.rows) reinterpret_cast<float2*>(p.part_weight)[place(m)] = {block.largest, block.sum};
  if (Block::part() != 0) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int row = t * kTileRows + row_of_c(lane, i);
      const int feature = Block::feature_block() * kTileColumns + column_of_c(lane, i);
      if (row < b.rows && feature < HEAD_DIM)
        *reinterpret_cast<float2*>(p.part_y + place(row) * HEAD_DIM + feature) = {block.y[t][i], block.y[t][i + 1]};
    }
}

#define V100_DECODE(name, tiles, blocks) \
  extern "C" __global__ void __launch_bounds__(kAttentionThreads, blocks) name(AttentionParams p) { decode<tiles>(p); }

#if COUNTED
V100_DECODE(attention_decode_16_counted, 2, 1)
V100_DECODE(attention_decode_64_counted, 8, 1)
#else
V100_DECODE(attention_decode_8, 1, 2)
V100_DECODE(attention_decode_16, 2, 2)
V100_DECODE(attention_decode_32, 4, 1)
V100_DECODE(attention_decode_48, 6, 1)
V100_DECODE(attention_decode_64, 8, 1)

extern "C" __global__ void __launch_bounds__(kAttentionThreads) attention_combine(AttentionParams p) {
  __shared__ float factor[kAttentionThreads], reduced[kAttentionWarps], total[kAttentionWarps];
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x),
            thread = static_cast<int>(threadIdx.x);
  const int64_t item = static_cast<int64_t>(row) * p.heads + head;
  const int2 view = reinterpret_cast<const int2*>(p.visible)[row];
  const bool sees = view.x < view.y;
  const int begin = sees ? partition_of(view.x) : 0, end = sees ? partition_of(view.y - 1) + 1 : 0;
  const float2* weights = reinterpret_cast<const float2*>(p.part_weight) + item * p.partitions;
  const float* sums = p.part_y + item * p.partitions * HEAD_DIM + thread;

  float largest = no_score();
  for (int i = begin + thread; i < end; i += kAttentionThreads) largest = fmaxf(largest, weights[i].x);
  largest = warp_max(largest);
  if (lane_id() == 0) reduced[warp_id()] = largest;
  __syncthreads();  // the largest written above are read below
#pragma unroll
  for (int w = 0; w < kAttentionWarps; ++w) largest = fmaxf(largest, reduced[w]);

  float y = 0.0f, weight = 0.0f;
  for (int first = begin; first < end; first += kAttentionThreads) {
    const int count = min(kAttentionThreads, end - first);
    __syncthreads();  // the factors before these are used
    if (thread < count) {
      const float2 part = weights[first + thread];
      factor[thread] = part.x == no_score() ? 0.0f : exp2f(part.x - largest);
      weight = fmaf(part.y, factor[thread], weight);
    }
    __syncthreads();  // the factors written above are read below
    if (thread < HEAD_DIM) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) y = fmaf(sums[static_cast<int64_t>(first + i) * HEAD_DIM], factor[i], y);
    }
  }
  weight = block_sum<kAttentionWarps>(weight, total);
  if (thread < HEAD_DIM) p.y[item * HEAD_DIM + thread] = sees ? y / weight : 0.0f;
}
#endif

}  // namespace v100::cuda
