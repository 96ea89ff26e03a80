// Layers with a state: convolution, delta net, the row before.
#include <limits>

#include "base/error.h"
#include "cuda/kernels/delta_chunk_shape.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

// Sizes of heads that the kernels of prompts have been compiled for.
bool has_chunked_form(int32_t head_dim) { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

}  // namespace

Tensor CudaOps::causal_conv_silu(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history) {
  const Tensor y = create(x.rows, x.features);
  const RowTables t = tables(rows);
  const bool is_one = x.rows == 1 && rows.sequences.size() == 1 && w.dilation == 1 && w.taps <= kMostRowTaps;
  if (is_one && convolves(x, RowConv{.weight = w.data.get(),
                                     .y = y.data,
                                     .history = history.base,
                                     .state_from = t.state_from,
                                     .state_to = t.state_to,
                                     .slot_values = history.stride,
                                     .job = 0,
                                     .taps = w.taps}))
    return y;
  launch("causal_conv", "causal_conv", rows_grid((w.channels + 255) / 256, t.sequences), kThreads,
         CausalConvParams{.x = x.data,
                          .weight = w.data.get(),
                          .y = y.data,
                          .history = history.base,
                          .state_from = t.state_from,
                          .state_to = t.state_to,
                          .first_row = t.first_row,
                          .end_row = t.end_row,
                          .slot_values = history.stride,
                          .channels = w.channels,
                          .taps = w.taps,
                          .dilation = w.dilation});
  return y;
}

Tensor CudaOps::delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                          const StateRecords& memory) {
  const Tensor y = create(qkv.rows, w.value_size());
  const RowTables t = tables(rows);
  const bool has_prompts = t.chunks > 0 && has_chunked_form(w.head_dim);
  if (has_prompts) delta_net_in_chunks(qkv, beta, alpha, w, eps, t, memory, y);
  const auto is_short = [](const SequenceRows& sequence) { return sequence.rows.size() <= kMostDecodeRows; };
  if (has_prompts && std::ranges::none_of(rows.sequences, is_short)) return y;

  constexpr int32_t kColumns = 16, kWarps = 4;  // columns of a warp, warps of a block
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
                        .end_row = t.end_row,
                        .slot_values = memory.stride,
                        .key_heads = w.key_heads,
                        .value_heads = w.value_heads,
                        .most_rows = has_prompts ? kMostDecodeRows : std::numeric_limits<int32_t>::max(),
                        .eps = eps});
  return y;
}

void CudaOps::delta_net_in_chunks(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps,
                                  const RowTables& t, const StateRecords& memory, Tensor y) {
  constexpr int32_t kColumns = 32, kScanThreads = 128;  // columns of a block that scans
  const size_t mark = arena_.mark();
  const auto chunks = static_cast<size_t>(t.chunks);
  const size_t of_keys = chunks * static_cast<size_t>(w.key_heads),
               of_values = chunks * static_cast<size_t>(w.value_heads);
  const DeltaNetChunksParams params{
      .qkv = qkv.data,
      .beta = beta.data,
      .alpha = alpha.data,
      .a = w.a.data.get(),
      .dt_bias = w.dt_bias.data.get(),
      .y = y.data,
      .memory = memory.base,
      .state_from = t.state_from,
      .state_to = t.state_to,
      .first_row = t.first_row,
      .end_row = t.end_row,
      .first_position = t.first_position,
      .first_chunk = t.first_chunk,
      .key_panels = take<uint16_t>(of_keys * static_cast<size_t>(delta_key_panel_values(w.head_dim))),
      .value_panels = take<uint16_t>(of_values * static_cast<size_t>(kDeltaValuePanelValues)),
      .factors = take<float>(of_values * static_cast<size_t>(kDeltaFactorValues)),
      .slot_values = memory.stride,
      .key_heads = w.key_heads,
      .value_heads = w.value_heads,
      .eps = eps};
  const std::string size = std::to_string(w.head_dim);
  launch("delta_net_chunked", "delta_net_chunks_" + size, rows_grid(t.chunks, w.key_heads), kThreads, params,
         static_cast<uint32_t>(delta_chunks_shared_bytes(w.head_dim)));
  launch("delta_net_chunked", "delta_net_scan_" + size, rows_grid(w.value_size() / kColumns, t.sequences), kScanThreads,
         params);
  arena_.release(mark);
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
                            .end_row = t.end_row,
                            .state_from = t.state_from,
                            .state_to = t.state_to,
                            .slot_values = last.stride,
                            .rows = x.rows,
                            .features = x.features});
  return y;
}

}  // namespace v100::cuda
