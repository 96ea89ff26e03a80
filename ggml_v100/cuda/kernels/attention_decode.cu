// Decode and verify attention: the few new rows of each sequence over all it has, split over its keys.
//
// Shapes    AttentionParams. attention_decode: grid (kv_heads * row_blocks, partitions, sequences); a block has up to 8, 16, 32,
//           48 or 64 rows (attention_pages.cuh) of a kv head and one partition (attention_shape.h). attention_combine: grid
//           (heads * combine_slices, rows); the last block of a row makes its panel.
//           HEAD_DIM is a macro of the unit. COUNTED, another, is for caches with q4_1, q5_0 or q5_1, whose code costs registers
//           and is rarely wanted: units of their own, with fewer kernels.
// Bound     DRAM: keys and values once per 64 rows. A page of q8_0 keys and values of 256 features is 139 KB, 12.4 us of an SM's
//           share of 900 GB/s; 64 rows take 8 x 1024 tensor instructions and as many cycles of shared memory, 10.7 us.
//           A partition's sums are 4 * head_dim bytes per row, written and read once: 12 % of the bytes for 48 rows, 256 K, q8_0.
// Shared    attention_shared_bytes (attention_shape.h), dynamic: 70 KB for 64 rows of 256 features, 12 KB for 8.
// Budget    attention_decode_8   256 threads, <= 128 registers, <= 16 B stack
// Budget    attention_decode_16  256 threads, <= 128 registers, <= 112 B stack
// Budget    attention_decode_24  256 threads, <= 128 registers, <= 248 B stack
// Budget    attention_decode_64  256 threads, <= 255 registers, <= 176 B stack
// Budget    attention_combine    256 threads, <= 64 registers, 5232 B shared
// Budget    attention_decode_64_counted  256 threads, <= 255 registers, <= 224 B stack
// Budget    *                    256 threads, <= 255 registers
// Numerics  attention_pages.cuh per partition, pages in order. Partitions are brought to the largest score of all; every
//           kGroups-th, from the first that the row sees, is added in order, then these sums in order.
//           Gate and panel: the bits of apply_gate_panel.
#include "attention_pages.cuh"
#include "panel.cuh"

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
  const auto find_rows = [&] {
    return attention_block(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x) / p.row_blocks,
                           static_cast<int>(blockIdx.x) % p.row_blocks, Block::kRows);
  };
  Block block;
  if (!block.run(p, find_rows(), partition_begin(partition), partition_begin(partition + 1), shared)) return;

  const AttentionBlock b = find_rows();  // again: kept meanwhile, they would be registers of the loops
  const auto place = [&](int m) {
    return (static_cast<int64_t>(b.query_row(m)) * p.heads + b.head(m)) * p.partitions + partition;
  };
  const int m = static_cast<int>(threadIdx.x), lane = lane_id();
  if (m < b.rows) reinterpret_cast<float2*>(p.part_weight)[place(m)] = {block.largest, block.sum};
  if (!Block::has_sums()) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t * kTileRows + row_of_c(lane, 2 * half);
      if (row >= b.rows) continue;
      float* to = p.part_y + place(row) * HEAD_DIM;
#pragma unroll
      for (int j = 0; j < kBeside; ++j)
#pragma unroll
        for (int i = 2 * half; i < 8; i += 4) {
          const int feature = Block::feature_block(j) * kTileColumns + column_of_c(lane, i);
          if (feature < HEAD_DIM) *reinterpret_cast<float2*>(to + feature) = {block.y[t][j][i], block.y[t][j][i + 1]};
        }
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
V100_DECODE(attention_decode_24, 3, 2)
V100_DECODE(attention_decode_32, 4, 1)
V100_DECODE(attention_decode_48, 6, 1)
V100_DECODE(attention_decode_64, 8, 1)

// Sums of a head's partitions [begin, end), a slice of its features: groups of threads have every kGroups-th partition, a
// thread four features.
struct Combined {
  static constexpr int kSlices = combine_slices(HEAD_DIM), kFeatures = HEAD_DIM / kSlices;
  static constexpr int kLanes = kFeatures / 4, kGroups = kAttentionThreads / kLanes;

  struct Shared {
    float factor[kAttentionThreads];
    float reduced[kAttentionWarps], total[kAttentionWarps];
    float4 sums[kGroups][kLanes];
  };
  float4 y;  // in the threads of group 0
  float weight;

  __device__ __forceinline__ static int group() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  __device__ __forceinline__ Combined(const float2* weights, const float4* sums, int begin, int end, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    float largest = no_score();
    for (int i = begin + thread; i < end; i += kAttentionThreads) largest = fmaxf(largest, weights[i].x);
    largest = block_max<kAttentionWarps>(largest, shared.reduced);

    y = {0.0f, 0.0f, 0.0f, 0.0f}, weight = 0.0f;
    for (int first = begin; first < end; first += kAttentionThreads) {
      const int count = min(kAttentionThreads, end - first);
      __syncthreads();  // the factors before these are used
      if (thread < count) {
        const float2 part = weights[first + thread];
        shared.factor[thread] = part.x == no_score() ? 0.0f : exp2f(part.x - largest);
        weight = fmaf(part.y, shared.factor[thread], weight);
      }
      __syncthreads();  // the factors written above are read below
      if (group() < kGroups) {
#pragma unroll 8
        for (int i = group(); i < count; i += kGroups)
          add(sums[static_cast<int64_t>(first + i) * (HEAD_DIM / 4) + lane()], shared.factor[i]);
      }
    }
    if (group() < kGroups) shared.sums[group()][lane()] = y;
    weight = block_sum<kAttentionWarps>(weight, shared.total);  // its barrier: the sums written above are read below
    if (group() > 0) return;
#pragma unroll
    for (int g = 1; g < kGroups; ++g) add(shared.sums[g][lane()], 1.0f);
  }

 private:
  __device__ __forceinline__ void add(float4 x, float factor) {
    y.x = fmaf(x.x, factor, y.x), y.y = fmaf(x.y, factor, y.y);
    y.z = fmaf(x.z, factor, y.z), y.w = fmaf(x.w, factor, y.w);
  }
};

// Whether this block is the last of `blocks` that come here with the same counter, which is zero before and after. What the
// others wrote before is then to be seen.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t blocks) {
  __shared__ bool is_last;
  __threadfence();  // what this thread wrote is seen before the count
  __syncthreads();  // every thread's
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) == blocks - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();  // is_last is written
  __threadfence();
  return is_last;
}

extern "C" __global__ void __launch_bounds__(kAttentionThreads) attention_combine(AttentionCombineParams p) {
  __shared__ Combined::Shared shared;
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x) / Combined::kSlices;
  const int features = p.heads * HEAD_DIM, slice = static_cast<int>(blockIdx.x) % Combined::kSlices;
  float* y = p.y + static_cast<int64_t>(row) * features;
  const int64_t item = static_cast<int64_t>(row) * p.heads + head;
  const int2 view = reinterpret_cast<const int2*>(p.visible)[row];
  const bool sees = view.x < view.y;
  const int begin = sees ? partition_of(view.x) : 0, end = sees ? partition_of(view.y - 1) + 1 : 0;
  const Combined found(
      reinterpret_cast<const float2*>(p.part_weight) + item * p.partitions,
      reinterpret_cast<const float4*>(p.part_y + item * p.partitions * HEAD_DIM) + slice * Combined::kLanes, begin, end,
      shared);
  const auto result = [&](float sum, int feature) {
    const float value = sees ? sum / found.weight : 0.0f;
    if (p.gate == nullptr) return value;
    return value * sigmoid_f32(p.gate[static_cast<int64_t>(row) * p.gates + feature / (features / p.gates)]);
  };
  if (Combined::group() == 0) {
    const int feature = head * HEAD_DIM + slice * Combined::kFeatures + 4 * Combined::lane();
    *reinterpret_cast<float4*>(y + feature) = {result(found.y.x, feature), result(found.y.y, feature + 1),
                                               result(found.y.z, feature + 2), result(found.y.w, feature + 3)};
  }
  if (p.out.panel == nullptr || !comes_last(p.arrived + row, gridDim.x)) return;
  using Row = HeldRow<8, kAttentionThreads>;
  if (!Row::fits(features))
    return panel_row<kAttentionThreads>(y, features, p.out.tiles, row, p.out.panel, p.out.row_scale + row);
  Row held;
  held.load(y, features);
  panel_row_of(held, features, p.out.tiles, row, p.out.panel, p.out.row_scale + row);
}
#endif

}  // namespace v100::cuda
