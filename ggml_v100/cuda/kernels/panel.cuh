// A row of activations as a row of the f16 panel that tensor-core kernels read (PanelParams).
//
// Numerics  A row times 2^e, exactly, with its largest value at 2^14..2^15; then to f16, nearest even. So no value overflows
//           and values down to 2^-28 of the largest keep 11 bits. A row of zeros, or with an infinity or NaN, has e = 0.
#pragma once

#include "base.cuh"

namespace v100::cuda {

constexpr int kPanelThreads = 256;

// Row `row` of a panel from x [features]; x nullptr: zeros, which have no scale. All threads of a block together.
__device__ __forceinline__ void panel_row(const float* x, int features, int tiles, int row, uint16_t* panel,
                                          float* row_scale) {
  __shared__ float largest[kPanelThreads / kWarp];
  float most = 0.0f;
  if (x != nullptr)
    in_batches<8>(
        threadIdx.x, kPanelThreads, features, [&](int i) { return x[i]; },
        [&](int, float value) { most = fmaxf(most, fabsf(value)); });
  most = warp_max(most);
  if (lane_id() == 0) largest[warp_id()] = most;
  __syncthreads();  // maxima written above are read below
  for (int w = 0; w < kPanelThreads / kWarp; ++w) most = fmaxf(most, largest[w]);

  // most = m * 2^exponent with m in 1..2; subnormal maxima count as 2^-127. The scale stays within f32's normal range.
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23 & 255u) - 127;
  const bool is_plain = most > 0.0f && exponent < 128;
  const int shift = is_plain ? min(14 - exponent, 126) : 0;
  const float scale = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
  if (x != nullptr && threadIdx.x == 0) *row_scale = __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);

  const auto octet_of = [&](int octet) {
    if (x == nullptr) return uint4{0, 0, 0, 0};
    const float4 a = reinterpret_cast<const float4*>(x)[2 * octet],
                 b = reinterpret_cast<const float4*>(x)[2 * octet + 1];
    const __half2 pairs[4] = {__floats2half2_rn(a.x * scale, a.y * scale), __floats2half2_rn(a.z * scale, a.w * scale),
                              __floats2half2_rn(b.x * scale, b.y * scale), __floats2half2_rn(b.z * scale, b.w * scale)};
    return *reinterpret_cast<const uint4*>(pairs);
  };
  in_batches<3>(threadIdx.x, kPanelThreads, features / 8, octet_of, [&](int octet, uint4 packed) {
    *reinterpret_cast<uint4*>(panel + (static_cast<int64_t>(octet) * tiles * 8 + row) * 8) = packed;
  });
}

}  // namespace v100::cuda
