// Loading and computing of block-sparse gated attention.
#include "model/sparse_attention.h"

#include <array>
#include <cmath>

#include "base/error.h"

namespace v100 {

IndexerHyperparameters read_indexer_hyperparameters(const Keys& keys, const Hyperparameters& hp) {
  constexpr int32_t kMostTokens = 1 << 24;
  IndexerHyperparameters indexer;
  indexer.heads = keys.required("attention.indexer.head_count", 1, 1024);
  indexer.head_dim = keys.required("attention.indexer.key_length", 1, 8192);
  if (indexer.head_dim < hp.rope.dimension)
    throw ModelError(keys.full("attention.indexer.key_length") + " is " + std::to_string(indexer.head_dim) +
                     ", less than the " + std::to_string(hp.rope.dimension) + " rotated features");
  const int32_t budget = keys.required("attention.indexer.top_k", 1, kMostTokens);
  const int32_t blocks = hp.layers + hp.mtp_blocks;
  const std::string ratios = "attention.compress_ratios";
  indexer.has_indexer =
      keys.per_layer(ratios, blocks, std::vector<int32_t>(static_cast<size_t>(blocks)), 0, kMostTokens);
  for (int32_t& ratio : indexer.has_indexer) {
    if (ratio == 0) continue;
    if (indexer.block != 0 && ratio != indexer.block)
      throw ModelError(keys.full(ratios) + " has " + std::to_string(indexer.block) + " and " + std::to_string(ratio) +
                       ", expected one size of block for all layers");
    indexer.block = ratio;
    ratio = 1;
  }
  if (indexer.block == 0) return indexer;
  if (indexer.block < 2 || kPageTokens % indexer.block != 0)
    throw ModelError(keys.full(ratios) + " has " + std::to_string(indexer.block) +
                     ", expected a power of two from 2 to " + std::to_string(kPageTokens));
  if (budget % indexer.block != 0)
    throw ModelError(keys.full("attention.indexer.top_k") + " is " + std::to_string(budget) +
                     ", expected a multiple of the " + std::to_string(indexer.block) + " tokens of a block");
  indexer.blocks = budget / indexer.block;
  return indexer;
}

IndexerWeights load_indexer(const WeightLoader& weights, const Hyperparameters& hp,
                            const IndexerHyperparameters& indexer, int32_t layer,
                            const GatedAttentionWeights& attention) {
  const std::string prefix = block_prefix(layer) + "indexer.";
  IndexerWeights w;
  w.heads = indexer.heads;
  w.blocks = indexer.blocks;
  const auto projection = [&](const char* name, int32_t size) {
    return weights.linear_rows(prefix + name, hp.hidden, size,
                               std::array{RowRange{0, attention.attn.heads > 0 ? size : 0}});
  };
  w.q = projection("q_proj", indexer.heads * indexer.head_dim);
  w.k = projection("k_proj", indexer.head_dim);
  w.q_norm = weights.vector(prefix + "q_norm.weight", indexer.head_dim);
  w.k_norm = weights.vector(prefix + "k_norm.weight", indexer.head_dim);
  return w;
}

KvShape index_shape(const IndexerHyperparameters& indexer, const GatedAttentionWeights& w) {
  return {.kv_heads = w.attn.heads > 0 ? 1 : 0,
          .head_dim_k = indexer.head_dim,
          .head_dim_v = indexer.head_dim,
          .block = indexer.block};
}

void append_sparse_gated(Ops& ops, Tensor n, const Rows& rows, const SparseAttentionState& state, float eps,
                         const GatedAttentionWeights& w, const IndexerWeights& indexer) {
  if (w.attn.heads == 0) return;
  ops.append_index(ops.linear(n, indexer.k), indexer.k_norm, eps, state.block_rope, rows, state.index);
  append_gated(ops, n, rows, state.kv, state.rope, eps, w);
}

namespace {

// [rows, Hq D]. This rank has heads.
Tensor attend_to_best_blocks(Ops& ops, Tensor n, const Rows& rows, const SparseAttentionState& state, float eps,
                             const GatedAttentionWeights& w, const IndexerWeights& indexer) {
  const std::array<const Linear*, 2> weights{&indexer.q, &indexer.k};
  std::array<Tensor, 2> index;  // [rows, Ni Di], [rows, Di]
  ops.multi_linear(n, weights, index);
  ops.norm_rope(index[0], indexer.heads, indexer.q_norm.size, indexer.q_norm, eps, state.rope, RopeLayout::halves);
  ops.append_index(index[1], indexer.k_norm, eps, state.block_rope, rows, state.index);
  const BlockChoice choice = ops.choose_blocks(index[0], rows, state.index, indexer.heads, indexer.blocks);

  const auto [q, gate] = project_gated(ops, n, rows, state.kv, state.rope, eps, w);
  const float scale = 1.0f / std::sqrt(static_cast<float>(w.q_norm.size));
  const Tensor o = ops.sparse_attention(q, rows, choice, state.kv, w.attn.heads, scale);  // [rows, Hq D]
  ops.apply_gate(o, gate);
  return o;
}

}  // namespace

Tensor sparse_gated_attention(Ops& ops, Tensor n, const Rows& rows, const SparseAttentionState& state, float eps,
                              const GatedAttentionWeights& w, const IndexerWeights& indexer) {
  const Tensor o =
      w.attn.heads > 0 ? attend_to_best_blocks(ops, n, rows, state, eps, w, indexer) : ops.create(n.rows, 0);
  const Tensor a = ops.linear(o, w.attn.output);  // [rows, H]
  if (w.attn.is_partial) ops.all_reduce(a);
  return a;
}

}  // namespace v100
