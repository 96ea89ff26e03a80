// Rows of a packed weight matrix as f32: token embeddings, from the same memory as the output layer where both are one.
//
// Shapes    EmbedParams; grid (rows, features / 8192 rounded up): a thread decodes 32 values. CODEC is a macro of the unit.
// Bound     launch. A row's bytes lie 16 of every 512: twice its bytes are read.
// Budget    embed              256 threads, <= 128 registers
// Numerics  As the weight kernels decode (codecs.cuh): rounded to f16.
#include "codebook_codecs.cuh"

namespace v100::cuda {

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) embed(EmbedParams p) {
  using Codec = CODEC;
  const int unit = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (unit >= p.features / kUnitValues) return;
  const int row = static_cast<int>(blockIdx.x), token = p.tokens[row];
  constexpr int64_t kRecord = 32 * Codec::kBytes;
  const int64_t tile_bytes = p.features / Codec::kValues * kRecord;
  const int lane = lane_of_column(token % kTileColumns);
  const uint8_t* record =
      p.table + token / kTileColumns * tile_bytes + unit / Codec::kUnits * kRecord + Codec::kLaneBytes * lane;
  const int index = unit % Codec::kUnits;
  typename Codec::Header header = Codec::load_header(record, lane);
  const typename Codec::Unit codes = Codec::load_unit(record + Codec::kHeadBytes + index * Codec::kUnitBytes, lane);
  for (int i = 0; i < index; ++i) Codec::end_unit(header, i);
  const float factor = __uint_as_float(static_cast<uint32_t>(127 + p.exponent) << 23);
  float2* y = reinterpret_cast<float2*>(p.y + static_cast<int64_t>(row) * p.features + unit * kUnitValues);
  for_each<2>([&]<int g>() {
    uint32_t w[8];
    Codec::template decode<g>(header, codes, index, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = __half22float2(as_half2(w[i]));
      y[g * 8 + i] = {pair.x * factor, pair.y * factor};
    }
  });
}

}  // namespace v100::cuda
