// Caches of keys and values, and attention over them.
//
// A sequence with at most 64 rows in the ubatch is attended to by the decode kernels, whose bits do not depend on the number
// of rows; one with more by the prompt kernel. So a row's bits do not depend on the other sequences.
#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/kernels/attention_shape.h"
#include "cuda/kv.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kPromptBlockRows = 64;  // of a block
// Of sums of partitions. Every piece of the rows reads all keys and values: 8 rows of 24 heads and 256 K tokens are one.
constexpr size_t kMostPartBytes = size_t{128} << 20;
constexpr int32_t kPanelOctet = 8;  // values of a row that stand together in a panel
constexpr std::array<int32_t, 6> kBlockRows{8, 16, 24, 32, 48, 64};
constexpr std::array<int32_t, 2> kCountedBlockRows{16, 64};

// Partitions of the longest view, in steps: recorded work depends on the number.
int32_t partitions_for(std::span<const RowRange> visible) {
  int32_t end = 1;
  for (const RowRange& view : visible) end = std::max(end, view.end);
  const int32_t partitions = partition_of(end - 1) + 1;
  const int32_t step = partitions <= 16 ? 4 : partitions <= 64 ? 8 : 16;
  return (partitions + step - 1) / step * step;
}

// Of a decode kernel: the fewest that hold as many rows, else the most.
int32_t block_rows_for(int32_t rows, const KvCache& cache) {
  const auto sizes =
      is_counted(cache) ? std::span<const int32_t>(kCountedBlockRows) : std::span<const int32_t>(kBlockRows);
  const auto fits = std::ranges::find_if(sizes, [&](int32_t n) { return n >= rows; });
  return fits == sizes.end() ? sizes.back() : *fits;
}

// After the names of units and decode kernels.
std::string suffix_of(const KvCache& cache) { return is_counted(cache) ? "_counted" : ""; }

}  // namespace

namespace {

KvAppendParams append_params(Tensor k, Tensor v, const RowTables& t, const KvCache& cache) {
  return {.k = k.data,
          .v = v.data,
          .kv_index = t.kv_index,
          .sequence = t.sequence,
          .page_table = t.page_table,
          .cache = cache,
          .rows = v.rows,
          .most_pages = t.most_pages};
}

}  // namespace

void CudaOps::append_rows(Tensor k, Tensor v, const RowTables& t, const KvCache& cache) {
  const int64_t warps = int64_t{v.rows} * cache.kv_heads * kv_feature_blocks(cache.head_dim) * 2;
  launch("kv_append", "kv_append", warps_grid(warps), kThreads, append_params(k, v, t, cache));
}

void CudaOps::kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) {
  append_rows(k, v, tables(rows), kv_cache(layer));
}

void CudaOps::rotate_and_append(Tensor q, Tensor k, Tensor v, int32_t heads, const Rotation& rotation, const Rows& rows,
                                const KvLayer& layer) {
  changes(q), changes(k);
  const KvCache cache = kv_cache(layer);
  const auto turned = [&](Tensor x, int32_t n_heads, const VectorWeight* norm) {
    return norm_rope_params(x, n_heads, cache.head_dim, norm, rotation.eps, rotation.table, rotation.layout);
  };
  const int64_t warps =
      int64_t{k.rows} * (heads + cache.kv_heads + int64_t{cache.kv_heads} * kv_feature_blocks(cache.head_dim));
  launch("kv_append", "rotate_and_append", warps_grid(warps), kThreads,
         RotateAppendParams{.q = turned(q, heads, rotation.q_norm),
                            .k = turned(k, cache.kv_heads, rotation.k_norm),
                            .append = append_params(k, v, tables(rows), cache)});
}

KeysValues CudaOps::kv_read(RowRange indices, std::span<const PageId> pages, const KvLayer& layer) {
  const KvCache cache = kv_cache(layer);
  const int32_t features = cache.kv_heads * cache.head_dim;
  const KeysValues read{create(indices.size(), features), create(indices.size(), features)};
  const int64_t warps = int64_t{indices.size()} * cache.kv_heads * kv_feature_blocks(cache.head_dim) * 2;
  if (warps == 0) return read;
  // Where they are lies in device memory: reading the last token of a growing sequence is the same work every time.
  std::vector<int32_t> where{indices.begin % kPageTokens};
  for (int32_t page = indices.begin / kPageTokens; page <= (indices.end - 1) / kPageTokens; ++page)
    where.push_back(pages[static_cast<size_t>(page)]);
  launch("kv_append", "kv_read", warps_grid(warps), kThreads,
         KvReadParams{.k = read.k.data,
                      .v = read.v.data,
                      .where = bring(std::span<const int32_t>(where)),
                      .cache = cache,
                      .rows = indices.size()});
  return read;
}

const int32_t* CudaOps::first_rows_of(const Rows& rows, RowRange part, const RowTables& t) {
  if (part.begin == 0 && part.end == t.rows) return t.first_row;
  std::vector<int32_t> first;
  for (const SequenceRows& sequence : rows.sequences)
    first.push_back(std::clamp(sequence.rows.begin, part.begin, part.end));
  first.push_back(part.end);
  return bring(std::span<const int32_t>(first));
}

void CudaOps::attend_decode(Tensor q, const Rows& rows, RowRange part, const RowTables& t, const KvCache& cache,
                            int32_t heads, float scale, const Attended& to) {
  const size_t mark = arena_.mark();
  const int32_t head_dim = cache.head_dim;
  const int32_t partitions =
      partitions_for(rows.visible.subspan(static_cast<size_t>(part.begin), static_cast<size_t>(part.end - part.begin)));
  const size_t row_parts = static_cast<size_t>(heads) * static_cast<size_t>(partitions);
  const int32_t most = rows_at_once(row_parts * static_cast<size_t>(head_dim + 2) * sizeof(float), kMostPartBytes);
  const int32_t pieces = (part.size() + most - 1) / most, piece_rows = (part.size() + pieces - 1) / pieces;
  const std::string unit = "attention_decode_" + std::to_string(head_dim);
  for (int32_t first = part.begin; first < part.end; first += piece_rows) {
    const RowRange piece{first, std::min(part.end, first + piece_rows)};
    const auto count = static_cast<size_t>(piece.size());
    auto* part_y = take<float>(count * row_parts * static_cast<size_t>(head_dim));
    auto* part_weight = take<float>(count * row_parts * 2);
    const int32_t block_of_rows = most_rows(rows, piece) * cache.group;  // rows of a block: a query row and a head
    const int32_t block_rows = block_rows_for(block_of_rows, cache);
    AttentionParams params{};
    params.q = q.data;
    params.visible = t.visible;
    params.first_row = first_rows_of(rows, piece, t);
    params.page_table = t.page_table;
    params.part_y = from_first_row(part_y, first, row_parts * static_cast<size_t>(head_dim));
    params.part_weight = from_first_row(part_weight, first, row_parts * 2);
    params.cache = cache;
    params.heads = heads;
    params.most_pages = t.most_pages;
    params.partitions = partitions;
    params.row_blocks = (block_of_rows + block_rows - 1) / block_rows;
    params.scale = scale;
    launch(unit + suffix_of(cache), "attention_decode_" + std::to_string(block_rows) + suffix_of(cache),
           {static_cast<uint32_t>(cache.kv_heads * params.row_blocks), static_cast<uint32_t>(partitions),
            static_cast<uint32_t>(t.sequences)},
           kThreads, params, static_cast<uint32_t>(attention_shared_bytes(head_dim, block_rows)));
    AttentionCombineParams sums{};
    sums.visible = t.visible + 2 * static_cast<int64_t>(first);
    sums.part_y = part_y;
    sums.part_weight = part_weight;
    sums.y = to.y.row(first);
    if (to.gate.data != nullptr) sums.gate = to.gate.row(first);
    if (to.out) {
      sums.out = {.panel = to.out->panel + int64_t{first} * kPanelOctet,
                  .row_scale = to.out->row_scale + first,
                  .tiles = to.out->tiles};
      sums.arrived = reinterpret_cast<uint32_t*>(row_counters_.address());
    }
    sums.heads = heads;
    sums.partitions = partitions;
    sums.gates = to.gate.features;
    launch(unit, "attention_combine", rows_grid(heads * combine_slices(head_dim), piece.size()), kThreads, sums);
    arena_.release(mark);
  }
}

void CudaOps::attend_prompt(Tensor q, const Rows& rows, RowRange part, const RowTables& t, const KvCache& cache,
                            int32_t heads, float scale, Tensor y) {
  AttentionParams params{};
  params.q = q.data;
  params.visible = t.visible;
  params.first_row = first_rows_of(rows, part, t);
  params.page_table = t.page_table;
  params.y = y.data;
  params.cache = cache;
  params.heads = heads;
  params.most_pages = t.most_pages;
  params.row_blocks = (most_rows(rows, part) * cache.group + kPromptBlockRows - 1) / kPromptBlockRows;
  params.scale = scale;
  launch("attention_prompt_" + std::to_string(cache.head_dim) + suffix_of(cache), "attention_prompt",
         {static_cast<uint32_t>(params.row_blocks), static_cast<uint32_t>(cache.kv_heads),
          static_cast<uint32_t>(t.sequences)},
         kThreads, params, static_cast<uint32_t>(attention_shared_bytes(cache.head_dim, kPromptBlockRows)));
}

Tensor CudaOps::attend(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) {
  Attended to{.y = create(q.rows, heads * layer.shape.head_dim_v), .gate = {}, .out = {}};
  if (heads == 0) return to.y;
  const RowTables t = tables(rows);
  KvCache cache = kv_cache(layer);
  cache.group = layer.shape.group_of(heads);
  const std::vector<RowRun> runs = runs_of(rows);
  const bool all_decode = runs.size() == 1 && !runs.front().is_prompt;
  if (all_decode) to.gate = gate, to.out = output_panel(to.y);
  for (const RowRun& run : runs)
    if (run.is_prompt)
      attend_prompt(q, rows, run.rows, t, cache, heads, scale, to.y);
    else
      attend_decode(q, rows, run.rows, t, cache, heads, scale, to);
  if (!all_decode && gate.data != nullptr) apply_gate(to.y, gate);
  return to.y;
}

Tensor CudaOps::attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) {
  return attend(q, {}, rows, layer, heads, scale);
}

Tensor CudaOps::gated_attention(Tensor q, Tensor gate, const Rows& rows, const KvLayer& layer, int32_t heads,
                                float scale) {
  return attend(q, gate, rows, layer, heads, scale);
}

}  // namespace v100::cuda
