// A row of activations as a row of the f16 panel that tensor-core kernels read (PanelParams).
//
// Numerics  A row times 2^e, exactly, with its largest value at 2^14..2^15; then to f16, nearest even. So no value overflows
//           and values down to 2^-28 of the largest keep 11 bits. A row of zeros, or with an infinity or NaN, has e = 0.
#pragma once

#include "held_row.cuh"

namespace v100::cuda {

using PanelRow = HeldRow<10, kRowThreads>;  // up to 20480 features

// What a row with this largest magnitude of a thread is multiplied by; row_scale becomes what undoes that. All threads of a
// block together.
template <int kThreads>
__device__ __forceinline__ float panel_scale(float most, float* row_scale) {
  __shared__ float largest[kThreads / kWarp];
  most = block_max<kThreads / kWarp>(most, largest);

  // most = m * 2^exponent with m in 1..2; subnormal maxima count as 2^-127. The scale stays within f32's normal range.
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
  const bool is_plain = most > 0.0f && exponent < 128;
  const int shift = is_plain ? min(14 - exponent, 126) : 0;
  if (threadIdx.x == 0) *row_scale = __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
  return __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
}

// Four features of a row as halves.
__device__ __forceinline__ void put_halves(uint16_t* to, const float4& quad, float scale) {
  const __half2 pairs[2] = {__floats2half2_rn(quad.x * scale, quad.y * scale),
                            __floats2half2_rn(quad.z * scale, quad.w * scale)};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
}
// The same, of a panel's row, from feature `first` on.
__device__ __forceinline__ void put_quad(uint16_t* panel, int tiles, int row, int first, const float4& quad,
                                         float scale) {
  uint16_t* octet = panel + (static_cast<int64_t>(first / 8) * tiles * 8 + row) * 8;
  put_halves(octet + first % 8, quad, scale);
}

// Row `row` of a panel from what a block holds.
template <class Row>
__device__ __forceinline__ void panel_row_of(Row& x, int features, int tiles, int row, uint16_t* panel,
                                             float* row_scale) {
  float most = 0.0f;
  x.each(features, [&](int, const float4& quad) { most = fmaxf(most, largest_of(quad)); });
  const float scale = panel_scale<Row::kThreads>(most, row_scale);
  x.each(features, [&](int first, const float4& quad) { put_quad(panel, tiles, row, first, quad, scale); });
}

// Row `row` of a panel from x [features].
template <int kThreads = kRowThreads>
__device__ __forceinline__ void panel_row(const float* x, int features, int tiles, int row, uint16_t* panel,
                                          float* row_scale) {
  if (kThreads == kRowThreads && PanelRow::fits(features)) {
    PanelRow held;
    held.load(x, features);
    return panel_row_of(held, features, tiles, row, panel, row_scale);
  }
  const int thread = static_cast<int>(threadIdx.x);
  const auto load = [&](int i) { return *reinterpret_cast<const float4*>(x + i); };
  float most = 0.0f;
  in_batches<8>(4 * thread, 4 * kThreads, features, load,
                [&](int, const float4& quad) { most = fmaxf(most, largest_of(quad)); });
  const float scale = panel_scale<kThreads>(most, row_scale);
  in_batches<8>(4 * thread, 4 * kThreads, features, load,
                [&](int first, const float4& quad) { put_quad(panel, tiles, row, first, quad, scale); });
}

}  // namespace v100::cuda
