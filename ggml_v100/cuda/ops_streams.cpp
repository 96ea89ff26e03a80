// Residual streams, and the convolution over drafted blocks.
#include "cuda/ops.h"

namespace v100::cuda {

Tensor CudaOps::block_conv(Tensor x, const BlockConv& w, int32_t place, Tensor own, int32_t block_rows) {
  const Tensor y = create(x.rows, x.features);
  launch("block_conv", "block_conv", rows_grid(x.rows, wide_blocks(x.features)), kThreads,
         BlockConvParams{.x = x.data,
                         .base = w.base.data.get(),
                         .own = own.data,
                         .y = y.data,
                         .rows = x.rows,
                         .features = x.features,
                         .taps = w.taps,
                         .group = w.group,
                         .place = place,
                         .block_rows = block_rows});
  return y;
}

Tensor CudaOps::repeat_streams(Tensor x, int32_t streams) {
  const Tensor y = create(x.rows, x.features * streams);
  launch("streams", "repeat_streams", rows_grid(x.rows, wide_blocks(x.features)), kThreads,
         RepeatStreamsParams{.x = x.data, .y = y.data, .rows = x.rows, .features = x.features, .streams = streams});
  return y;
}

Tensor CudaOps::norm_streams(Tensor x, int32_t streams, const VectorWeight& w, float eps) {
  const Tensor y = create(x.rows, x.features);
  launch("streams", "norm_streams", rows_grid(x.rows, streams), kThreads,
         NormStreamsParams{.x = x.data,
                           .weight = w.data.get(),
                           .y = y.data,
                           .rows = x.rows,
                           .features = x.features / streams,
                           .streams = streams,
                           .eps = eps});
  return y;
}

void CudaOps::scaled_silu(Tensor x, float factor) {
  changes(x);
  launch_flat("streams", "scaled_silu", x.size(), ScaleParams{.x = x.data, .n = x.size(), .factor = factor});
}

Tensor CudaOps::mix_streams(Tensor x, Tensor gate, int32_t streams) {
  const Tensor y = create(x.rows, x.features / streams);
  launch("streams", "mix_streams", rows_grid(x.rows, wide_blocks(y.features)), kThreads,
         MixStreamsParams{
             .x = x.data, .gate = gate.data, .y = y.data, .rows = x.rows, .features = y.features, .streams = streams});
  return y;
}

void CudaOps::add_to_streams(Tensor x, Tensor y, Tensor inject) {
  changes(x);
  launch("streams", "add_to_streams", rows_grid(x.rows, wide_blocks(y.features)), kThreads,
         AddToStreamsParams{.x = x.data,
                            .y = y.data,
                            .inject = inject.data,
                            .rows = x.rows,
                            .features = y.features,
                            .streams = inject.features});
}

Tensor CudaOps::gate_memory(Tensor key, Tensor query, Tensor value) {
  const Tensor y = create(key.rows, key.features);
  const int32_t streams = key.features / value.features;
  launch("streams", "gate_memory", rows_grid(key.rows, streams), kThreads,
         GateMemoryParams{.key = key.data,
                          .query = query.data,
                          .value = value.data,
                          .y = y.data,
                          .rows = key.rows,
                          .features = value.features,
                          .streams = streams});
  return y;
}

}  // namespace v100::cuda
