// y = W x for 1 to 64 rows: the weights stream through the registers of tensor-core warps, once for all rows.
//
// Shapes    W [N, K] as records (codecs.cuh), x as f16 panels (PanelParams), y [rows, N] f32; several W of one type and K in
//           one launch (jobs). CODEC is a macro of the unit. Of experts: a block has an item (ExpertItem), up to as many rows
//           of one expert as the kernel's name says; an item without rows is left at once.
// Layout    A warp has one or two tiles of 32 output features and every eighth part of K, in whole blocks; a group of 8 warps are
//           the parts of its tiles, summed through shared memory. A unit of 32 k is 2 x 4 instructions per tile and 8 rows.
//           Two tiles, neighbours or of gate and up, take the activations from L1 once. A block is one group or, for 16 and 32
//           rows, two: warps w and w + 8 have the same part of K, so what one has brought to L1 the other finds there.
//           Launch: linear_shape.h.
// Bound     DRAM: N * K / block * block_bytes. Per unit and warp Q8_0 moves 1088 B = 592 cycles of a sub-partition's share
//           of 900 GB/s at 1.53 GHz; the tensor cores need 64 cycles per 8 rows, so up to 64 rows fit.
// Budget    rows8              256 threads, <= 80 registers, 8224 B shared, <= 8 B stack
// Budget    gated_rows8        256 threads, <= 128 registers, 16424 B shared, <= 24 B stack
// Budget    linear_f16/rows32  256 threads, <= 172 registers, 16424 B shared, <= 32 B stack
// Budget    linear_f16/gated_rows32 256 threads, <= 172 registers, 16424 B shared, <= 32 B stack
// Budget    rows64             256 threads, <= 255 registers, 16424 B shared, <= 8 B stack
// Budget    gated_rows64       256 threads, <= 255 registers, 16424 B shared, <= 8 B stack
// Budget    rows32             512 threads, <= 128 registers, 16464 B shared, <= 32 B stack
// Budget    gated_rows32       512 threads, <= 128 registers, 16464 B shared, <= 32 B stack
// Budget    linear_q1_0/rows32 512 threads, <= 128 registers, 16464 B shared, <= 56 B stack
// Budget    linear_q1_0/gated_rows32 512 threads, <= 128 registers, 16464 B shared, <= 56 B stack
// Budget    *                  512 threads, <= 128 registers, 16464 B shared, <= 24 B stack
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

// A group's 8 warps are the parts of K of kColumns tiles: neighbours, or of gate and up. A block has up to kMostGroups groups.
template <class Codec, int kTiles, int kColumns, int kStage, bool kGated, int kMostGroups>
__device__ __forceinline__ void linear(const LinearParams& p) {
  __shared__ float partial[kColumns][kParts][kTileRows * kTileColumns];
  __shared__ Work work[kMostGroups][kColumns];
  const int groups = kMostGroups == 1 ? 1 : static_cast<int>(blockDim.x) / kLinearThreads;
  const int group = kMostGroups == 1 ? 0 : warp_id() / kParts;
  const int part = kMostGroups == 1 ? warp_id() : warp_id() % kParts;
  const int output = static_cast<int>(threadIdx.x) - group * kLinearThreads;
  const int blocks = p.in_features / Codec::kValues;
  const int first_tile = (static_cast<int>(blockIdx.x) * groups + group) * (kGated ? 1 : kColumns);

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
    const int wanted = kGated ? first_tile : first_tile + c;
    const int tile = min(wanted, p.tiles - 1);  // those behind the end are computed, not stored
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
    if (wanted >= p.tiles) mine.feature = job.out_features;
    if (output == 0) work[group][c] = mine;  // not in registers: it is not needed in the loop
    has_weights = has_weights && weight != nullptr;
    records[c] = weight + static_cast<int64_t>(tile_of_job) * blocks * (32 * Codec::kBytes);
  }

  float sums[kColumns][kTiles][8];
  stream_tiles<Codec, kTiles, kColumns, kStage>(panel, records, item.rows, has_weights ? blocks : 0, part, sums);

  // One output of each column per thread and 8 rows: thread i of a group has row i / 32, feature i % 32.
  const Work(&mine)[kColumns] = work[group];
  const int part_again = kMostGroups == 1 ? part : warp_id_again() % kParts;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * kTileRows + output / kTileColumns;
    if (t > 0 && t * kTileRows >= mine[0].rows) break;  // the same for all threads
    float y[kColumns];
    for (int turn = 0; turn < groups; ++turn) {  // with `partial`: room for all would leave less of L1
      if (turn == group) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            partial[c][part_again][row_of_c(lane_id(), i) * kTileColumns + column_of_c(lane_id(), i)] = sums[c][t][i];
      }
      __syncthreads();  // the parts, and `work`, written above are read below
      if (turn == group) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          y[c] = 0.0f;
#pragma unroll
          for (int s = 0; s < kParts; ++s) y[c] += partial[c][s][output];
        }
      }
      __syncthreads();  // all sums are read before the next group's, or the next rows', take their place
    }
    if (row >= mine[0].rows) continue;
    const int slot = p.items != nullptr ? p.order[mine[0].first + row] : row;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const LinearJob& job = p.job[kGated ? c : mine[c].job];
      const int feature = mine[c].feature + output % kTileColumns;
      const bool is_output = feature < job.out_features;
      if (is_output)
        y[c] = output_of(job, mine[c].scale, y[c], p.row_scale[mine[c].first + row],
                         job.bias != nullptr ? job.bias[feature] : 0.0f);
      if (kGated || !is_output) continue;
      float* to = job.y + static_cast<int64_t>(slot) * job.out_features + feature;
      *to = job.adds ? *to + y[c] : y[c];
    }
    if constexpr (kGated) {
      const int feature = mine[0].feature + output % kTileColumns;
      if (feature >= p.job[0].out_features) continue;
      const float gated = activate(p.activation, y[0]) * y[1];
      float* to = p.job[0].y + static_cast<int64_t>(slot) * p.job[0].out_features + feature;
      *to = p.job[0].adds ? *to + gated : gated;
    }
  }
}

// `resident`: groups that an SM has at once, as blocks of one or of as many as the kernel may have.
#define V100_LINEAR(name, rows, stage, gated, resident)                                              \
  extern "C" __global__ void __launch_bounds__(kLinearThreads* most_linear_groups(rows, kUnitBytes), \
                                               (resident) / most_linear_groups(rows, kUnitBytes))    \
      name(LinearParams p) {                                                                         \
    linear<CODEC, rows / kTileRows, gated ? 2 : linear_tiles(rows), stage, gated,                    \
           most_linear_groups(rows, kUnitBytes)>(p);                                                 \
  }

// Units of a round for 8 rows: about as many bytes in flight for every type. Wide ones leave registers for one group only.
constexpr int kUnitBytes = CODEC::kBytes / CODEC::kUnits;
constexpr int kMostStage = CODEC::kUnits == 1 ? 4 : CODEC::kUnits / 2;
constexpr int kGoodStage = kUnitBytes >= 34 ? 1 : kUnitBytes <= (CODEC::kUnits == 1 ? 18 : 10) ? 4 : 2;
constexpr int kStage8 = kGoodStage < kMostStage ? kGoodStage : kMostStage;
constexpr int kResident32 = most_linear_groups(32, kUnitBytes);

V100_LINEAR(rows8, 8, kStage8, false, 3)
V100_LINEAR(rows16, 16, 1, false, 2)
V100_LINEAR(rows32, 32, 1, false, kResident32)
V100_LINEAR(rows64, 64, 1, false, 1)
V100_LINEAR(gated_rows8, 8, 1, true, 2)
V100_LINEAR(gated_rows16, 16, 1, true, 2)
V100_LINEAR(gated_rows32, 32, 1, true, kResident32)
V100_LINEAR(gated_rows64, 64, 1, true, 1)

}  // namespace v100::cuda
