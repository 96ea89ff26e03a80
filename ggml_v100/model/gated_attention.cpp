// Loading and computing of gated attention.
#include "model/gated_attention.h"

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"

namespace v100 {

GatedAttentionWeights load_gated_attention(const WeightLoader& weights, const Hyperparameters& hp, int32_t layer) {
  const std::string prefix = block_prefix(layer);
  if (hp.head_dim_k != hp.head_dim_v)
    throw ModelError(hp.architecture + ".attention.value_length is " + std::to_string(hp.head_dim_v) +
                     "; gates of attention need the " + std::to_string(hp.head_dim_k) + " of key_length");
  const std::string q = prefix + "attn_q", k = prefix + "attn_k", v = prefix + "attn_v";
  AttentionShare share =
      share_attention(weights, hp, layer, {q + ".weight", k + ".weight", v + ".weight", prefix + "attn_output.weight"});
  GatedAttentionWeights w;
  w.attn = std::move(share.weights);
  const int32_t d = hp.head_dim_k;
  std::vector<RowRange> query_rows, gate_rows;
  for (int32_t first = share.q.begin; first < share.q.end; first += d) {
    query_rows.push_back({2 * first, 2 * first + d});
    gate_rows.push_back({2 * first + d, 2 * first + 2 * d});
  }
  w.attn.q = weights.linear_rows(q, hp.hidden, 2 * share.all_q, query_rows);
  w.gate = weights.linear_rows(q, hp.hidden, 2 * share.all_q, gate_rows);
  w.attn.k = weights.linear_rows(k, hp.hidden, share.all_k, std::array{share.k});
  w.attn.v = weights.linear_rows(v, hp.hidden, share.all_v, std::array{share.v});
  w.attn.output = weights.linear_columns(prefix + "attn_output", share.all_output, std::array{share.output}, hp.hidden);
  w.q_norm = weights.vector(prefix + "attn_q_norm.weight", d);
  w.k_norm = weights.vector(prefix + "attn_k_norm.weight", d);
  return w;
}

GatedQueries project_gated(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                           const GatedAttentionWeights& w) {
  const std::array<const Linear*, 4> weights{&w.attn.q, &w.attn.k, &w.attn.v, &w.gate};
  std::array<Tensor, 4> projected;
  ops.multi_linear(n, weights, projected);
  const auto [q, k, v, gate] = projected;
  const Rotation rotation{rope, RopeLayout::halves, &w.q_norm, &w.k_norm, eps};
  ops.rotate_and_append(q, k, v, w.attn.heads, rotation, rows, kv);
  return {q, gate};
}

void append_gated(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                  const GatedAttentionWeights& w) {
  const std::array<const Linear*, 2> weights{&w.attn.k, &w.attn.v};
  std::array<Tensor, 2> projected;
  ops.multi_linear(n, weights, projected);
  const auto [k, v] = projected;
  const Rotation rotation{rope, RopeLayout::halves, nullptr, &w.k_norm, eps};
  ops.rotate_and_append({nullptr, k.rows, 0}, k, v, 0, rotation, rows, kv);
}

Tensor gated_attention(Ops& ops, Tensor n, const Rows& rows, const KvLayer& kv, const RopeTable& rope, float eps,
                       const GatedAttentionWeights& w) {
  const auto [q, gate] = project_gated(ops, n, rows, kv, rope, eps, w);
  const float scale = 1.0f / std::sqrt(static_cast<float>(w.q_norm.size));
  const Tensor o = ops.gated_attention(q, gate, rows, kv, w.attn.heads, scale);  // [rows, Hq D]
  const Tensor a = ops.linear(o, w.attn.output);                                 // [rows, H]
  if (w.attn.is_partial) ops.all_reduce(a);
  return a;
}

}  // namespace v100
