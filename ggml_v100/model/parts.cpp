// Loading and computing of the parts that families share.
#include "model/parts.h"

#include <array>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace v100 {

void require_trunk(const WeightLoader& weights, const Hyperparameters& hp, const char* first_tensor) {
  const std::string trunk = block_prefix(0) + first_tensor;
  if (hp.mtp_blocks > 0 && !weights.has(trunk) && weights.has(block_prefix(hp.layers) + "nextn.eh_proj.weight"))
    throw ModelError("the file holds only the multi-token prediction of a " + hp.architecture + " model (no " + trunk +
                     "); it cannot run without the file of the model itself");
}

std::string block_prefix(int32_t layer) { return "blk." + std::to_string(layer) + "."; }

AttentionShare share_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer,
                               const std::vector<std::string>& tensors) {
  const int32_t heads = hp.heads[static_cast<size_t>(layer)], kv_heads = hp.kv_heads[static_cast<size_t>(layer)];
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    throw ModelError(block_prefix(layer) + "*: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                     " kv heads do not make an attention layer of " + hp.architecture);
  const HeadShare mine =
      weights.shard().heads(layer, heads, kv_heads, hp.head_dim_v, weights.block_values(tensors.back()),
                            weights.bytes(tensors) / kv_heads, tensors);
  const int32_t d = hp.head_dim_k, dv = hp.head_dim_v;
  const auto part = [](RowRange items, int32_t width) { return RowRange{items.begin * width, items.end * width}; };
  AttentionShare share{{},
                       part(mine.heads, d),
                       part(mine.kv_heads, d),
                       part(mine.kv_heads, dv),
                       part(mine.heads, dv),
                       heads * d,
                       kv_heads * d,
                       kv_heads * dv,
                       heads * dv};
  share.weights.is_partial = weights.shard().is_partial(layer);
  share.weights.heads = mine.heads.size();
  share.weights.kv_heads = mine.kv_heads.size();
  share.weights.kv = {
      .kv_heads = mine.kv_heads.size(), .head_dim_k = d, .head_dim_v = dv, .group = mine.group, .skew = mine.skew()};
  return share;
}

AttentionWeights load_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer) {
  const std::string prefix = block_prefix(layer), fused = prefix + "attn_qkv";
  const bool is_fused = weights.has(fused + ".weight");
  std::vector<std::string> tensors{prefix + "attn_output.weight"};
  if (is_fused)
    tensors.insert(tensors.begin(), fused + ".weight");
  else
    tensors.insert(tensors.begin(), {prefix + "attn_q.weight", prefix + "attn_k.weight", prefix + "attn_v.weight"});
  AttentionShare share = share_attention(weights, hp, layer, tensors);
  AttentionWeights w = std::move(share.weights);
  const auto part = [&](const char* name, RowRange rows, int32_t all, int32_t first_in_fused) {
    if (!is_fused) return weights.linear_rows(prefix + name, hp.hidden, all, std::array{rows});
    Linear linear = weights.linear_rows(fused, hp.hidden, share.all_q + share.all_k + share.all_v,
                                        std::array{RowRange{first_in_fused + rows.begin, first_in_fused + rows.end}});
    if (!linear.bias) linear.bias = weights.optional_vector_entries(prefix + name + ".bias", all, std::array{rows});
    return linear;
  };
  w.q = part("attn_q", share.q, share.all_q, 0);
  w.k = part("attn_k", share.k, share.all_k, share.all_q);
  w.v = part("attn_v", share.v, share.all_v, share.all_q + share.all_k);
  w.output = weights.linear_columns(prefix + "attn_output", share.all_output, std::array{share.output}, hp.hidden);
  return w;
}

QueryKeyValue project(Ops& ops, Tensor n, const AttentionWeights& w) {
  const std::array<const Linear*, 3> weights{&w.q, &w.k, &w.v};
  std::array<Tensor, 3> outputs;
  ops.multi_linear(n, weights, outputs);
  return {outputs[0], outputs[1], outputs[2]};
}

Tensor attend(Ops& ops, const QueryKeyValue& qkv, const Rotation& rotation, const Rows& seen, const KvLayer& kv,
              float scale, const AttentionWeights& w) {
  ops.rotate_and_append(qkv.q, qkv.k, qkv.v, w.heads, rotation, seen, kv);
  const Tensor heads = ops.attention(qkv.q, seen, kv, w.heads, scale);  // [rows, Hq Dv]
  const Tensor a = ops.linear(heads, w.output);                         // [rows, H]
  if (w.is_partial) ops.all_reduce(a);
  return a;
}

namespace {

struct GatedLinears {
  Linear gate, up, down;
};

// This rank's features of a gated feed-forward of `size`: rows of gate and up, columns of down.
GatedLinears load_gated_linears(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer, int32_t size,
                                const std::string& gate, const std::string& up, const std::string& down) {
  constexpr int32_t kFeatures = 32;  // cut in units of a block of activations, and of whole blocks of the type
  const std::string prefix = block_prefix(layer);
  const std::vector<std::string> tensors{prefix + down + ".weight", prefix + gate + ".weight", prefix + up + ".weight"};
  const std::array mine{weights.shard().items(SplitKind::feed_forward, layer, size,
                                              std::lcm(kFeatures, weights.block_values(tensors.front())),
                                              weights.bytes(tensors) / size, tensors)};
  return {weights.linear_rows(prefix + gate, hp.hidden, size, mine),
          weights.linear_rows(prefix + up, hp.hidden, size, mine),
          weights.linear_columns(prefix + down, size, mine, hp.hidden)};
}

}  // namespace
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
  w.is_partial = weights.shard().is_partial(layer);
  if (hp.experts == 0) {
    const GatedLinears dense = load_gated_linears(weights, hp, layer, size, "ffn_gate", "ffn_up", "ffn_down");
    w.gate = dense.gate, w.up = dense.up, w.down = dense.down;
    return w;
  }
  w.experts_used = hp.experts_used;
  const std::string gate = prefix + "ffn_gate_exps", up = prefix + "ffn_up_exps", down = prefix + "ffn_down_exps",
                    fused = prefix + "ffn_gate_up_exps";
  const bool is_fused = weights.has(fused + ".weight");
  std::vector<std::string> tensors{down + ".weight"};
  if (is_fused)
    tensors.push_back(fused + ".weight");
  else
    tensors.insert(tensors.end(), {gate + ".weight", up + ".weight"});
  const RowRange mine =
      weights.shard().items(SplitKind::experts, layer, hp.experts, 1, weights.bytes(tensors) / hp.experts, tensors);
  w.has_experts = mine.size() > 0;
  w.router = weights.linear_rows(prefix + "ffn_gate_inp", hp.hidden, hp.experts,
                                 std::array{RowRange{0, w.has_experts ? hp.experts : 0}});
  if (is_fused) {
    const auto part = [&](int32_t first) {
      return weights.expert_linear_rows(fused, hp.hidden, 2 * size, std::array{RowRange{first, first + size}},
                                        hp.experts, mine);
    };
    w.gates = part(0);
    w.ups = part(size);
  } else {
    w.gates = weights.expert_linear(gate, hp.hidden, size, hp.experts, mine);
    w.ups = weights.expert_linear(up, hp.hidden, size, hp.experts, mine);
  }
  w.downs = weights.expert_linear(down, size, hp.hidden, hp.experts, mine);
  w.nothing.out_features = hp.hidden;
  if (hp.shared_expert_ffn > 0) {
    const GatedLinears shared = load_gated_linears(weights, hp, layer, hp.shared_expert_ffn, "ffn_gate_shexp",
                                                   "ffn_up_shexp", "ffn_down_shexp");
    w.shared = {shared.gate, shared.up, shared.down, weights.linear(prefix + "ffn_gate_inp_shexp", hp.hidden, 1)};
  }
  return w;
}

OutputWeights load_output(const WeightLoader& weights, const Hyperparameters& hp) {
  const std::string name = weights.has("output.weight") ? "output" : "token_embd";
  const RowRange rows = weights.shard().vocabulary(hp.vocab, name + ".weight");
  return {rows, weights.linear_rows(name, hp.hidden, hp.vocab, std::array{rows})};
}

namespace {

// This rank's experts of a mixture. Which of them a token goes to is nobody else's affair.
Tensor routed_experts(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation) {
  const Routing routing = ops.route(ops.linear(n, w.router), w.experts_used);
  const Tensor f = ops.gated_expert_linear(n, routing, w.gates, w.ups, activation);  // [slots, F]
  return ops.mix_experts(ops.expert_linear(f, routing, w.downs), routing);
}

Tensor mixture(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation) {
  Tensor d;  // [rows, H]
  if (w.has_experts) d = routed_experts(ops, n, w, activation);
  if (w.shared) {
    const Tensor s = ops.linear(ops.gated_linear(n, w.shared->gate, w.shared->up, activation), w.shared->down);
    ops.apply_gate(s, ops.linear(n, w.shared->share));
    if (!w.has_experts) return s;
    ops.add(d, s);
  } else if (!w.has_experts) {
    d = ops.linear(n, w.nothing);
  }
  return d;
}

}  // namespace

Tensor gated_feed_forward(Ops& ops, Tensor n, const FeedForwardWeights& w, Activation activation) {
  const Tensor d = w.experts_used == 0 ? ops.linear(ops.gated_linear(n, w.gate, w.up, activation), w.down)
                                       : mixture(ops, n, w, activation);
  if (w.is_partial) ops.all_reduce(d);
  return d;
}

void add_feed_forward(Ops& ops, Tensor x, Tensor n, const FeedForwardWeights& w, Activation activation) {
  if (w.experts_used == 0 && !w.is_partial)
    ops.add_linear(x, ops.gated_linear(n, w.gate, w.up, activation), w.down);
  else
    ops.add(x, gated_feed_forward(ops, n, w, activation));
}

}  // namespace v100
