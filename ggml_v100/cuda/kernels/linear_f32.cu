// y = W x for matrices of f32, as routers and small projections are: f32 products and sums, any number of rows.
//
// Shapes    W [N, K] f32 as in the file, x [rows, K], y [rows, N] f32; several W of one K in one launch (jobs), or one per
//           expert with items (ExpertItem). A warp makes 4 features of 8 rows; its lanes go through K side by side.
//           rows8: 4 features and 8 rows per block, each of its 8 warps an eighth of K: few rows want many blocks.
//           rows16: 16 features and 16 rows per block, which share what they read through L1.
// Bound     rows8: DRAM, 4 N K bytes; a router of 1 MB is over in the latency of a launch. rows16: L2, 8 bytes per 32
//           products, a quarter of the 15.7 TFLOP/s: 0.3 ms for 2048 rows, 128 features and K 2048.
// Budget    *                  256 threads, <= 128 registers, 32768 B shared
// Numerics  K is cut into groups of 4, and these into 8 parts, as even as they go. A lane takes every 32nd group of a part: fma
//           ascending, from 0. Then the 8 parts of a lane in order, from 0; then the lanes (base.cuh). The order depends on K
//           alone: a row has the same bits in both kernels, with any others.
#include "linear.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;
constexpr int kParts = 8;     // of K
constexpr int kFeatures = 4;  // of a warp
constexpr int kRows = 8;
constexpr int kOutputs = kFeatures * kRows;  // of a warp

// Four values from k on, zeros behind the end. Rows of K % 4 != 0 values are not aligned.
__device__ __forceinline__ float4 four_of(const float* row, int k, int size) {
  if (size % 4 == 0) return __ldg(reinterpret_cast<const float4*>(row + k));
  float4 values = {row[k], 0.0f, 0.0f, 0.0f};
  if (k + 1 < size) values.y = row[k + 1];
  if (k + 2 < size) values.z = row[k + 2];
  if (k + 3 < size) values.w = row[k + 3];
  return values;
}

// The lane's sums over a part of K: output f * kRows + r is feature f of row r. Rows from `rows` on stay 0.
__device__ __forceinline__ void sum_part(const float* const (&w)[kFeatures], const float* const (&x)[kRows], int rows,
                                         int size, int part, float (&sums)[kOutputs]) {
  const int groups = (size + 3) / 4;
  const int end = groups * (part + 1) / kParts;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) sums[o] = 0.0f;
#pragma unroll 1
  for (int group = groups * part / kParts + lane_id(); group < end; group += kWarp) {
    float4 a[kFeatures];
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) a[f] = four_of(w[f], 4 * group, size);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;  // the same for all lanes
      const float4 b = four_of(x[r], 4 * group, size);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        float& sum = sums[f * kRows + r];
        sum = fmaf(a[f].x, b.x, sum);
        sum = fmaf(a[f].y, b.y, sum);
        sum = fmaf(a[f].z, b.z, sum);
        sum = fmaf(a[f].w, b.w, sum);
      }
    }
  }
}

// What a warp multiplies: features [feature, feature + kFeatures) of a matrix and rows first, ..., first + rows - 1 of the
// launch's, or of its slots by expert. Pointers behind the last feature or row repeat it.
struct Tile {
  const LinearJob* job;
  const float* w[kFeatures];
  const float* x[kRows];
  int feature, first, rows;
  int size;  // in_features, or 0: the expert is not here, or there are no rows for this warp
  float scale;
};

// row_of_block: of the block's rows, the first of this warp. False: there is nothing to do for the whole block.
__device__ __forceinline__ bool find_tile(const LinearF32Params& p, int rows_of_block, int row_of_block,
                                          int features_of_block, int feature_of_block, Tile& tile) {
  const int block = static_cast<int>(blockIdx.x);
  tile.job = &p.job[job_of(p, block)];
  tile.feature = (block - tile.job->first_tile) * features_of_block + feature_of_block;
  const float* weight = reinterpret_cast<const float*>(tile.job->weight);
  tile.scale = tile.job->scale;
  if (p.items != nullptr) {
    const ExpertItem item = p.items[blockIdx.y];
    if (item.rows == 0) return false;
    const ExpertWeight expert = tile.job->experts[item.expert];
    weight = reinterpret_cast<const float*>(expert.weight);
    tile.scale = expert.scale;
    tile.first = item.first + row_of_block;
    tile.rows = item.rows - row_of_block;
  } else {
    tile.first = static_cast<int>(blockIdx.y) * rows_of_block + row_of_block;
    tile.rows = p.rows - tile.first;
  }
  tile.rows = max(0, min(tile.rows, kRows));
  tile.size = weight == nullptr || tile.rows == 0 ? 0 : p.in_features;
#pragma unroll
  for (int f = 0; f < kFeatures; ++f) {
    const int feature = min(tile.feature + f, tile.job->out_features - 1);
    tile.w[f] = weight + static_cast<int64_t>(feature) * tile.size;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = tile.first + min(r, max(tile.rows - 1, 0));
    const int from = tile.rows == 0 ? 0 : p.items != nullptr ? p.order[row] / p.slots_per_row : row;
    tile.x[r] = p.x + static_cast<int64_t>(from) * p.in_features;
  }
  return true;
}

// Output o of the warp's tile from the lanes' sums of it.
__device__ __forceinline__ void store(const LinearF32Params& p, const Tile& tile, int o, float sum) {
  const float y_of_lanes = warp_sum(sum);
  const int feature = tile.feature + o / kRows, row = o % kRows;
  if (lane_id() != 0 || row >= tile.rows || feature >= tile.job->out_features) return;
  float y = __fmul_rn(y_of_lanes, tile.scale);
  if (tile.job->bias != nullptr) y = __fadd_rn(y, tile.job->bias[feature]);
  const int to_row = p.items != nullptr ? p.order[tile.first + row] : tile.first + row;
  float* to = tile.job->y + static_cast<int64_t>(to_row) * tile.job->out_features + feature;
  *to = tile.job->adds ? *to + y : y;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) rows8(LinearF32Params p) {
  __shared__ float partial[kParts][kOutputs][kWarp];
  Tile tile;
  if (!find_tile(p, kRows, 0, kFeatures, 0, tile)) return;  // all threads
  const int part = warp_id(), lane = lane_id();
  float sums[kOutputs];
  sum_part(tile.w, tile.x, tile.rows, tile.size, part, sums);
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) partial[part][o][lane] = sums[o];
  __syncthreads();  // the parts written above are summed below
#pragma unroll
  for (int i = 0; i < kOutputs / kParts; ++i) {
    const int o = part * (kOutputs / kParts) + i;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kParts; ++s) sum += partial[s][o][lane];
    store(p, tile, o, sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) rows16(LinearF32Params p) {
  __shared__ float total[kOutputs][kThreads];  // a thread's own; not in registers, which the products need
  constexpr int kWarpsOfFeatures = 4;
  Tile tile;
  const int warp = warp_id();
  if (!find_tile(p, 2 * kRows, warp / kWarpsOfFeatures * kRows, kWarpsOfFeatures * kFeatures,
                 warp % kWarpsOfFeatures * kFeatures, tile))
    return;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) total[o][threadIdx.x] = 0.0f;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    float sums[kOutputs];
    sum_part(tile.w, tile.x, tile.rows, tile.size, part, sums);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) total[o][threadIdx.x] += sums[o];
  }
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) store(p, tile, o, total[o][threadIdx.x]);
}

}  // namespace v100::cuda
