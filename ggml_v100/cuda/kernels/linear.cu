// y = W x for 1 to 64 rows: the weights stream through the registers of tensor-core warps, once for all rows.
//
// Shapes    W [N, K] as records (codecs.cuh), x as f16 panels (PanelParams), y [rows, N] f32; several W of one type and K in
//           one launch (jobs). CODEC is a macro of the unit. Of experts: a block has an item (ExpertItem), up to as many rows
//           of one expert as the kernel's name says; an item without rows is left at once.
// Layout    A warp has one or two tiles of 32 output features and every eighth part of K, in whole blocks; a block's 8 warps are
//           the parts of its tiles, summed through shared memory. A unit of 32 k is 2 x 4 instructions per tile and 8 rows.
//           Two tiles, neighbours or of gate and up, take the activations from L1 once. Launch: linear_shape.h.
// Bound     DRAM: N * K / block * block_bytes. Per unit and warp Q8_0 moves 1088 B = 592 cycles of a sub-partition's share
//           of 900 GB/s at 1.53 GHz; the tensor cores need 64 cycles per 8 rows, so up to 64 rows fit.
// Budget    rows8              256 threads, <= 80 registers, 8224 B shared, <= 8 B stack
// Budget    rows32             256 threads, <= 172 registers, 16424 B shared, <= 32 B stack
// Budget    gated_rows32       256 threads, <= 172 registers, 16424 B shared, <= 32 B stack
// Budget    rows64             256 threads, <= 255 registers, 16424 B shared, <= 8 B stack
// Budget    gated_rows64       256 threads, <= 255 registers, 16424 B shared, <= 8 B stack
// Budget    *                  256 threads, <= 128 registers, 16424 B shared, <= 24 B stack
// Numerics  Weights are decoded to f16 (codecs.cuh), products are exact, sums f32: k ascending within a warp's part, then the
//           8 parts in order. All kernels of a codec cut K alike, so a row has the same bits with 1 row as with 64.
#include "linear.cuh"
#include "linear_stream.cuh"

namespace v100::cuda {

// A tile: features from `feature` on, rows first, ..., first + rows - 1 of the launch's, or of its slots by expert.
struct Work {
  int job, feature, first, rows;
  float scale;  // of the matrix
};

// A block's 8 warps are the parts of K of kColumns tiles: neighbours, or of gate and up.
template <class Codec, int kTiles, int kColumns, int kStage, bool kGated>
__device__ __forceinline__ void linear(const LinearParams& p) {
  __shared__ float partial[kColumns][kParts][kTileRows * kTileColumns];
  __shared__ Work work[kColumns];
  const int part = warp_id();
  const int blocks = p.in_features / Codec::kValues;
  const int first_tile = static_cast<int>(blockIdx.x) * (kGated ? 1 : kColumns);

  const uint16_t* panel = p.panel;
  const uint8_t* records[kColumns];
  bool has_weights = true;
  ExpertItem item = {0, 0, p.rows};
  if (p.items != nullptr) {
    item = p.items[blockIdx.y];
    if (item.rows == 0) return;  // all threads
    panel += static_cast<int64_t>(blockIdx.y) * p.in_features * (kTiles * kTileRows);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int tile = kGated ? first_tile : min(first_tile + c, p.tiles - 1);  // one too many is computed, not stored
    const int index = kGated ? c : job_of(p, tile);
    const LinearJob& job = p.job[index];
    const int tile_of_job = kGated ? tile : tile - job.first_tile;
    const uint8_t* weight = job.weight;
    Work mine = {index, tile_of_job * kTileColumns, item.first, item.rows, job.scale};
    if (p.items != nullptr) {
      const ExpertWeight expert = job.experts[item.expert];
      weight = expert.weight;
      mine.scale = expert.scale;
    }
    if (!kGated && first_tile + c >= p.tiles) mine.feature = job.out_features;
    if (threadIdx.x == 0) work[c] = mine;  // not in registers: it is not needed in the loop
    has_weights = has_weights && weight != nullptr;
    records[c] = weight + static_cast<int64_t>(tile_of_job) * blocks * (32 * Codec::kBytes);
  }

  float sums[kColumns][kTiles][8];
  stream_tiles<Codec, kTiles, kColumns, kStage>(panel, records, item.rows, has_weights ? blocks : 0, part, sums);

  // One output of each column per thread and 8 rows: thread i has row i / 32, feature i % 32.
  const int output = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * kTileRows + output / kTileColumns;
    if (t > 0 && t * kTileRows >= work[0].rows) break;  // the same for all threads
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        partial[c][part][row_of_c(lane_id(), i) * kTileColumns + column_of_c(lane_id(), i)] = sums[c][t][i];
    __syncthreads();  // the parts, and `work`, written above are read below
    float y[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] = 0.0f;
#pragma unroll
      for (int s = 0; s < kParts; ++s) y[c] += partial[c][s][output];
    }
    __syncthreads();  // all sums are read before the next rows' take their place
    if (row >= work[0].rows) continue;
    const int slot = p.items != nullptr ? p.order[work[0].first + row] : row;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const LinearJob& job = p.job[kGated ? c : work[c].job];
      const int feature = work[c].feature + output % kTileColumns;
      const bool is_output = feature < job.out_features;
      if (is_output)
        y[c] = output_of(job, work[c].scale, y[c], p.row_scale[work[c].first + row],
                         job.bias != nullptr ? job.bias[feature] : 0.0f);
      if (kGated || !is_output) continue;
      float* to = job.y + static_cast<int64_t>(slot) * job.out_features + feature;
      *to = job.adds ? *to + y[c] : y[c];
    }
    if constexpr (kGated) {
      const int feature = work[0].feature + output % kTileColumns;
      if (feature >= p.job[0].out_features) continue;
      const float gated = activate(p.activation, y[0]) * y[1];
      float* to = p.job[0].y + static_cast<int64_t>(slot) * p.job[0].out_features + feature;
      *to = p.job[0].adds ? *to + gated : gated;
    }
  }
}

#define V100_LINEAR(name, rows, stage, gated, blocks)                                         \
  extern "C" __global__ void __launch_bounds__(kLinearThreads, blocks) name(LinearParams p) { \
    linear<CODEC, rows / kTileRows, gated ? 2 : linear_tiles(rows), stage, gated>(p);         \
  }

// Units of a round for 8 rows: about as many bytes in flight for every type. Wide ones leave registers for one block only.
constexpr int kUnitBytes = kBytesOfUnit<CODEC>;
constexpr int kStage8 = stage_of<CODEC>(kUnitBytes >= 34 ? 1 : kUnitBytes <= (CODEC::kUnits == 1 ? 18 : 10) ? 4 : 2);
constexpr int kBlocks32 = kUnitBytes >= 64 ? 1 : 2;

V100_LINEAR(rows8, 8, kStage8, false, 3)
V100_LINEAR(rows16, 16, 1, false, 2)
V100_LINEAR(rows32, 32, 1, false, kBlocks32)
V100_LINEAR(rows64, 64, 1, false, 1)
V100_LINEAR(gated_rows8, 8, 1, true, 2)
V100_LINEAR(gated_rows16, 16, 1, true, 2)
V100_LINEAR(gated_rows32, 32, 1, true, kBlocks32)
V100_LINEAR(gated_rows64, 64, 1, true, 1)

}  // namespace v100::cuda
