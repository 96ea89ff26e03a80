// y = W x for more than 64 rows (prompts): tiles of the product, a tile's weights decoded once for all of its rows.
//
// Shapes    W [N, K] as records (codecs.cuh), x as an f16 panel, y [rows, N] f32; several W of one type and K in one launch
//           (jobs), or gate and up. The panel has 8-row tiles up to a multiple of kPromptRows (PanelParams). CODEC is a macro
//           of the unit. Of experts: a row of the grid has an item (ExpertItem) of up to a tile's rows of one expert.
// Layout    A block computes 128 rows x 256 columns (`wide`) or 64 x 128 (`narrow`, where wide tiles would leave SMs idle),
//           its warps 64 x 64 or 32 x 64. 32 k are a step. Each warp decodes one record's unit of 32 features for the next
//           step into shared memory, beside the next step's activations: [octet of k][row or column] of 16 bytes, so stores
//           and fragment loads touch all banks. `gated` alternates columns of gate and up by 32, so a warp has both.
//           Blocks go along 8 tiles of rows, then to the next columns: what runs at once shares weights and rows in L2.
// Bound     Tensor cores: 2 rows N K at 125 TFLOP/s. A step of a warp of `wide` takes 1024 cycles of its sub-partition there,
//           about 700 issue slots and 670 cycles of shared memory (its 4 sub-partitions together).
// Budget    wide               256 threads, <= 255 registers, 49152 B shared
// Budget    gated_wide         256 threads, <= 255 registers, 49152 B shared
// Budget    *                  128 threads, <= 168 registers, 24576 B shared
// Numerics  Weights and activations as in linear.cu. A sum runs over all k in ascending order, four at a time, for any tile and
//           any number of rows: a row's bits depend on the row and the weights only. linear.cu cuts K into 8 parts, so its bits
//           differ from these by rounding of the sums.
#include "codebook_codecs.cuh"
#include "linear.cuh"
#include "linear_prompt_shape.h"

namespace v100::cuda {

constexpr int kBuffers = 2;       // of shared memory: one is read while the other is filled
constexpr int kOctets = 4;        // of 8 k, in a step
constexpr int kWarpColumns = 64;  // of a warp's tile
constexpr int kRowTileGroup = 8;  // row tiles that blocks go along before the next columns

// The tile of a block and what its warps do: two rows of warps, each with half of the rows and 64 columns.
template <bool kWide>
struct TileShape {
  static constexpr PromptTile kTile = kWide ? kWideTile : kNarrowTile;
  static constexpr int kRows = kTile.rows, kColumns = kTile.columns, kThreads = kTile.threads;
  static constexpr int kWarps = kThreads / kWarp, kColumnWarps = kColumns / kWarpColumns;
  static constexpr int kWarpRows = kRows / 2, kRowSteps = kWarpRows / 16, kColumnSteps = kWarpColumns / 16;
  static constexpr int kUnits = kColumns / 32;  // of weights in a step
  static constexpr int kChunks = kOctets * (kRows + kColumns);
  static constexpr int kInputs = kOctets * kRows / kThreads;  // chunks of activations that a thread brings
  static_assert(kWarps == 2 * kColumnWarps && kUnits == kWarps, "a warp decodes one unit");
  static_assert(kPromptRows % kRows == 0, "tiles of rows fill the panel");
};

template <class Codec, bool kWide, bool kGated>
__device__ __forceinline__ void linear_prompt(const LinearParams& p) {
  using Shape = TileShape<kWide>;
  __shared__ uint4 chunks[kBuffers][Shape::kChunks];  // 8 values of k each: [octet][row], then [octet][column]
  const int lane = lane_id(), warp = warp_id();

  // The block's tile. Rows beyond the last are zeros of the panel; columns beyond the last repeat it and are not stored.
  constexpr int kJobTiles = kGated ? Shape::kUnits / 2 : Shape::kUnits;  // tiles of 32 features of a job
  const bool of_experts = p.items != nullptr;
  const ExpertItem item = of_experts ? p.items[blockIdx.y] : ExpertItem{0, 0, p.rows};
  if (item.rows == 0) return;  // all threads
  const int row_tiles = of_experts ? 1 : (p.rows + Shape::kRows - 1) / Shape::kRows,
            column_tiles = (p.tiles + kJobTiles - 1) / kJobTiles;
  const int group = static_cast<int>(blockIdx.x) / (kRowTileGroup * column_tiles);
  const int within = static_cast<int>(blockIdx.x) - group * (kRowTileGroup * column_tiles);
  const int group_rows = min(kRowTileGroup, row_tiles - group * kRowTileGroup);
  const int first_row = (group * kRowTileGroup + within % group_rows) * Shape::kRows;
  const int first_tile = within / group_rows * kJobTiles;
  const int64_t panel_rows = of_experts ? Shape::kRows : (p.rows + kPromptRows - 1) / kPromptRows * kPromptRows;

  // What this warp decodes and this thread copies.
  const int my_tile = min(first_tile + (kGated ? warp / 2 : warp), p.tiles - 1);
  const int my_job = kGated ? warp % 2 : job_of(p, my_tile);
  constexpr int64_t kRecord = 32 * Codec::kBytes;
  const uint8_t* weight = of_experts ? p.job[my_job].experts[item.expert].weight : p.job[my_job].weight;
  const uint8_t* at = weight + (my_tile - p.job[my_job].first_tile) * (p.in_features / Codec::kValues * kRecord) +
                      Codec::kLaneBytes * lane;
  const uint4* input = reinterpret_cast<const uint4*>(p.panel) + first_row;
  if (of_experts) input += static_cast<int64_t>(blockIdx.y) * (p.in_features / 8) * Shape::kRows;

  typename Codec::Header header;
  typename Codec::Unit unit;
  uint4 rows[Shape::kInputs];
  const auto load = [&](int step) {
    const int index = step % Codec::kUnits;
    if (index == 0) {
      header = Codec::load_header(at, lane);
      at += Codec::kHeadBytes;
    }
    unit = Codec::load_unit(at, lane);
    at += Codec::kUnitBytes;
#pragma unroll
    for (int i = 0; i < Shape::kInputs; ++i) {
      const int chunk = static_cast<int>(threadIdx.x) + i * Shape::kThreads;
      rows[i] = cached_16(input + (step * kOctets + chunk / Shape::kRows) * panel_rows + chunk % Shape::kRows);
    }
  };
  const auto store = [&](int step) {
    uint4* to = chunks[step % kBuffers];
#pragma unroll
    for (int i = 0; i < Shape::kInputs; ++i) to[static_cast<int>(threadIdx.x) + i * Shape::kThreads] = rows[i];
    to += kOctets * Shape::kRows + 32 * warp + lane;
    const int index = step % Codec::kUnits;
    for_each<2>([&]<int g>() {
      uint32_t w[8];
      Codec::template decode<g>(header, unit, index, w);
      to[2 * g * Shape::kColumns] = make_uint4(w[0], w[1], w[2], w[3]);
      to[(2 * g + 1) * Shape::kColumns] = make_uint4(w[4], w[5], w[6], w[7]);
    });
    Codec::end_unit(header, index);
  };

  const int warp_row = warp / Shape::kColumnWarps * Shape::kWarpRows,
            warp_column = warp % Shape::kColumnWarps * kWarpColumns;
  float sums[Shape::kRowSteps][Shape::kColumnSteps][8];
#pragma unroll
  for (int i = 0; i < Shape::kRowSteps; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kColumnSteps; ++j)
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[i][j][k] = 0.0f;

  struct Fragments {
    uint4 a[Shape::kRowSteps], b[Shape::kColumnSteps];
  };
  const auto fragments = [&](int step, int octet) {
    Fragments f;
    const uint4* a = chunks[step % kBuffers] + octet * Shape::kRows + warp_row + row_of_square_a(lane);
    const uint4* b = chunks[step % kBuffers] + kOctets * Shape::kRows + octet * Shape::kColumns + warp_column +
                     column_of_square_b(lane);
#pragma unroll
    for (int i = 0; i < Shape::kRowSteps; ++i) f.a[i] = a[16 * i];
#pragma unroll
    for (int j = 0; j < Shape::kColumnSteps; ++j) f.b[j] = b[16 * j];
    return f;
  };
  const auto multiply = [&](const Fragments& f) {
#pragma unroll
    for (int i = 0; i < Shape::kRowSteps; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumnSteps; ++j) mma_16x16x4(sums[i][j], f.a[i].x, f.a[i].y, f.b[j].x, f.b[j].y);
#pragma unroll
    for (int i = 0; i < Shape::kRowSteps; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kColumnSteps; ++j) mma_16x16x4(sums[i][j], f.a[i].z, f.a[i].w, f.b[j].z, f.b[j].w);
  };

  const int steps = weight != nullptr ? p.in_features / kUnitValues : 0;  // an expert that is not here gives zeros
  if (steps > 0) {
    load(0);
    store(0);
  }
  if (steps > 1) load(1);
  __syncthreads();  // the chunks stored above are read below
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Fragments now = fragments(step, 0), next = fragments(step, 1);
    multiply(now);
    now = fragments(step, 2);
    multiply(next);
    if (step + 1 < steps) store(step + 1);
    if (step + 2 < steps) load(step + 2);
    next = fragments(step, 3);
    multiply(now);
    multiply(next);
    __syncthreads();  // the next step's chunks are stored and this step's read by all
  }

  // 16 rows at a time through shared memory, so that a warp stores 32 adjacent features of a row.
  constexpr int kStride = kWarpColumns + 8;
  static_assert(Shape::kWarps * 16 * kStride * 4 <= sizeof(chunks), "the outputs take the place of the chunks");
  float* staged = reinterpret_cast<float*>(chunks) + warp * 16 * kStride;
  const int tile = first_tile + warp_column / (kGated ? 64 : 32);
  const int job0 = kGated ? 0 : job_of(p, tile), job1 = kGated ? 1 : job_of(p, tile + 1);
  const LinearJob& left = p.job[job0];
  const LinearJob& right = p.job[job1];
  const int left_feature = (tile - left.first_tile) * 32 + lane;
  const int right_feature = (tile + (kGated ? 0 : 1) - right.first_tile) * 32 + lane;
  const bool has_left = tile < p.tiles && left_feature < left.out_features;
  const bool has_right = kGated ? has_left : tile + 1 < p.tiles && right_feature < right.out_features;
  const int rows_of_block = item.rows, first_slot = item.first;
  const float left_scale = of_experts ? left.experts[item.expert].scale : left.scale;
  const float right_scale = of_experts ? right.experts[item.expert].scale : right.scale;
  const float left_bias = has_left && left.bias != nullptr ? left.bias[left_feature] : 0.0f;
  const float right_bias = has_right && right.bias != nullptr ? right.bias[right_feature] : 0.0f;
#pragma unroll
  for (int i = 0; i < Shape::kRowSteps; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kColumnSteps; ++j)
#pragma unroll
      for (int k = 0; k < 8; k += 2)
        *reinterpret_cast<float2*>(&staged[row_of_square_c(lane, k) * kStride + 16 * j + column_of_square_c(lane, k)]) =
            make_float2(sums[i][j][k], sums[i][j][k + 1]);
    __syncwarp();  // the sums staged above are read below
    const int rows_here = min(16, rows_of_block - (first_row + warp_row + 16 * i));
#pragma unroll 1
    for (int r = 0; r < rows_here; ++r) {
      const int row = first_row + warp_row + 16 * i + r;
      const float row_scale = p.row_scale[first_slot + row];
      const int to_row = of_experts ? p.order[first_slot + row] : row;
      // A column of the chunks is the lane that decoded it.
      float y = output_of(left, left_scale, staged[r * kStride + lane_of_column(lane)], row_scale, left_bias);
      float up = output_of(right, right_scale, staged[r * kStride + 32 + lane_of_column(lane)], row_scale, right_bias);
      if (kGated) y = activate(p.activation, y) * up;
      if (has_left) {
        float* to = left.y + static_cast<int64_t>(to_row) * left.out_features + left_feature;
        *to = left.adds ? *to + y : y;
      }
      if (!kGated && has_right) {
        float* to = right.y + static_cast<int64_t>(to_row) * right.out_features + right_feature;
        *to = right.adds ? *to + up : up;
      }
    }
    __syncwarp();  // all are read before the next rows take their place
  }
}

#define V100_LINEAR_PROMPT(name, wide, gated)                                                                   \
  extern "C" __global__ void __launch_bounds__(TileShape<wide>::kThreads, TileShape<wide>::kTile.blocks_per_sm) \
      name(LinearParams p) {                                                                                    \
    linear_prompt<CODEC, wide, gated>(p);                                                                       \
  }

V100_LINEAR_PROMPT(wide, true, false)
V100_LINEAR_PROMPT(narrow, false, false)
V100_LINEAR_PROMPT(gated_wide, true, true)
V100_LINEAR_PROMPT(gated_narrow, false, true)

}  // namespace v100::cuda
