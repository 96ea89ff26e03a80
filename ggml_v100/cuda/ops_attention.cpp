// Caches of keys and values, and attention over them.
//
// A sequence with at most 64 rows in the ubatch is attended to by the decode kernels, whose bits do not depend on the number
// of rows; one with more by the prompt kernel. So a row's bits do not depend on the other sequences.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/kernels/attention_shape.h"
#include "cuda/kv.h"
#include "cuda/ops.h"

namespace v100::cuda {

namespace {

constexpr int32_t kMostDecodeRows = 64;  // of a sequence
constexpr int32_t kPromptRows = 64;      // of a block
constexpr std::array<int32_t, 5> kBlockRows{8, 16, 32, 48, 64};
constexpr size_t kMostPartBytes = size_t{64} << 20;  // of the sums of partitions

// Partitions of the longest view, in steps: recorded work depends on the number.
int32_t partitions_for(std::span<const RowRange> visible) {
  int32_t end = 1;
  for (const RowRange& view : visible) end = std::max(end, view.end);
  const int32_t partitions = partition_of(end - 1) + 1;
  const int32_t step = partitions <= 16 ? 4 : partitions <= 64 ? 8 : 16;
  return (partitions + step - 1) / step * step;
}

bool is_prompt(const SequenceRows& sequence) { return sequence.rows.size() > kMostDecodeRows; }

// Rows of a sequence that lie in the part.
RowRange common(RowRange a, RowRange b) {
  const int32_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

int32_t most_rows(const Rows& rows, RowRange part) {
  int32_t most = 0;
  for (const SequenceRows& sequence : rows.sequences) most = std::max(most, common(sequence.rows, part).size());
  return most;
}

}  // namespace

void CudaOps::kv_append(Tensor k, Tensor v, const Rows& rows, const KvLayer& layer) {
  constexpr int64_t kWarps = kThreads / 32;
  const RowTables t = tables(rows);
  const KvCache cache = kv_cache(layer);
  const int64_t warps = int64_t{k.rows} * cache.kv_heads * kv_feature_blocks(cache.head_dim) * 2;
  launch("kv_append", "kv_append", {static_cast<uint32_t>((warps + kWarps - 1) / kWarps)}, kThreads,
         KvAppendParams{.k = k.data,
                        .v = v.data,
                        .kv_index = t.kv_index,
                        .sequence = t.sequence,
                        .page_table = t.page_table,
                        .cache = cache,
                        .rows = k.rows,
                        .most_pages = t.most_pages});
}

KeysValues CudaOps::kv_read(RowRange, std::span<const PageId>, const KvLayer&) { throw_missing("kv_read"); }

const int32_t* CudaOps::first_rows_of(const Rows& rows, RowRange part, const RowTables& t) {
  if (part.begin == 0 && part.end == t.rows) return t.first_row;
  std::vector<int32_t> first;
  for (const SequenceRows& sequence : rows.sequences)
    first.push_back(std::clamp(sequence.rows.begin, part.begin, part.end));
  first.push_back(part.end);
  return bring(std::span<const int32_t>(first));
}

void CudaOps::attend_decode(Tensor q, const Rows& rows, RowRange part, const RowTables& t, const KvCache& cache,
                            int32_t heads, float scale, Tensor y) {
  const size_t mark = arena_.mark();
  const int32_t head_dim = cache.head_dim;
  const int32_t partitions =
      partitions_for(rows.visible.subspan(static_cast<size_t>(part.begin), static_cast<size_t>(part.end - part.begin)));
  const size_t row_parts = static_cast<size_t>(heads) * static_cast<size_t>(partitions);
  const size_t row_bytes = row_parts * static_cast<size_t>(head_dim + 2) * sizeof(float);
  const int32_t piece_rows = static_cast<int32_t>(std::clamp<size_t>(kMostPartBytes / row_bytes, 1, 1 << 20));
  const std::string unit = "attention_decode_" + std::to_string(head_dim);
  for (int32_t first = part.begin; first < part.end; first += piece_rows) {
    const RowRange piece{first, std::min(part.end, first + piece_rows)};
    const auto count = static_cast<size_t>(piece.size());
    auto* part_y = take<float>(count * row_parts * static_cast<size_t>(head_dim));
    auto* part_weight = take<float>(count * row_parts * 2);
    const int32_t block_of_rows = most_rows(rows, piece) * cache.group;  // rows of a block: a query row and a head
    const auto fits = std::find_if(kBlockRows.begin(), kBlockRows.end(), [&](int32_t n) { return n >= block_of_rows; });
    const int32_t block_rows = fits == kBlockRows.end() ? kBlockRows.back() : *fits;
    AttentionParams params{};
    params.q = q.data;
    params.visible = t.visible;
    params.first_row = first_rows_of(rows, piece, t);
    params.page_table = t.page_table;
    params.y = y.data;
    // Rows are numbered from the ubatch's first.
    params.part_y = reinterpret_cast<float*>(address_of(part_y) - static_cast<size_t>(first) * row_parts *
                                                                      static_cast<size_t>(head_dim) * sizeof(float));
    params.part_weight =
        reinterpret_cast<float*>(address_of(part_weight) - static_cast<size_t>(first) * row_parts * 2 * sizeof(float));
    params.cache = cache;
    params.heads = heads;
    params.most_pages = t.most_pages;
    params.partitions = partitions;
    params.row_blocks = (block_of_rows + block_rows - 1) / block_rows;
    params.scale = scale;
    launch(unit, "attention_decode_" + std::to_string(block_rows),
           {static_cast<uint32_t>(cache.kv_heads * params.row_blocks), static_cast<uint32_t>(partitions),
            static_cast<uint32_t>(t.sequences)},
           kThreads, params, static_cast<uint32_t>(attention_shared_bytes(head_dim, block_rows)));
    AttentionParams sums = params;
    sums.visible = t.visible + 2 * static_cast<int64_t>(first);
    sums.part_y = part_y;
    sums.part_weight = part_weight;
    sums.y = y.row(first);
    launch(unit, "attention_combine", {static_cast<uint32_t>(heads), static_cast<uint32_t>(piece.size())}, kThreads,
           sums);
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
  params.row_blocks = (most_rows(rows, part) * cache.group + kPromptRows - 1) / kPromptRows;
  params.scale = scale;
  launch("attention_prompt_" + std::to_string(cache.head_dim), "attention_prompt",
         {static_cast<uint32_t>(params.row_blocks), static_cast<uint32_t>(cache.kv_heads),
          static_cast<uint32_t>(t.sequences)},
         kThreads, params, static_cast<uint32_t>(attention_shared_bytes(cache.head_dim, kPromptRows)));
}

Tensor CudaOps::attention(Tensor q, const Rows& rows, const KvLayer& layer, int32_t heads, float scale) {
  const Tensor y = create(q.rows, heads * layer.shape.head_dim_v);
  if (heads == 0) return y;
  const RowTables t = tables(rows);
  KvCache cache = kv_cache(layer);
  cache.group = layer.shape.group_of(heads);
  // Runs of sequences that are attended to alike.
  for (size_t begin = 0; begin < rows.sequences.size();) {
    size_t end = begin + 1;
    const bool prompt = is_prompt(rows.sequences[begin]);
    while (end < rows.sequences.size() && is_prompt(rows.sequences[end]) == prompt) ++end;
    const RowRange part{rows.sequences[begin].rows.begin, rows.sequences[end - 1].rows.end};
    if (prompt)
      attend_prompt(q, rows, part, t, cache, heads, scale, y);
    else
      attend_decode(q, rows, part, t, cache, heads, scale, y);
    begin = end;
  }
  return y;
}

void CudaOps::append_index(Tensor, const VectorWeight&, float, const RopeTable&, const Rows&, const KvLayer&) {
  throw_missing("append_index");
}

BlockChoice CudaOps::choose_blocks(Tensor, const Rows&, const KvLayer&, int32_t, int32_t) {
  throw_missing("choose_blocks");
}

Tensor CudaOps::sparse_attention(Tensor, const Rows&, const BlockChoice&, const KvLayer&, int32_t, float) {
  throw_missing("sparse_attention");
}

}  // namespace v100::cuda
