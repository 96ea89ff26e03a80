// Sparse attention: the index of block keys, the choice of blocks, attention to what was chosen.
//
// As with attention to everything, a sequence with at most 64 rows in the ubatch is treated as one that decodes.
#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/kv.h"
#include "cuda/ops.h"
#include "ops/sparse_attention.h"

namespace v100::cuda {

namespace {

constexpr uint32_t kChooseThreads = 512;
constexpr int32_t kMostSharedBytes = 96 << 10;

int32_t rounded_up(int32_t value, int32_t step) { return (value + step - 1) / step * step; }

}  // namespace

void CudaOps::append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                           const KvLayer& index) {
  if (index.shape.kv_heads == 0) return;
  const RowTables t = tables(rows);
  const KvCache cache = kv_cache(index);
  append_rows({nullptr, keys.rows, keys.features}, keys, t, cache);
  std::vector<int32_t> block_row(static_cast<size_t>(keys.rows), -1);
  int32_t ended = 0;
  for (size_t r = 0; r < block_row.size(); ++r)
    if ((rows.kv_index[r] + 1) % cache.block == 0) block_row[r] = ended++;
  if (ended == 0) return;
  launch("block_index", "append_block_keys", warps_grid(keys.rows), kThreads,
         BlockKeysParams{.weight = w.data.get(),
                         .cosine = angles.cosine,
                         .sine = angles.sine,
                         .block_row = bring(std::span<const int32_t>(block_row)),
                         .kv_index = t.kv_index,
                         .sequence = t.sequence,
                         .page_table = t.page_table,
                         .cache = cache,
                         .rows = keys.rows,
                         .most_pages = t.most_pages,
                         .pairs = angles.pairs,
                         .eps = eps});
}

BlockChoice CudaOps::choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most) {
  constexpr int32_t kStep = 64;  // recorded work depends on the room
  const KvCache cache = kv_cache(index);
  const int32_t complete = room_for_blocks(rows, cache.block, INT32_MAX);
  most = std::min(most, rounded_up(std::max(1, complete), kStep));
  seat_.beat();
  auto* count = take<int32_t>(static_cast<size_t>(q.rows));
  auto* blocks = take<int32_t>(static_cast<size_t>(q.rows) * static_cast<size_t>(most));
  const RowTables t = tables(rows);
  const int32_t stride = rounded_up(std::max(1, complete), 4 * kStep);
  const int32_t piece_rows = rows_at_once(static_cast<size_t>(stride) * sizeof(float));
  for (int32_t first = 0; first < q.rows; first += piece_rows) {
    const size_t mark = arena_.mark();
    const RowRange piece{first, std::min(q.rows, first + piece_rows)};
    auto* scores = take<float>(static_cast<size_t>(piece.size()) * static_cast<size_t>(stride));
    const int32_t sequence_rows = most_rows(rows, piece);
    const bool is_wide = sequence_rows > 8 && index_shared_bytes(cache.head_dim, heads, 32) <= kMostSharedBytes;
    const int32_t block_rows = is_wide ? 32 : 8;
    const int32_t tiles = (complete + 31) / 32;  // of block keys, eight of them to a block
    ScoreBlocksParams params{};
    params.q = q.data;
    params.visible = t.visible;
    params.first_row = first_rows_of(rows, piece, t);
    params.page_table = t.page_table;
    params.scores = from_first_row(scores, first, static_cast<size_t>(stride));
    params.cache = cache;
    params.heads = heads;
    params.most_pages = t.most_pages;
    params.score_stride = stride;
    params.most = most;
    launch("block_index", "score_blocks_" + std::to_string(block_rows),
           {static_cast<uint32_t>((sequence_rows + block_rows - 1) / block_rows),
            static_cast<uint32_t>(rounded_up(std::max(1, (tiles + 7) / 8), 8)), static_cast<uint32_t>(t.sequences)},
           kThreads, params, static_cast<uint32_t>(index_shared_bytes(cache.head_dim, heads, block_rows)));
    launch("block_index", "choose_blocks", {static_cast<uint32_t>(piece.size())}, kChooseThreads,
           ChooseBlocksParams{.scores = scores,
                              .visible = t.visible + 2 * static_cast<int64_t>(first),
                              .count = count + first,
                              .blocks = blocks + static_cast<int64_t>(first) * most,
                              .rows = piece.size(),
                              .score_stride = stride,
                              .block = cache.block,
                              .most = most});
    arena_.release(mark);
  }
  return {q.rows, cache.block, most, count, blocks};
}

Tensor CudaOps::sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer,
                                 int32_t heads, float scale) {
  const Tensor y = create(q.rows, heads * layer.shape.head_dim_v);
  if (heads == 0) return y;
  const RowTables t = tables(rows);
  KvCache cache = kv_cache(layer);
  cache.group = layer.shape.group_of(heads);
  const int32_t kernel_heads = cache.group <= 8 ? 8 : cache.group <= 16 ? 16 : 32;
  const int32_t tokens = (choice.most + 1) * std::max(choice.block, 4);
  const int32_t all_partitions = (tokens + kSparsePartition - 1) / kSparsePartition;
  const size_t part_values = static_cast<size_t>(heads) * static_cast<size_t>(all_partitions);
  const size_t row_bytes = part_values * static_cast<size_t>(cache.head_dim + 2) * sizeof(float);
  for (const RowRun& run : runs_of(rows)) {
    const int32_t piece_rows = run.is_prompt ? run.rows.size() : rows_at_once(row_bytes);
    for (int32_t first = run.rows.begin; first < run.rows.end; first += piece_rows) {
      const size_t mark = arena_.mark();
      const int32_t count = std::min(run.rows.end, first + piece_rows) - first;
      SparseAttentionParams params{};
      params.q = q.row(first);
      params.visible = t.visible + 2 * static_cast<int64_t>(first);
      params.sequence = t.sequence + first;
      params.page_table = t.page_table;
      params.count = choice.count + first;
      params.blocks = choice.blocks + static_cast<int64_t>(first) * choice.most;
      params.y = y.row(first);
      if (!run.is_prompt) {
        params.part_y = take<float>(static_cast<size_t>(count) * part_values * static_cast<size_t>(cache.head_dim));
        params.part_weight = take<float>(static_cast<size_t>(count) * part_values * 2);
      }
      params.cache = cache;
      params.heads = heads;
      params.most_pages = t.most_pages;
      params.block = choice.block;
      params.most = choice.most;
      params.partitions = run.is_prompt ? 1 : all_partitions;
      params.head_blocks = (cache.group + kernel_heads - 1) / kernel_heads;
      params.scale = scale;
      launch("sparse_attention", "sparse_attention_" + std::to_string(kernel_heads),
             {static_cast<uint32_t>(count), static_cast<uint32_t>(cache.kv_heads * params.head_blocks),
              static_cast<uint32_t>(params.partitions)},
             kThreads, params, static_cast<uint32_t>(sparse_shared_bytes(cache.head_dim, kernel_heads)));
      if (!run.is_prompt)
        launch("sparse_attention", "sparse_combine", {static_cast<uint32_t>(heads), static_cast<uint32_t>(count)},
               kThreads, params);
      arena_.release(mark);
    }
  }
  return y;
}

}  // namespace v100::cuda
