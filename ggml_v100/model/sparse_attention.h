// Gated attention to the blocks of tokens that an indexer finds best (Qwen sparse attention): a few small heads score a
// pooled key for each block; a row attends to the tokens of its best blocks and to those of the block not yet complete.
// As long as all complete blocks fit the budget this is plain attention, with the same bits.
#pragma once

#include <optional>
#include <vector>

#include "model/gated_attention.h"
#include "model/keys.h"

namespace v100 {

// `attention.indexer.*` and `attention.compress_ratios`.
struct IndexerHyperparameters {
  int32_t heads = 0;
  int32_t head_dim = 0;              // Di
  int32_t block = 0;                 // tokens, a divisor of kPageTokens; 0: no layer has an indexer
  int32_t blocks = 0;                // that a row attends to at most
  std::vector<int32_t> has_indexer;  // per block of the model, those of multi-token prediction last
};

// Throws ModelError naming the key.
IndexerHyperparameters read_indexer_hyperparameters(const Keys& keys, const Hyperparameters& hp);

// H hidden, Ni index heads.
struct IndexerWeights {
  int32_t heads = 0, blocks = 0;
  Linear q;                     // [Ni Di, H]
  Linear k;                     // [Di, H]
  VectorWeight q_norm, k_norm;  // [Di]
};

// attention: this rank's of the layer; a rank without heads has nothing to look for.
IndexerWeights load_indexer(const WeightLoader& weights, const Hyperparameters& hp,
                            const IndexerHyperparameters& indexer, int32_t layer,
                            const GatedAttentionWeights& attention);

// The index cache of a layer.
KvShape index_shape(const IndexerHyperparameters& indexer, const GatedAttentionWeights& w);

// What the layer keeps of a sequence, and the angles of the rows and of the blocks that the rows complete.
struct SparseAttentionState {
  const KvLayer& kv;
  const KvLayer& index;
  const RopeTable& rope;
  const RopeTable& block_rope;
};

// Only the part that appends n [rows, H], normed, to the pages of both caches.
void append_sparse_gated(Ops& ops, Tensor n, const Rows& rows, const SparseAttentionState& state, float eps,
                         const GatedAttentionWeights& w, const IndexerWeights& indexer);

// n [rows, H], normed -> [rows, H]. Appends to the pages of both caches.
Tensor sparse_gated_attention(Ops& ops, Tensor n, const Rows& rows, const SparseAttentionState& state, float eps,
                              const GatedAttentionWeights& w, const IndexerWeights& indexer);

}  // namespace v100
