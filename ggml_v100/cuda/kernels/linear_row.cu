// y = W x for one row, from f32: what made the row is the beginning of the kernel, and costs no launch of its own.
//
// Shapes    W as in linear.cu; x [K] f32 at once, or what rms_norm or norm_gate make of it. CODEC is a macro of the unit.
// Layout    A block has all of the row as halves in shared memory and takes every gridDim.x-th tile; its 8 warps are the parts
//           of K, as in linear.cu. Each block makes the row anew, its first weights being on their way: a decode step waits
//           for launches and latencies, and reading 20 KB from L2 costs less than either. Shared memory, because a lane of
//           linear.cu that waits for activations waits for weights that were asked for before them, too.
// Bound     DRAM, as linear.cu. For many tiles per block a panel that all of them find in L1 would do as well.
// Budget    *                  256 threads, <= 128 registers, 2144 B shared, <= 32 B stack
// Numerics  rows.cuh, panel.cuh, then linear.cu: the bits of those kernels one after the other.
#include "linear.cuh"
#include "linear_stream.cuh"
#include "panel.cuh"
#include "rows.cuh"

namespace v100::cuda {

constexpr int kThreads = kLinearThreads;
constexpr int kBlocks = kRowBlocks;  // per SM: registers for twice the units on their way that linear.cu has

// The halves of a row in shared memory: one row, whatever the lane.
struct SharedRow {
  const uint16_t* x;
  __device__ __forceinline__ uint4 octet(int i, int) const { return *reinterpret_cast<const uint4*>(x + 8 * i); }
  __device__ __forceinline__ void advance(int octets) { x += 8 * octets; }
};

// Units of a round: about 2 KB of each warp are on their way while as much is computed.
constexpr int kUnitBytes = kBytesOfUnit<CODEC>;
constexpr int kStage = stage_of<CODEC>(kUnitBytes >= 64 ? 1 : kUnitBytes > 18 ? 2 : 4);

// What convolve will read of a channel, into L2.
__device__ __forceinline__ void prefetch_taps(const RowConv& conv, int channels, int channel) {
  const int from = max(*conv.state_from, 0);
  for (int t = 0; t < conv.taps; ++t) {
    if (t + 1 < conv.taps)
      prefetch(conv.history + from * conv.slot_values + static_cast<int64_t>(t) * channels + channel);
    prefetch(conv.weight + static_cast<int64_t>(t) * channels + channel);
  }
}

// One token of a channel: causal_conv.cu.
__device__ __forceinline__ void convolve(const RowConv& conv, int channels, int channel, float x) {
  const int from = *conv.state_from, kept = conv.taps - 1;
  const float* old = conv.history + from * conv.slot_values + channel;
  float token[kMostRowTaps], weight[kMostRowTaps];  // all on their way at once
#pragma unroll
  for (int t = 0; t < kMostRowTaps; ++t) {
    token[t] = t < kept && from >= 0 ? old[static_cast<int64_t>(t) * channels] : 0.0f;
    weight[t] = t <= kept ? conv.weight[static_cast<int64_t>(t) * channels + channel] : 0.0f;
  }
  float sum = 0.0f;
  float* kept_at = conv.history + *conv.state_to * conv.slot_values + channel;
#pragma unroll
  for (int t = 0; t < kMostRowTaps; ++t) {
    if (t > kept) continue;
    const float now = t == kept ? x : token[t];
    sum = fmaf(weight[t], now, sum);
    if (t > 0) kept_at[static_cast<int64_t>(t - 1) * channels] = now;
  }
  conv.y[channel] = silu_f32(sum);
}

// Row has load(), which asks for what the row is made of, and make(halves), of all threads together and with a barrier at its
// end, which returns what undoes the scale of the halves. What is asked for behind the first weights would come behind them.
template <class Codec, class Row, class Params>
__device__ __forceinline__ void linear_row(const Params& params, Row row) {
  extern __shared__ uint4 row_memory[];
  __shared__ float partial[2][kParts][kTileColumns];  // of this tile and of the one before it, which may still be read
  const LinearParams& p = params.linear;
  const RowConv& conv = params.conv;
  auto* halves = reinterpret_cast<uint16_t*>(row_memory);
  const int part = warp_id(), lane = lane_id();
  const int blocks = p.in_features / Codec::kValues;
  int first_unit, end_unit;
  part_of<Codec>(blocks, part, first_unit, end_unit);
  TileStream<Codec, 1, 1, kStage, true> stream;
  int tile = static_cast<int>(blockIdx.x), job = 0;
  const auto begin = [&] {
    job = job_of(p, tile);
    const uint8_t* const records[1] = {p.job[job].weight + static_cast<int64_t>(tile - p.job[job].first_tile) * blocks *
                                                               (32 * Codec::kBytes)};
    if (first_unit < end_unit) stream.begin(records, first_unit, end_unit);
  };
  row.load();
  begin();
  const float row_scale = row.make(halves);
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    // Warps take turns with the outputs of a tile. What an output is added to is there when it is needed.
    const bool is_mine = part == turn % kParts;
    const int done_job = job;
    const LinearJob& done = p.job[done_job];
    const int feature = (tile - done.first_tile) * kTileColumns + lane;
    const bool is_output = is_mine && feature < done.out_features;
    const float before = is_output && done.adds ? done.y[feature] : 0.0f;
    if (is_output && conv.weight != nullptr && conv.job == done_job) prefetch_taps(conv, done.out_features, feature);
    float sums[1][1][8] = {};
    if (first_unit < end_unit) stream.run(SharedRow{halves + first_unit * kUnitValues}, sums);
    tile += static_cast<int>(gridDim.x);
    const bool has_more = tile < p.tiles;
    if (has_more) begin();
    float (&sum_of)[kParts][kTileColumns] = partial[turn % 2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (row_of_c(lane, i) == 0) sum_of[part][column_of_c(lane, i)] = sums[0][0][i];
    __syncthreads();  // the parts written above are read below; those of two tiles before were read
    if (is_output) {
      float y = 0.0f;
#pragma unroll
      for (int s = 0; s < kParts; ++s) y += sum_of[s][lane];
      y = output_of(done, done.scale, y, row_scale, done.bias != nullptr ? done.bias[feature] : 0.0f);
      if (done.adds) y = before + y;
      done.y[feature] = y;
      if (conv.weight != nullptr && conv.job == done_job) convolve(conv, done.out_features, feature, y);
    }
    if (!has_more) return;
  }
}

// A row in registers becomes halves.
template <class Row>
__device__ __forceinline__ float put_held(Row& x, int features, uint16_t* halves) {
  __shared__ float row_scale;
  float most = 0.0f;
  x.each(features, [&](int, const float4& quad) { most = fmaxf(most, largest_of(quad)); });
  const float scale = panel_scale<kThreads>(most, &row_scale);
  x.each(features, [&](int first, const float4& quad) { put_halves(halves + first, quad, scale); });
  __syncthreads();  // the row and its scale, written above, are read below
  return row_scale;
}

using Held = HeldRow<kMostHeldFeatures / (4 * kThreads), kThreads>;
static_assert(kHeldHead == 4 * kWarp);

// The row as it is: what fits into registers at once, the rest behind it.
struct PlainRow {
  const RowLinearParams& p;
  HeldRow<12, kThreads> x;
  static constexpr int kHeld = 12 * 4 * kThreads;

  __device__ __forceinline__ void load() { x.load(p.x, p.linear.in_features); }
  __device__ __forceinline__ float make(uint16_t* halves) {
    __shared__ float row_scale;
    const int thread = static_cast<int>(threadIdx.x), features = p.linear.in_features;
    const auto load_quad = [&](int i) { return quad_at(p.x, i); };
    float most = 0.0f;
    if (p.largest != nullptr) {
      for (int i = thread; i < p.parts; i += kThreads) most = fmaxf(most, p.largest[i]);
    } else {
      x.each(features, [&](int, const float4& quad) { most = fmaxf(most, largest_of(quad)); });
      in_batches<4>(kHeld + 4 * thread, 4 * kThreads, features, load_quad,
                    [&](int, const float4& quad) { most = fmaxf(most, largest_of(quad)); });
    }
    const float scale = panel_scale<kThreads>(most, &row_scale);
    x.each(features, [&](int first, const float4& quad) { put_halves(halves + first, quad, scale); });
    in_batches<4>(kHeld + 4 * thread, 4 * kThreads, features, load_quad,
                  [&](int first, const float4& quad) { put_halves(halves + first, quad, scale); });
    __syncthreads();  // the row and its scale, written above, are read below
    return row_scale;
  }
};

struct NormedRow {
  const NormLinearParams& p;
  Held x, weight;

  __device__ __forceinline__ void load() {
    x.load(p.norm.x, p.norm.features);
    weight.load(p.norm.weight, p.norm.features);
    if (p.norm.added != nullptr)
      x.each(p.norm.features, [&](int first, float4& quad) { quad = quad + quad_at(p.norm.added, first); });
  }
  __device__ __forceinline__ float make(uint16_t* halves) {
    __shared__ float sums[kThreads / kWarp];
    __shared__ bool is_last;
    const RmsNormParams& norm = p.norm;
    const int features = norm.features;
    const bool adds = norm.added != nullptr;
    norm_held(x, weight, features, norm.eps, sums);  // behind its barrier all threads have read x
    if (adds && threadIdx.x == 0) {
      __threadfence();  // read before the count
      is_last = atomicAdd(p.arrived, 1u) == gridDim.x - 1;
      if (is_last) *p.arrived = 0;
    }
    if (blockIdx.x == 0) x.store(norm.y, features);
    const float row_scale = put_held(x, features, halves);  // its barriers: is_last is written
    if (adds && is_last)
      for (int i = 4 * static_cast<int>(threadIdx.x); i < features; i += 4 * kThreads)
        *reinterpret_cast<float4*>(const_cast<float*>(norm.x) + i) = quad_at(norm.x, i) + quad_at(norm.added, i);
    return row_scale;
  }
};

struct GatedHeadsRow {
  const NormGateLinearParams& p;
  Held x, open;

  __device__ __forceinline__ int features() const { return p.gate.heads * p.gate.head_dim; }
  __device__ __forceinline__ void load() {
    x.load(p.gate.x, features());
    open.load(p.gate.gate, features());
  }
  __device__ __forceinline__ float make(uint16_t* halves) {
    norm_gate_held(p.gate, x, open);
    if (blockIdx.x == 0) x.store(p.gate.y, features());
    return put_held(x, features(), halves);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) plain(RowLinearParams p) {
  linear_row<CODEC>(p, PlainRow{p});
}
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) after_norm(NormLinearParams p) {
  linear_row<CODEC>(p, NormedRow{p});
}
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) after_norm_gate(NormGateLinearParams p) {
  linear_row<CODEC>(p, GatedHeadsRow{p});
}

}  // namespace v100::cuda
