// A row of f32 in the registers of a block: all its loads are on their way at once, and what is done with it next reads
// nothing again. At decode sizes a kernel of one row is nothing but such waits.
#pragma once

#include "base.cuh"

namespace v100::cuda {

// Thread t has the quads t, t + kThreads, ... of the row; a quad is four adjacent features.
template <int kMostQuads, int kOfBlock>
struct HeldRow {
  static constexpr int kQuads = kMostQuads, kThreads = kOfBlock;
  float4 quads[kQuads];

  __device__ static bool fits(int features) { return features % 4 == 0 && features <= kQuads * 4 * kThreads; }

  // body(first feature, quad) for the thread's quads, ascending.
  template <class Body>
  __device__ __forceinline__ void each(int features, const Body& body) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int first = 4 * (i * kThreads + static_cast<int>(threadIdx.x));
      if (first < features) body(first, quads[i]);
    }
  }
  // body(first feature, quad, quad of another row).
  template <class Body>
  __device__ __forceinline__ void each_with(HeldRow& other, int features, const Body& body) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int first = 4 * (i * kThreads + static_cast<int>(threadIdx.x));
      if (first < features) body(first, quads[i], other.quads[i]);
    }
  }

  // Rows start at multiples of 16 bytes.
  __device__ __forceinline__ void load(const float* x, int features) {
    each(features, [&](int first, float4& quad) { quad = *reinterpret_cast<const float4*>(x + first); });
  }
  __device__ __forceinline__ void store(float* y, int features) {
    each(features, [&](int first, const float4& quad) { *reinterpret_cast<float4*>(y + first) = quad; });
  }
};

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ __forceinline__ float4 operator*(const float4& a, const float4& b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ __forceinline__ float4 operator*(const float4& a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }

// squares + x^2 + y^2 + z^2 + w^2, in this order.
__device__ __forceinline__ float add_squares(float squares, const float4& q) {
  return fmaf(q.w, q.w, fmaf(q.z, q.z, fmaf(q.y, q.y, fmaf(q.x, q.x, squares))));
}
__device__ __forceinline__ float largest_of(const float4& q) {
  return fmaxf(fmaxf(fabsf(q.x), fabsf(q.y)), fmaxf(fabsf(q.z), fabsf(q.w)));
}

}  // namespace v100::cuda
