// Loading and computing of the parts that families share.
#include "model/parts.h"

#include <array>

#include "base/error.h"

namespace v100 {

std::string block_prefix(int32_t layer) { return "blk." + std::to_string(layer) + "."; }

void check_heads(const AttentionWeights& w, const Hyperparameters& hp, int32_t layer) {
  if (w.heads < 1 || w.kv_heads < 1 || w.heads % w.kv_heads != 0)
    throw ModelError(block_prefix(layer) + "*: " + std::to_string(w.heads) + " heads over " +
                     std::to_string(w.kv_heads) + " kv heads do not make an attention layer of " + hp.architecture);
}

AttentionWeights load_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer) {
  const std::string prefix = block_prefix(layer);
  AttentionWeights w;
  w.heads = hp.heads[static_cast<size_t>(layer)];
  w.kv_heads = hp.kv_heads[static_cast<size_t>(layer)];
  check_heads(w, hp, layer);
  const int32_t q_size = w.heads * hp.head_dim_k, k_size = w.kv_heads * hp.head_dim_k,
                v_size = w.kv_heads * hp.head_dim_v;
  if (weights.has(prefix + "attn_qkv.weight")) {
    const int32_t all = q_size + k_size + v_size;
    const auto part = [&](const char* name, int32_t first, int32_t size) {
      return weights.linear_rows(prefix + "attn_qkv", hp.hidden, all, std::array{RowRange{first, first + size}},
                                 prefix + name);
    };
    w.q = part("attn_q", 0, q_size);
    w.k = part("attn_k", q_size, k_size);
    w.v = part("attn_v", q_size + k_size, v_size);
  } else {
    w.q = weights.linear(prefix + "attn_q", hp.hidden, q_size);
    w.k = weights.linear(prefix + "attn_k", hp.hidden, k_size);
    w.v = weights.linear(prefix + "attn_v", hp.hidden, v_size);
  }
  w.output = weights.linear(prefix + "attn_output", w.heads * hp.head_dim_v, hp.hidden);
  return w;
}

QueryKeyValue project(Ops& ops, Tensor n, const AttentionWeights& w) {
  const std::array<const Linear*, 3> weights{&w.q, &w.k, &w.v};
  std::array<Tensor, 3> outputs;
  ops.multi_linear(n, weights, outputs);
  return {outputs[0], outputs[1], outputs[2]};
}

Tensor attend(Ops& ops, const QueryKeyValue& qkv, const Rows& seen, const KvLayer& kv, float scale,
              const AttentionWeights& w) {
  ops.kv_append(qkv.k, qkv.v, seen, kv);
  const Tensor heads = ops.attention(qkv.q, seen, kv, w.heads, scale);  // [rows, Hq Dv]
  const Tensor a = ops.linear(heads, w.output);                         // [rows, H], partial
  ops.all_reduce(a);
  return a;
}

std::optional<Classifier> load_classifier(const WeightLoader& weights, const Hyperparameters& hp) {
  if (!weights.has("cls.output.weight")) return std::nullopt;
  Classifier classifier;
  if (weights.has("cls.weight")) classifier.dense = weights.linear("cls", hp.hidden, hp.hidden);
  classifier.output = weights.linear("cls.output", hp.hidden, hp.labels);
  // The scores of Qwen's rerankers are the logits of "yes" and "no".
  classifier.gives_probabilities = hp.architecture == "qwen3";
  return classifier;
}

Tensor Classifier::scores(Ops& ops, Tensor hidden) const {
  if (dense.weight) {
    hidden = ops.linear(hidden, dense);
    ops.soft_cap(hidden, 1.0f);  // tanh
  }
  return ops.linear(hidden, output);
}

FeedForwardWeights load_feed_forward(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer) {
  const std::string prefix = block_prefix(layer);
  const int32_t expert_size = hp.expert_ffn[static_cast<size_t>(layer)];
  const int32_t size = hp.experts > 0 && expert_size > 0 ? expert_size : hp.ffn[static_cast<size_t>(layer)];
  if (size < 1)
    throw ModelError(prefix + "*: a feed-forward of 0 features does not make a block of " + hp.architecture);
  FeedForwardWeights w;
  if (hp.experts == 0) {
    w.gate = weights.linear(prefix + "ffn_gate", hp.hidden, size);
    w.up = weights.linear(prefix + "ffn_up", hp.hidden, size);
    w.down = weights.linear(prefix + "ffn_down", size, hp.hidden);
    return w;
  }
  w.experts_used = hp.experts_used;
  w.router = weights.linear(prefix + "ffn_gate_inp", hp.hidden, hp.experts);
  if (const std::string fused = prefix + "ffn_gate_up_exps"; weights.has(fused + ".weight")) {
    const auto part = [&](int32_t first) {
      return weights.expert_linear_rows(fused, hp.hidden, 2 * size, std::array{RowRange{first, first + size}},
                                        hp.experts);
    };
    w.gates = part(0);
    w.ups = part(size);
  } else {
    w.gates = weights.expert_linear(prefix + "ffn_gate_exps", hp.hidden, size, hp.experts);
    w.ups = weights.expert_linear(prefix + "ffn_up_exps", hp.hidden, size, hp.experts);
  }
  w.downs = weights.expert_linear(prefix + "ffn_down_exps", size, hp.hidden, hp.experts);
  if (hp.shared_expert_ffn > 0)
    w.shared = {weights.linear(prefix + "ffn_gate_shexp", hp.hidden, hp.shared_expert_ffn),
                weights.linear(prefix + "ffn_up_shexp", hp.hidden, hp.shared_expert_ffn),
                weights.linear(prefix + "ffn_down_shexp", hp.shared_expert_ffn, hp.hidden),
                weights.linear(prefix + "ffn_gate_inp_shexp", hp.hidden, 1)};
  return w;
}

Tensor gated_feed_forward(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation) {
  Tensor d;  // [rows, H], partial
  if (w.experts_used == 0) {
    d = ops.linear(ops.gated_linear(n, w.gate, w.up, activation), w.down);
  } else {
    const Routing routing = ops.route(ops.linear(n, w.router), w.experts_used);
    const Tensor f = ops.gated_expert_linear(n, routing, w.gates, w.ups, activation);  // [slots, F]
    d = ops.mix_experts(ops.expert_linear(f, routing, w.downs), routing);
    if (w.shared) {
      const Tensor s = ops.linear(ops.gated_linear(n, w.shared->gate, w.shared->up, activation), w.shared->down);
      ops.apply_gate(s, ops.linear(n, w.shared->share));
      ops.add(d, s);
    }
  }
  ops.all_reduce(d);
  return d;
}

}  // namespace v100
