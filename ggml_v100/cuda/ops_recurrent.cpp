// Layers with a state: convolution, delta net, the row before.
#include "base/error.h"
#include "cuda/ops.h"

namespace v100::cuda {

Tensor CudaOps::causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) {
  const Tensor y = create(x.rows, x.features);
  const RowTables t = tables(rows);
  launch("causal_conv", "causal_conv", rows_grid((w.channels + 255) / 256, t.sequences), kThreads,
         CausalConvParams{.x = x.data,
                          .weight = w.data.get(),
                          .y = y.data,
                          .history = history.base,
                          .state_from = t.state_from,
                          .state_to = t.state_to,
                          .first_row = t.first_row,
                          .slot_values = history.stride,
                          .channels = w.channels,
                          .taps = w.taps,
                          .dilation = w.dilation});
  return y;
}

Tensor CudaOps::delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                          const StateRecords& memory) {
  constexpr int32_t kColumns = 16, kWarps = 4;  // columns of a warp, warps of a block
  const Tensor y = create(qkv.rows, w.value_size());
  const RowTables t = tables(rows);
  const int32_t warps = w.value_size() / kColumns;
  launch("delta_net", "delta_net_" + std::to_string(w.head_dim), rows_grid((warps + kWarps - 1) / kWarps, t.sequences),
         kWarps * 32,
         DeltaNetParams{.qkv = qkv.data,
                        .beta = beta.data,
                        .alpha = alpha.data,
                        .a = w.a.data.get(),
                        .dt_bias = w.dt_bias.data.get(),
                        .y = y.data,
                        .memory = memory.base,
                        .state_from = t.state_from,
                        .state_to = t.state_to,
                        .first_row = t.first_row,
                        .slot_values = memory.stride,
                        .key_heads = w.key_heads,
                        .value_heads = w.value_heads,
                        .eps = eps});
  return y;
}

Tensor CudaOps::previous_rows(Tensor x, const Rows& rows, const StateRecords& last) {
  const Tensor y = create(x.rows, x.features);
  const RowTables t = tables(rows);
  launch("row_moves", "previous_rows", rows_grid(x.rows, wide_blocks(x.features)), kThreads,
         PreviousRowsParams{.x = x.data,
                            .y = y.data,
                            .last = last.base,
                            .sequence = t.sequence,
                            .first_row = t.first_row,
                            .state_from = t.state_from,
                            .state_to = t.state_to,
                            .slot_values = last.stride,
                            .rows = x.rows,
                            .features = x.features});
  return y;
}

}  // namespace v100::cuda
