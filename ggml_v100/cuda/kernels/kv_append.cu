// Keys and values of new tokens into the pages of the cache, rounded as ops.h says; and what is stored, read back.
//
// Shapes    KvAppendParams, RotateAppendParams, KvReadParams: [rows, kv_heads * head_dim] f32, pages in the layout of kv_page.h. A warp per row, kv
//           head and 32 features of k or of v.
// Bound     launch: 64 rows of 4 heads of 256 features are 1 MB. Single bytes of values are scattered 16 bytes apart.
// Budget    rotate_and_append  256 threads, <= 64 registers
// Budget    *                  256 threads, <= 40 registers
// Numerics  f16: nearest even. q8_0, q4_0: division, product and fma rounded as on the CPU, so the codes are the same. Read
//           back: code times scale, exactly; storing it again changes no bit.
#include "kv_values.cuh"
#include "rows.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

// What a warp moves: 32 features of a head of a row, keys or values. The warps of a row are adjacent.
struct KvItem {
  int64_t row;
  int head, block;
  bool is_value;

  __device__ __forceinline__ KvItem(const KvCache& cache) {
    const int blocks = kv_feature_blocks(cache.head_dim);
    int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id();
    block = static_cast<int>(item % blocks);
    item /= blocks;
    head = static_cast<int>(item % cache.kv_heads);
    item /= cache.kv_heads;
    is_value = item % 2 != 0;
    row = item / 2;
  }
};

// 32 features of a row's keys or values x [rows, kv_heads * head_dim], by a warp.
__device__ __forceinline__ void append_block(const KvAppendParams& p, const float* x, int64_t row, int head, int block,
                                             bool is_value) {
  const int head_dim = p.cache.head_dim, feature = block * kStripValues + lane_id();
  x += (row * p.cache.kv_heads + head) * head_dim;
  const int index = p.kv_index[row];
  const int64_t page = p.page_table[static_cast<int64_t>(p.sequence[row]) * p.most_pages + index / kPageTokens];
  uint8_t* part = kv_part(p.cache, page, head, is_value);
  store_kv(p.cache, part, is_value, index % kPageTokens, block, feature < head_dim ? x[feature] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(kThreads) kv_append(KvAppendParams p) {
  const KvItem item(p.cache);
  const float* x = item.is_value ? p.v : p.k;
  if (item.row < p.rows && x != nullptr) append_block(p, x, item.row, item.head, item.block, item.is_value);
}

extern "C" __global__ void __launch_bounds__(kThreads) rotate_and_append(RotateAppendParams p) {
  const int kv_heads = p.append.cache.kv_heads, blocks = kv_feature_blocks(p.append.cache.head_dim);
  const int of_row = p.q.heads + kv_heads + kv_heads * blocks;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + warp_id(), row = item / of_row;
  if (row >= p.append.rows) return;
  int part = static_cast<int>(item % of_row);
  if (part < p.q.heads) return norm_rope_head(p.q, row * p.q.heads + part);
  part -= p.q.heads;
  if (part >= kv_heads) {
    part -= kv_heads;
    return append_block(p.append, p.append.v, row, part / blocks, part % blocks, true);
  }
  norm_rope_head(p.k, row * kv_heads + part);
  __syncwarp();  // the key turned above is read below by other lanes
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) append_block(p.append, p.k.x, row, part, block, false);
}

extern "C" __global__ void __launch_bounds__(kThreads) kv_read(KvReadParams p) {
  const KvItem item(p.cache);
  if (item.row >= p.rows) return;
  const int head_dim = p.cache.head_dim, feature = item.block * kStripValues + lane_id();
  if (feature >= head_dim) return;
  const int index = p.where[0] + static_cast<int>(item.row);
  const uint8_t* part = kv_part(p.cache, p.where[1 + index / kPageTokens], item.head, item.is_value);
  float* y = (item.is_value ? p.v : p.k) + (item.row * p.cache.kv_heads + item.head) * head_dim;
  y[feature] = load_kv(p.cache, part, item.is_value, index % kPageTokens, item.block);
}

}  // namespace v100::cuda
