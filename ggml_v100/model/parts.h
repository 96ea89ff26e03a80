// Parts that the blocks of several families are made of: their weights, and what is computed with them.
#pragma once

#include <optional>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

// Attention's four matrices: this rank's rows and columns of them. H hidden, Hq/Hkv its heads, D and Dv head sizes of keys
// and values.
struct AttentionWeights {
  int32_t heads = 0, kv_heads = 0;
  KvShape kv;               // of the cache, types left to the engine
  Linear q, k, v;           // [Hq D, H], [Hkv D, H], [Hkv Dv, H]
  Linear output;            // [H, Hq Dv]
  bool is_partial = false;  // its product is a summand, the other ranks have the rest
};

// Weights with this rank's heads of a layer, no matrix loaded yet; and the rows they take in q, k, v and columns in output.
// tensors: the ones that are cut by heads, attn_output the last. Throws ModelError unless the heads of the layer make
// groups over its kv heads.
struct AttentionShare {
  AttentionWeights weights;
  RowRange q, k, v, output;
  int32_t all_q, all_k, all_v, all_output;  // of all ranks
};
AttentionShare share_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer,
                               const std::vector<std::string>& tensors);

// From attn_qkv (one matrix, rows of q, k, v in turn) or attn_q, attn_k, attn_v; and attn_output. Biases where present.
AttentionWeights load_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer);

struct QueryKeyValue {
  Tensor q, k, v;  // [rows, Hq D], [rows, Hkv D], [rows, Hkv Dv]
};
QueryKeyValue project(Ops& ops, Tensor n, const AttentionWeights& w);
// Turns q and k, appends k and v, attends over what the rows see (`seen`: the rows, perhaps with a shorter view), projects
// back to [rows, H].
Tensor attend(Ops& ops, const QueryKeyValue& qkv, const Rotation& rotation, const Rows& seen, const KvLayer& kv,
              float scale, const AttentionWeights& w);

// The expert beside a mixture that sees every token. F: its width, this rank's part of it.
struct SharedExpertWeights {
  Linear gate, up, down;  // [F, H], [F, H], [H, F]
  Linear share;           // [1, H]: its sigmoid is how much a token takes of this expert
};

// Gated feed-forward, dense or a mixture of experts. F: its width, of a dense one this rank's part; or that of an expert,
// of which each rank has some.
struct FeedForwardWeights {
  Linear gate, up, down;  // dense: [F, H], [F, H], [H, F]
  Linear router;          // mixture: [experts, H]
  ExpertLinear gates, ups, downs;
  Linear nothing;  // gives zeros [rows, H], where no expert is here
  std::optional<SharedExpertWeights> shared;
  int32_t experts_used = 0;  // 0: dense
  bool has_experts = false;  // this rank has some; else it needs no router
  bool is_partial = false;   // the result is a summand, the other ranks have the rest
};

// A mixture when the hyperparameters have experts (ffn_gate_inp, ffn_*_exps; gates and ups perhaps in one
// ffn_gate_up_exps, gates first), with ffn_*_shexp if they have a shared one; else dense (ffn_gate, ffn_up, ffn_down).
FeedForwardWeights load_feed_forward(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer);

// [rows, H] -> [rows, H].
Tensor gated_feed_forward(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation);
// x += gated_feed_forward(n).
void add_feed_forward(Ops& ops, Tensor x, Tensor n, const FeedForwardWeights& w, Activation activation);

// The output matrix.
struct OutputWeights {
  RowRange rows;  // of the vocabulary, those that this rank has
  Linear matrix;  // [rows, H]
};
// output, or the embeddings where the file has no matrix of its own.
OutputWeights load_output(const WeightLoader& weights, const Hyperparameters& hp);
// From cls (optional) and cls.output; none where the file has no cls.output. Labels as `classifier.output_labels` lists
// them, else one.
std::optional<Classifier> load_classifier(const WeightLoader& weights, const Hyperparameters& hp);

// Throws ModelError for a file that was made to accompany a model: blocks of multi-token prediction without the trunk,
// whose first block has `first_tensor`.
void require_trunk(const WeightLoader& weights, const Hyperparameters& hp, const char* first_tensor);

// "blk.7."
std::string block_prefix(int32_t layer);

}  // namespace v100
