// Depthwise causal convolution over the tokens of each sequence, then silu; the history is read and rewritten.
//
// Shapes    CausalConvParams; grid (channels / 256 rounded up, sequences). A thread owns a channel of a sequence, row after
//           row, so that nothing is read after it was overwritten; its last tokens are in L1.
// Bound     DRAM or L2: 8 bytes per row and channel. A prompt of one sequence has channels / 256 blocks only: latency.
// Budget    causal_conv        256 threads, <= 64 registers
// Numerics  fma over the taps in order, from 0.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;
constexpr int kMostTaps = 8;  // whose weights stay in registers

extern "C" __global__ void __launch_bounds__(kThreads) causal_conv(CausalConvParams p) {
  const int channel = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int sequence = static_cast<int>(blockIdx.y);
  const int first = p.first_row[sequence], rows = p.end_row[sequence] - first;
  if (channel >= p.channels || rows <= 0) return;
  const int from = p.state_from[sequence], kept = (p.taps - 1) * p.dilation;
  const int64_t start = static_cast<int64_t>(first) * p.channels + channel;
  const float* x = p.x + start;
  float* y = p.y + start;
  const float* old = from < 0 ? nullptr : p.history + from * p.slot_values + channel;
  // Token `at` of the history and the rows after it.
  const auto token = [&](int at) {
    if (at >= kept) return __ldg(x + static_cast<int64_t>(at - kept) * p.channels);
    return old == nullptr ? 0.0f : old[static_cast<int64_t>(at) * p.channels];
  };

  float weight[kMostTaps];
#pragma unroll
  for (int t = 0; t < kMostTaps; ++t)
    weight[t] = t < p.taps ? p.weight[static_cast<int64_t>(t) * p.channels + channel] : 0.0f;
#pragma unroll 2
  for (int row = 0; row < rows; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kMostTaps; ++t)
      if (t < p.taps) sum = fmaf(weight[t], token(row + t * p.dilation), sum);
    for (int t = kMostTaps; t < p.taps; ++t)
      sum = fmaf(p.weight[static_cast<int64_t>(t) * p.channels + channel], token(row + t * p.dilation), sum);
    y[static_cast<int64_t>(row) * p.channels] = silu_f32(sum);
  }
  // Ascending: a token that is still to be moved lies above the place that is written.
  float* kept_at = p.history + p.state_to[sequence] * p.slot_values + channel;
  for (int i = 0; i < kept; ++i) kept_at[static_cast<int64_t>(i) * p.channels] = token(rows + i);
}

}  // namespace v100::cuda
