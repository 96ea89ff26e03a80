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
// Budget    *                  128 threads, <= 168 registers, 4096 B shared
// Numerics  ops.h in f32, gates in f64. Sums over i: those of a lane ascending, then lanes 4, 8, 16 apart; norms: base.cuh.
#include "base.cuh"

namespace v100::cuda {

constexpr int kWarps = 4;
constexpr int kColumns = 16;

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
  __shared__ float keys[kWarps][kHeadDim], queries[kWarps][kHeadDim];
  const int lane = lane_id(), warp = warp_id(), g = lane / 4, c = lane % 4;
  const int tile = static_cast<int>(blockIdx.x) * kWarps + warp, head = tile / (kHeadDim / kColumns);
  if (head >= p.value_heads) return;
  const int sequence = static_cast<int>(blockIdx.y), from = p.state_from[sequence];
  const int first_row = p.first_row[sequence], last_row = p.end_row[sequence];
  if (first_row >= last_row || last_row - first_row > p.most_rows) return;
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
  const float r = 1.0f / sqrtf(static_cast<float>(kHeadDim));

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
  Row next;
  load(next, 0);
  float decays = 0.0f, strengths = 0.0f;  // of 32 rows, one per lane: f64 is slow
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) {
    const Row now = next;
    if (row + 1 < last_row) load(next, (row + 1 - first_row) * width);
    const int turn = (row - first_row) % kWarp;
    if (turn == 0 && row + lane < last_row) {
      const int64_t gate = static_cast<int64_t>(row + lane) * p.value_heads + head;
      decays = decay_of(p.alpha[gate], a, dt_bias);
      strengths = strength_of(p.beta[gate]);
    }
    const float decay = __shfl_sync(kAllLanes, decays, turn), strength = __shfl_sync(kAllLanes, strengths, turn);

    float k_squares = 0.0f, q_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      k_squares = fmaf(now.k[i], now.k[i], k_squares);
      q_squares = fmaf(now.q[i], now.q[i], q_squares);
    }
    const float k_scale = 1.0f / sqrtf(warp_sum(k_squares) + p.eps);
    const float q_scale = 1.0f / sqrtf(warp_sum(q_squares) + p.eps);
    float products = 0.0f;
    __syncwarp();  // the keys of the row before are used
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float kn = now.k[i] * k_scale, qn = now.q[i] * q_scale * r;
      products = fmaf(kn, qn, products);
      if (kHeadDim % kWarp == 0 || i * kWarp + lane < kHeadDim)
        keys[warp][i * kWarp + lane] = kn, queries[warp][i * kWarp + lane] = qn;
    }
    const float kq = warp_sum(products);
    __syncwarp();  // keys and queries written above are read below

    float4 sum_k = {0.0f, 0.0f, 0.0f, 0.0f}, sum_q = sum_k;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float ki = keys[warp][s * 8 + g], qi = queries[warp][s * 8 + g];
      sum_k.x = fmaf(m[s].x, ki, sum_k.x), sum_k.y = fmaf(m[s].y, ki, sum_k.y);
      sum_k.z = fmaf(m[s].z, ki, sum_k.z), sum_k.w = fmaf(m[s].w, ki, sum_k.w);
      sum_q.x = fmaf(m[s].x, qi, sum_q.x), sum_q.y = fmaf(m[s].y, qi, sum_q.y);
      sum_q.z = fmaf(m[s].z, qi, sum_q.z), sum_q.w = fmaf(m[s].w, qi, sum_q.w);
    }
    const auto over_rows = [](float value) {
#pragma unroll
      for (int apart = 4; apart < kWarp; apart *= 2) value += __shfl_xor_sync(kAllLanes, value, apart);
      return value;
    };
    float4 d, o;
    const auto column_of = [&](float at_k, float at_q, float value, float& delta, float& out) {
      delta = strength * fmaf(-decay, over_rows(at_k), value);
      out = fmaf(kq, delta, decay * over_rows(at_q));
    };
    column_of(sum_k.x, sum_q.x, now.v.x, d.x, o.x);
    column_of(sum_k.y, sum_q.y, now.v.y, d.y, o.y);
    column_of(sum_k.z, sum_q.z, now.v.z, d.z, o.z);
    column_of(sum_k.w, sum_q.w, now.v.w, d.w, o.w);
    if (g == 0) *reinterpret_cast<float4*>(y) = o;
    y += static_cast<int64_t>(p.value_heads) * kHeadDim;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const float ki = keys[warp][s * 8 + g];
      m[s].x = fmaf(ki, d.x, decay * m[s].x), m[s].y = fmaf(ki, d.y, decay * m[s].y);
      m[s].z = fmaf(ki, d.z, decay * m[s].z), m[s].w = fmaf(ki, d.w, decay * m[s].w);
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
