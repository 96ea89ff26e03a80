// Sparse attention in plain code: the indexer's cache, the choice of blocks, and attention over a list of keys.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// The `most` largest of scores, of equal ones the first, ascending.
std::vector<int32_t> best_blocks(std::span<const float> scores, int32_t most);

// Complete blocks that a row sees.
inline int32_t complete_blocks(const Rows& rows, int32_t row, int32_t block) {
  return rows.visible[static_cast<size_t>(row)].end / block;
}

// BlockChoice::most: what a row may choose, but not more than any row has.
inline int32_t room_for_blocks(const Rows& rows, int32_t block, int32_t most) {
  int32_t complete = 0;
  for (int32_t r = 0; r < rows.count(); ++r) complete = std::max(complete, complete_blocks(rows, r, block));
  return std::min(most, complete);
}

// Where a token of a sequence is stored.
inline std::byte* page_of(const KvLayer& layer, const SequenceRows& sequence, int32_t index) {
  const PageId page = sequence.pages[static_cast<size_t>(index / kPageTokens)];
  return layer.pages + static_cast<size_t>(page) * layer.page_stride_bytes;
}

// Pages as the reference lays them out (PageLayout).
//
// The mean of the stored keys of the block that ends with token `last`: mean [head_dim].
void mean_index_key(const SequenceRows& sequence, const KvLayer& index, int32_t last, float* mean);
void store_index_key(const SequenceRows& sequence, const KvLayer& index, int32_t token, const float* key);
void store_block_key(const SequenceRows& sequence, const KvLayer& index, int32_t last, const float* key);

// Scores of the first `count` blocks for one row's queries [heads, head_dim].
std::vector<float> score_blocks(const float* q, const SequenceRows& sequence, const KvLayer& index, int32_t heads,
                                int32_t count);

// One head of one row over the given kv indices, ascending: q [head_dim_k] -> y [head_dim_v].
void attend_keys(const float* q, const SequenceRows& sequence, std::span<const int32_t> keys, const KvLayer& layer,
                 int32_t kv_head, float scale, float* y);

}  // namespace v100
