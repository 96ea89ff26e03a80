// y = W x for 1 to 64 rows: the weights stream through the registers of tensor-core warps, once for all rows.
//
// Shapes    W [N, K] as records (codecs.cuh), x as f16 panels (PanelParams), y [rows, N] f32; several W of one type and K in
//           one launch (jobs). CODEC is a macro of the unit. Of experts: a block has an item (ExpertItem), up to as many rows
//           of one expert as the kernel's name says; an item without rows is left at once.
// Layout    A warp owns 32 output features (a tile) and every eighth part of K, in whole blocks; the 8 warps of a tile are
//           summed through shared memory. A unit of 32 k is 2 x 4 instructions per 8 rows. Kernels with two tiles per block
//           share the activations through L1; `gated` puts gate and up side by side.
// Bound     DRAM: N * K / block * block_bytes. Per unit and warp Q8_0 moves 1088 B = 592 cycles of a sub-partition's share
//           of 900 GB/s at 1.53 GHz; the tensor cores need 64 cycles per 8 rows, so up to 64 rows fit.
// Budget    rows8              256 threads, <= 80 registers, 8208 B shared
// Budget    gated_rows8        512 threads, <= 96 registers, 16416 B shared
// Budget    rows64             512 threads, <= 128 registers, 16416 B shared, <= 64 B stack
// Budget    gated_rows64       512 threads, <= 128 registers, 16416 B shared, <= 64 B stack
// Budget    *                  512 threads, <= 128 registers, 16416 B shared
// Numerics  Weights are decoded to f16 (codecs.cuh), products are exact, sums f32: k ascending within a warp's part, then the
//           8 parts in order. All kernels of a codec cut K alike, so a row has the same bits with 1 row as with 64.
#include "codebook_codecs.cuh"
#include "linear.cuh"

namespace v100::cuda {

constexpr int kParts = 8;  // of K: warps of a tile

// The units [begin, end) of a warp's part of K: whole blocks, as even as they go.
template <class Codec>
__device__ __forceinline__ void part_of(int blocks, int part, int& begin, int& end) {
  begin = blocks * part / kParts * Codec::kUnits;
  end = blocks * (part + 1) / kParts * Codec::kUnits;
}

// Sums of a tile over a part of K, kTiles times 8 rows. kStage units are loaded together while those before are computed:
// one group of loads per round, because SM70 has six scoreboards, and a wait on one that activations and weights to come
// share waits for both. kStage 0: a unit is loaded when it is needed (64 rows: registers are short, and the tensor
// instructions of the other three warps of a sub-partition take longer than a load).
template <class Codec, int kTiles, int kStage>
__device__ __forceinline__ void stream_tile(const uint16_t* panel, const uint8_t* records, int blocks, int part,
                                            float (&sums)[kTiles][8]) {
  constexpr int kUnits = kStage > 0 ? kStage : 1;  // of a round
  static_assert(Codec::kUnits == 1 || Codec::kUnits % kUnits == 0,
                "a round lies within a block or is one of small ones");
  constexpr int64_t kRecord = 32 * Codec::kBytes;
  constexpr int kOctet = kTiles * kTileRows * 8;  // 8 values of all rows in the panel
  const int lane = lane_id();
  int begin, end;
  part_of<Codec>(blocks, part, begin, end);
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[t][i] = 0.0f;

  struct Round {
    typename Codec::Header header;  // loaded with the first units of a block
    typename Codec::Unit unit[kUnits];
  };
  const auto load = [&](Round& round, int first) {
    const uint8_t* record = records + first / Codec::kUnits * kRecord;
    if (first % Codec::kUnits == 0) round.header = Codec::load_header(record, lane);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (Codec::kUnits > 1)
        round.unit[i] = Codec::load_unit(record, first % Codec::kUnits + i, lane);
      else if (i == 0 || first + i < end)
        round.unit[i] = Codec::load_unit(record + i * kRecord, 0, lane);
  };

  Round next;
  if (kStage > 0 && begin < end) load(next, begin);
  const uint16_t* x = panel + static_cast<int64_t>(begin) * (kUnitValues / 8 * kOctet) + row_of_a(lane) * 8;
#pragma unroll 1
  for (int first = begin; first < end; first += kUnits) {
    if (kStage == 0) load(next, first);
    const Round now = next;
    if (kStage > 0 && first + kUnits < end) load(next, first + kUnits);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (Codec::kUnits == 1 && i > 0 && first + i >= end) break;
      for_each<2>([&]<int g>() {
        uint32_t w[8];
        Codec::template decode<g>(now.header, now.unit[i], first % Codec::kUnits + i, w);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint16_t* a = x + (4 * i + 2 * g) * kOctet + t * (kTileRows * 8);
          const uint4 a0 = cached_16(a), a1 = cached_16(a + kOctet);
          mma_8x32x4(sums[t], a0.x, a0.y, w[0], w[1]);
          mma_8x32x4(sums[t], a0.z, a0.w, w[2], w[3]);
          mma_8x32x4(sums[t], a1.x, a1.y, w[4], w[5]);
          mma_8x32x4(sums[t], a1.z, a1.w, w[6], w[7]);
        }
      });
    }
    x += kUnits * (kUnitValues / 8) * kOctet;
  }
}

// A tile: features from `feature` on, rows first, ..., first + rows - 1 of the launch's, or of its slots by expert.
struct Work {
  int feature, first, rows;
  float scale;  // of the matrix
};

// kColumns tiles per block, 8 warps each.
template <class Codec, int kTiles, int kColumns, int kStage, bool kGated>
__device__ __forceinline__ void linear(const LinearParams& p) {
  __shared__ float partial[kColumns][kParts][kTileRows * kTileColumns];
  __shared__ Work work[kColumns];
  const int column = warp_id() / kParts, part = warp_id() % kParts;
  const int tile = kGated ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kColumns + column;
  const bool is_there = kGated || tile < p.tiles;
  const LinearJob& job = p.job[kGated ? column : is_there ? job_of(p, tile) : 0];
  const int tile_of_job = kGated ? tile : tile - job.first_tile;
  const int blocks = p.in_features / Codec::kValues;

  const uint8_t* weight = job.weight;
  const uint16_t* panel = p.panel;
  Work mine = {tile_of_job * kTileColumns, 0, p.rows, job.scale};
  if (p.items != nullptr) {
    const ExpertItem item = p.items[blockIdx.y];
    if (item.rows == 0) return;  // all threads
    const ExpertWeight expert = job.experts[item.expert];
    weight = expert.weight;
    panel += static_cast<int64_t>(blockIdx.y) * p.in_features * (kTiles * kTileRows);
    mine.first = item.first, mine.rows = item.rows, mine.scale = expert.scale;
  }
  if (threadIdx.x % (kParts * kWarp) == 0) work[column] = mine;  // not in registers: it is not needed in the loop

  float sums[kTiles][8];
  const uint8_t* records = weight + static_cast<int64_t>(tile_of_job) * blocks * (32 * Codec::kBytes);
  if (is_there) stream_tile<Codec, kTiles, kStage>(panel, records, weight != nullptr ? blocks : 0, part, sums);

  // One output per thread and tile: thread i of a column's 256 has row i / 32, feature i % 32.
  const int output = static_cast<int>(threadIdx.x) % (kParts * kWarp);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * kTileRows + output / kTileColumns;
    if (t > 0 && t * kTileRows >= work[column].rows) break;  // the same for all threads
#pragma unroll
    for (int i = 0; i < 8; ++i)
      partial[column][part][row_of_c(lane_id(), i) * kTileColumns + column_of_c(lane_id(), i)] = sums[t][i];
    __syncthreads();  // the parts, and `work`, written above are read below
    const int feature = work[column].feature + output % kTileColumns;
    float y = 0.0f;
#pragma unroll
    for (int s = 0; s < kParts; ++s) y += partial[column][s][output];
    const bool is_output = is_there && row < work[column].rows && feature < job.out_features;
    if (is_output)
      y = output_of(job, work[column].scale, y, p.row_scale[work[column].first + row],
                    job.bias != nullptr ? job.bias[feature] : 0.0f);
    __syncthreads();  // all sums are read before the next tile's, or the up values, take their place
    if (kGated) {
      if (column == 1) partial[1][0][output] = y;
      __syncthreads();  // the up values written above are read below
      if (column == 0) y = activate(p.activation, y) * partial[1][0][output];
      __syncthreads();  // they are read before the next tile's take their place
      if (column == 1) continue;
    }
    if (is_output) {
      const int slot = p.items != nullptr ? p.order[work[column].first + row] : row;
      float* to = job.y + static_cast<int64_t>(slot) * job.out_features + feature;
      *to = job.adds ? *to + y : y;
    }
  }
}

#define V100_LINEAR(name, tiles, columns, stage, gated, blocks)                                         \
  extern "C" __global__ void __launch_bounds__(columns * kParts * kWarp, blocks) name(LinearParams p) { \
    linear<CODEC, tiles, columns, stage, gated>(p);                                                     \
  }

// Units of a round: about as many bytes in flight for every type.
constexpr int kUnitBytes = CODEC::kBytes / CODEC::kUnits;
constexpr bool kIsWide = kUnitBytes >= 64;
constexpr bool kIsSmall = kUnitBytes <= (CODEC::kUnits == 1 ? 18 : 10);
constexpr int kManyUnits = CODEC::kUnits == 2 ? 2 : 4;  // a round does not pass the end of a block
constexpr int kStage8 = kUnitBytes >= 34 ? 1 : kIsSmall ? kManyUnits : 2;
constexpr int kStage16 = kUnitBytes >= 64 ? 1 : kIsSmall ? kManyUnits : 2;
constexpr int kStage32 = kUnitBytes >= 34 || CODEC::kUnits > 1 ? 1 : 2;

V100_LINEAR(rows8, 1, 1, kStage8, false, 3)
V100_LINEAR(rows16, 2, 2, kStage16, false, 1)
V100_LINEAR(rows32, 4, 2, kStage32, false, 1)
V100_LINEAR(rows64, 8, 2, 0, false, 1)
V100_LINEAR(gated_rows8, 1, 2, kUnitBytes >= 22 ? 1 : 2, true, kIsWide ? 1 : 2)
V100_LINEAR(gated_rows16, 2, 2, kStage16, true, 1)
V100_LINEAR(gated_rows32, 4, 2, kStage32, true, 1)
V100_LINEAR(gated_rows64, 8, 2, 0, true, 1)

}  // namespace v100::cuda
