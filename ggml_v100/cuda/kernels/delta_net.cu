// Gated delta net, recurrent: the memory of a head is read and rewritten once per launch, whatever the number of rows.
//
// Shapes    DeltaNetParams; grid (value_heads * head_dim / 16 / 4 rounded up, sequences). A warp owns 16 columns of a head's
//           memory M [head_dim, 16], 64 adjacent bytes times head_dim, in registers: lane 4 g + c has rows g, g + 8, ... of
//           columns 4 c..4 c + 3. Columns need nothing of each other, so there are no barriers.
//           One kernel per head_dim: delta_net_128 etc.
// Bound     DRAM at few rows: 8 * head_dim^2 bytes per head, 6.3 MB for 48 heads of 128, 7.2 us at 879 GB/s. At many rows issue:
//           about 10 * head_dim / 8 * 4 + 150 instructions per row and warp.
// Budget    delta_net_192      128 threads, <= 255 registers, 6144 B shared
// Budget    delta_net_256      128 threads, <= 255 registers, 8192 B shared
// Budget    delta_net_128      128 threads, <= 224 registers, 16384 B shared
// Budget    *                  128 threads, <= 184 registers, 12288 B shared
// Numerics  ops.h in f32, gates in f64. Sums over i: those of a lane ascending, then lanes 16, 8, 4 apart; norms: all lanes so.
#include "base.cuh"

namespace v100::cuda {

constexpr int kWarps = 4;
constexpr int kColumns = 16;
// Rows whose keys and queries are loaded and normalised together: what needs no memory waits once for all of them.
constexpr int rows_together(int head_dim) { return head_dim <= 128 ? 4 : 1; }

// Each value summed over the lanes that are 16, 8 .. kLast apart, side by side: one value after the other would wait for
// every shuffle.
template <int kLast, int kValues>
__device__ __forceinline__ void sum_lanes(float (&values)[kValues]) {
#pragma unroll
  for (int apart = kWarp / 2; apart >= kLast; apart /= 2)
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += __shfl_xor_sync(kAllLanes, values[i], apart);
}

// exp(a * softplus(alpha + dt_bias)) and 1 / (1 + exp(-beta)).
__device__ __forceinline__ float decay_of(float alpha, float a, float dt_bias) {
  const double x = static_cast<double>(alpha) + static_cast<double>(dt_bias);
  const double softplus = x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
  return static_cast<float>(exp(static_cast<double>(a) * softplus));
}
__device__ __forceinline__ float strength_of(float beta) {
  return static_cast<float>(1.0 / (1.0 + exp(-static_cast<double>(beta))));
}

template <int kHeadDim>
__device__ __forceinline__ void delta_net(const DeltaNetParams& p) {
  constexpr int kSteps = kHeadDim / 8;                     // rows of M in a lane
  constexpr int kOfLane = (kHeadDim + kWarp - 1) / kWarp;  // features of a key in a lane
  constexpr int kTogether = rows_together(kHeadDim);
  __shared__ float keys[kWarps][kTogether][kHeadDim], queries[kWarps][kTogether][kHeadDim];
  const int lane = lane_id(), warp = warp_id(), g = lane / 4, c = lane % 4;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + warp, head = tile / (kHeadDim / kColumns);
  if (head >= p.value_heads) return;
  const int sequence = static_cast<int>(blockIdx.y), from = p.state_from[sequence];
  const int first_row = p.first_row[sequence], last_row = p.first_row[sequence + 1];
  if (first_row >= last_row) return;
  const int column = tile % (kHeadDim / kColumns) * kColumns + 4 * c;  // of the head
  const int64_t place = static_cast<int64_t>(tile) * kHeadDim * kColumns + g * kColumns + 4 * c;

  float4 m[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    m[s] = from < 0 ? float4{0.0f, 0.0f, 0.0f, 0.0f}
                    : *reinterpret_cast<const float4*>(p.memory + from * p.slot_values + place + s * 8 * kColumns);

  const int64_t width = static_cast<int64_t>(2 * p.key_heads + p.value_heads) * kHeadDim;
  const float* qkv = p.qkv + first_row * width;
  const float* q = qkv + head % p.key_heads * kHeadDim;
  const float* k = q + p.key_heads * kHeadDim;
  const float* v = qkv + (2 * p.key_heads + head) * kHeadDim + column;
  float* y = p.y + (static_cast<int64_t>(first_row) * p.value_heads + head) * kHeadDim + column;
  const float a = p.a[head], dt_bias = p.dt_bias[head];
  const float scale = 1.0f / sqrtf(static_cast<float>(kHeadDim));

  struct Row {
    float k[kOfLane], q[kOfLane];
    float4 v;
  };
  const auto load = [&](Row& row, int64_t offset) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool is_there = kHeadDim % kWarp == 0 || i * kWarp + lane < kHeadDim;
      row.k[i] = is_there ? k[offset + i * kWarp + lane] : 0.0f;
      row.q[i] = is_there ? q[offset + i * kWarp + lane] : 0.0f;
    }
    row.v = *reinterpret_cast<const float4*>(v + offset);
  };
  Row next[kTogether];
  const auto load_rows = [&](int first) {
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
      if (first + r < last_row) load(next[r], (first + r - first_row) * width);
  };
#pragma unroll
  for (int r = 0; r < kTogether; ++r) next[r] = Row{};
  load_rows(first_row);
  float decays = 0.0f, strengths = 0.0f;  // of 32 rows, one per lane: f64 is slow
#pragma unroll 1
  for (int row = first_row; row < last_row; row += kTogether) {
    Row now[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) now[r] = next[r];
    load_rows(row + kTogether);
    const int turn = (row - first_row) % kWarp;
    if (turn == 0 && row + lane < last_row) {
      const int64_t gate = static_cast<int64_t>(row + lane) * p.value_heads + head;
      decays = decay_of(p.alpha[gate], a, dt_bias);
      strengths = strength_of(p.beta[gate]);
    }

    float squares[2 * kTogether], products[kTogether];  // of keys, then of queries
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      squares[r] = squares[kTogether + r] = products[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        squares[r] = fmaf(now[r].k[i], now[r].k[i], squares[r]);
        squares[kTogether + r] = fmaf(now[r].q[i], now[r].q[i], squares[kTogether + r]);
      }
    }
    sum_lanes<1>(squares);
    __syncwarp();  // the keys of the rows before are used
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const float k_scale = 1.0f / sqrtf(squares[r] + p.eps), q_scale = 1.0f / sqrtf(squares[kTogether + r] + p.eps);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const float kn = now[r].k[i] * k_scale, qn = now[r].q[i] * q_scale * scale;
        products[r] = fmaf(kn, qn, products[r]);
        if (kHeadDim % kWarp == 0 || i * kWarp + lane < kHeadDim)
          keys[warp][r][i * kWarp + lane] = kn, queries[warp][r][i * kWarp + lane] = qn;
      }
    }
    sum_lanes<1>(products);
    __syncwarp();  // keys and queries written above are read below

#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (row + r >= last_row) break;
      const float decay = __shfl_sync(kAllLanes, decays, turn + r);
      const float strength = __shfl_sync(kAllLanes, strengths, turn + r);
      float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};  // at the key, at the query: four columns
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float ki = keys[warp][r][s * 8 + g], qi = queries[warp][r][s * 8 + g];
        sums[0] = fmaf(m[s].x, ki, sums[0]), sums[1] = fmaf(m[s].y, ki, sums[1]);
        sums[2] = fmaf(m[s].z, ki, sums[2]), sums[3] = fmaf(m[s].w, ki, sums[3]);
        sums[4] = fmaf(m[s].x, qi, sums[4]), sums[5] = fmaf(m[s].y, qi, sums[5]);
        sums[6] = fmaf(m[s].z, qi, sums[6]), sums[7] = fmaf(m[s].w, qi, sums[7]);
      }
      sum_lanes<4>(sums);
      float4 d, o;
      const auto column_of = [&](int column, float value, float& delta, float& out) {
        delta = strength * fmaf(-decay, sums[column], value);
        out = fmaf(products[r], delta, decay * sums[4 + column]);
      };
      column_of(0, now[r].v.x, d.x, o.x);
      column_of(1, now[r].v.y, d.y, o.y);
      column_of(2, now[r].v.z, d.z, o.z);
      column_of(3, now[r].v.w, d.w, o.w);
      if (g == 0) *reinterpret_cast<float4*>(y) = o;
      y += static_cast<int64_t>(p.value_heads) * kHeadDim;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float ki = keys[warp][r][s * 8 + g];
        m[s].x = fmaf(ki, d.x, decay * m[s].x), m[s].y = fmaf(ki, d.y, decay * m[s].y);
        m[s].z = fmaf(ki, d.z, decay * m[s].z), m[s].w = fmaf(ki, d.w, decay * m[s].w);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    *reinterpret_cast<float4*>(p.memory + p.state_to[sequence] * p.slot_values + place + s * 8 * kColumns) = m[s];
}

#define V100_DELTA_NET(head_dim)                                                                       \
  extern "C" __global__ void __launch_bounds__(kWarps* kWarp) delta_net_##head_dim(DeltaNetParams p) { \
    delta_net<head_dim>(p);                                                                            \
  }

V100_DELTA_NET(16)
V100_DELTA_NET(32)
V100_DELTA_NET(48)
V100_DELTA_NET(64)
V100_DELTA_NET(96)
V100_DELTA_NET(128)
V100_DELTA_NET(192)
V100_DELTA_NET(256)

}  // namespace v100::cuda
