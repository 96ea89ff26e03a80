// Parts that the blocks of several families are made of: their weights, and what is computed with them.
#pragma once

#include <optional>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

// Attention's four matrices. H hidden, Hq/Hkv heads, D and Dv head sizes of keys and values.
struct AttentionWeights {
  int32_t heads = 0, kv_heads = 0;
  Linear q, k, v;  // [Hq D, H], [Hkv D, H], [Hkv Dv, H]
  Linear output;   // [H, Hq Dv]
};

// Throws ModelError unless the heads of the layer make groups over its kv heads.
void check_heads(const AttentionWeights& w, const Hyperparameters& hp, int32_t layer);

// From attn_qkv (one matrix, rows of q, k, v in turn) or attn_q, attn_k, attn_v; and attn_output. Biases where present.
AttentionWeights load_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer);

struct QueryKeyValue {
  Tensor q, k, v;  // [rows, Hq D], [rows, Hkv D], [rows, Hkv Dv]
};
QueryKeyValue project(Ops& ops, Tensor n, const AttentionWeights& w);
// Appends k and v, attends over what the rows see (`seen`: the rows, perhaps with a shorter view), projects back to
// [rows, H].
Tensor attend(Ops& ops, const QueryKeyValue& qkv, const Rows& seen, const KvLayer& kv, float scale,
              const AttentionWeights& w);

// The expert beside a mixture that sees every token. F: its width.
struct SharedExpertWeights {
  Linear gate, up, down;  // [F, H], [F, H], [H, F]
  Linear share;           // [1, H]: its sigmoid is how much a token takes of this expert
};

// Gated feed-forward, dense or a mixture of experts. F: its width, per expert.
struct FeedForwardWeights {
  Linear gate, up, down;  // dense: [F, H], [F, H], [H, F]
  Linear router;          // mixture: [experts, H]
  ExpertLinear gates, ups, downs;
  std::optional<SharedExpertWeights> shared;
  int32_t experts_used = 0;  // 0: dense
};

// A mixture when the hyperparameters have experts (ffn_gate_inp, ffn_*_exps; gates and ups perhaps in one
// ffn_gate_up_exps, gates first), with ffn_*_shexp if they have a shared one; else dense (ffn_gate, ffn_up, ffn_down).
FeedForwardWeights load_feed_forward(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer);

// [rows, H] -> [rows, H].
Tensor gated_feed_forward(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation);

// From cls (optional) and cls.output; none where the file has no cls.output. Labels as `classifier.output_labels` lists
// them, else one.
std::optional<Classifier> load_classifier(const WeightLoader& weights, const Hyperparameters& hp);

// "blk.7."
std::string block_prefix(int32_t layer);

}  // namespace v100
