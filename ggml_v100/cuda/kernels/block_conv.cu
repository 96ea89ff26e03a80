// Convolution over the rows of blocks of drafted tokens, with coefficients that are partly the row's own.
//
// Shapes    BlockConvParams. Four features of a row per thread.
// Bound     launch: 64 rows of 4096 features are 1 MB; the taps before a row come from L1 or L2.
// Budget    block_conv         256 threads, <= 64 registers
// Numerics  fma over the taps in order, from 0; the two coefficients are added first.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) block_conv(BlockConvParams p) {
  const int row = static_cast<int>(blockIdx.x), groups = p.features / p.group;
  const int taps = min(p.taps, row % p.block_rows + 1);
  const float* base = p.base + static_cast<int64_t>(p.place) * p.taps * p.features;
  const float* own = p.own + (static_cast<int64_t>(row) * 2 + p.place) * p.taps * groups;
  const float* x = p.x + static_cast<int64_t>(row) * p.features;
  for_features(p.features, [&](int i) {
    float y = 0.0f;
    for (int t = 0; t < taps; ++t) {
      const float factor = __fadd_rn(base[static_cast<int64_t>(t) * p.features + i], own[t * groups + i / p.group]);
      y = fmaf(factor, x[i - static_cast<int64_t>(t) * p.features], y);
    }
    p.y[static_cast<int64_t>(row) * p.features + i] = y;
  });
}

}  // namespace v100::cuda
