// Norms, rotations and gates of a row or of one of its heads, for the kernels that have them to themselves and for those
// that go on with the result.
//
// Numerics  sums of squares: each thread over its quads ascending (rows and heads that are no whole quads: its elements), then
//           base.cuh's sums.
#pragma once

#include "held_row.cuh"

namespace v100::cuda {

// Of n values, thread `thread` of `threads`: the sum of its squares. load(i) is value i, load_quad(i) values i..i + 3; use and
// use_quad take what was loaded.
template <int kBatch, class Load, class LoadQuad, class Use, class UseQuad>
__device__ __forceinline__ float squares_of(int thread, int threads, int n, const Load& load, const LoadQuad& load_quad,
                                            const Use& use, const UseQuad& use_quad) {
  float squares = 0.0f;
  if (n % 4 == 0) {
    in_batches<kBatch>(4 * thread, 4 * threads, n, load_quad, [&](int i, const float4& quad) {
      use_quad(i, quad);
      squares = add_squares(squares, quad);
    });
  } else {
    in_batches<kBatch>(thread, threads, n, load, [&](int i, float value) {
      use(i, value);
      squares = fmaf(value, value, squares);
    });
  }
  return squares;
}

__device__ __forceinline__ float norm_scale(float squares, int32_t n, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
}
__device__ __forceinline__ float4 quad_at(const float* x, int i) { return *reinterpret_cast<const float4*>(x + i); }

// A block together. A thread reads back only what it wrote itself: no barrier is needed.
__device__ __forceinline__ void rms_norm_row(const RmsNormParams& p, int row) {
  __shared__ float sums[kNormThreads / kWarp];
  const int64_t start = static_cast<int64_t>(row) * p.features;
  float* x = const_cast<float*>(p.x) + start;
  const bool adds = p.added != nullptr;
  const float* added = p.added + (adds ? start : 0);
  const float squares = squares_of<4>(
      static_cast<int>(threadIdx.x), kNormThreads, p.features, [&](int i) { return adds ? x[i] + added[i] : x[i]; },
      [&](int i) { return adds ? quad_at(x, i) + quad_at(added, i) : quad_at(x, i); },
      [&](int i, float value) {
        if (adds) x[i] = value;
      },
      [&](int i, const float4& quad) {
        if (adds) *reinterpret_cast<float4*>(x + i) = quad;
      });
  const float scale = norm_scale(block_sum<kNormThreads / kWarp>(squares, sums), p.features, p.eps);
  if (p.features % 4 == 0)
    in_batches<4>(
        4 * static_cast<int>(threadIdx.x), 4 * kNormThreads, p.features,
        [&](int i) { return quad_at(x, i) * scale * quad_at(p.weight, i); },
        [&](int i, const float4& quad) { *reinterpret_cast<float4*>(p.y + start + i) = quad; });
  else
    in_batches<8>(
        threadIdx.x, kNormThreads, p.features, [&](int i) { return x[i] * scale * p.weight[i]; },
        [&](int i, float value) { p.y[start + i] = value; });
}

// What follows is done by a warp. `item` is a head: row * heads + head.

__device__ __forceinline__ float head_scale(const float* head, int32_t head_dim, float eps) {
  const float squares = squares_of<2>(
      lane_id(), kWarp, head_dim, [&](int i) { return head[i]; }, [&](int i) { return quad_at(head, i); },
      [](int, float) {}, [](int, const float4&) {});
  return norm_scale(warp_sum(squares), head_dim, eps);
}

__device__ __forceinline__ void norm_rope_head(const NormRopeParams& p, int64_t item) {
  float* head = p.x + item * p.head_dim;
  const int64_t angles = item / p.heads * p.pairs;
  const bool norm = p.weight != nullptr;
  const float scale = norm ? head_scale(head, p.head_dim, p.eps) : 1.0f;
  const int apart = p.halves ? p.pairs : 1, step = p.halves ? 1 : 2;
  for (int pair = lane_id(); pair < p.pairs; pair += kWarp) {
    const int i = pair * step, j = i + apart;
    float a = head[i], b = head[j];
    if (norm) a = a * scale * p.weight[i], b = b * scale * p.weight[j];
    const float c = p.cosine[angles + pair], s = p.sine[angles + pair];
    head[i] = fmaf(a, c, -(b * s));
    head[j] = fmaf(a, s, b * c);
  }
  if (norm)  // features after the rotated ones
    in_batches<4>(
        2 * p.pairs + lane_id(), kWarp, p.head_dim, [&](int i) { return head[i] * scale * p.weight[i]; },
        [&](int i, float value) { head[i] = value; });
}

__device__ __forceinline__ float opening(int32_t function, float gate) {
  return function == 0 ? silu_f32(gate) : sigmoid_f32(gate);
}

__device__ __forceinline__ void norm_gate_head(const NormGateParams& p, int64_t item) {
  const float* head = p.x + item * p.head_dim;
  const float* gate = p.gate + item * p.head_dim;
  float* y = p.y + item * p.head_dim;
  const float scale = head_scale(head, p.head_dim, p.eps);
  in_batches<4>(
      lane_id(), kWarp, p.head_dim, [&](int i) { return head[i] * scale * p.weight[i] * opening(p.function, gate[i]); },
      [&](int i, float value) { y[i] = value; });
}

// What follows is done by a block that holds the row.

// x becomes its norm times the weight. `sums`: one float per warp.
template <class Row>
__device__ __forceinline__ void norm_held(Row& x, Row& weight, int32_t features, float eps, float* sums) {
  float squares = 0.0f;
  x.each(features, [&](int, const float4& quad) { squares = add_squares(squares, quad); });
  const float scale = norm_scale(block_sum<Row::kThreads / kWarp>(squares, sums), features, eps);
  x.each_with(weight, features, [&](int, float4& quad, const float4& w) { quad = quad * scale * w; });
}

// Each head of x, of 128 features: a quad of each lane of a warp.
template <class Row>
__device__ __forceinline__ void norm_gate_held(const NormGateParams& p, Row& x, Row& open) {
  const float4 weight = quad_at(p.weight, 4 * lane_id());
  x.each_with(open, p.heads * p.head_dim, [&](int, float4& quad, const float4& o) {  // the same for all lanes of a warp
    const float scale = norm_scale(warp_sum(add_squares(0.0f, quad)), p.head_dim, p.eps);
    quad =
        quad * scale * weight *
        float4{opening(p.function, o.x), opening(p.function, o.y), opening(p.function, o.z), opening(p.function, o.w)};
  });
}
__device__ __forceinline__ float4 activated(int32_t activation, const float4& gate, const float4& up) {
  return float4{activate(activation, gate.x), activate(activation, gate.y), activate(activation, gate.z),
                activate(activation, gate.w)} *
         up;
}

}  // namespace v100::cuda
