// Loading and computing of the gated delta net.
#include "model/gated_delta_net.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "model/parts.h"

namespace v100 {

namespace {

constexpr int32_t kHeadGranule = 16;  // Ops::delta_net

int32_t channels(const DeltaNet& net) { return 2 * net.key_size() + net.value_size(); }

}  // namespace

DeltaNetHyperparameters read_delta_net_hyperparameters(const Keys& keys, const Hyperparameters& hp) {
  DeltaNetHyperparameters delta;
  delta.taps = keys.required("ssm.conv_kernel", 2, 64);
  delta.head_dim = keys.required("ssm.state_size", kHeadGranule, 1024);
  if (delta.head_dim % kHeadGranule != 0)
    throw ModelError(keys.full("ssm.state_size") + " is " + std::to_string(delta.head_dim) +
                     ", expected a multiple of " + std::to_string(kHeadGranule));
  delta.key_heads = keys.required("ssm.group_count", 1, 4096);
  delta.value_heads = keys.required("ssm.time_step_rank", 1, 4096);
  if (delta.value_heads % delta.key_heads != 0)
    throw ModelError(keys.full("ssm.time_step_rank") + " is " + std::to_string(delta.value_heads) +
                     ", expected a multiple of the " + std::to_string(delta.key_heads) + " of " +
                     keys.full("ssm.group_count"));
  const int32_t inner = keys.required("ssm.inner_size", 1, 1 << 30);
  if (inner != delta.value_heads * delta.head_dim)
    throw ModelError(keys.full("ssm.inner_size") + " is " + std::to_string(inner) + ", expected " +
                     std::to_string(delta.value_heads) + " value heads of " + std::to_string(delta.head_dim));

  if (keys.has("attention.recurrent_layers")) {
    delta.is_recurrent = keys.per_layer("attention.recurrent_layers", hp.layers + hp.mtp_blocks, {}, 0, 1);
    delta.is_recurrent.resize(static_cast<size_t>(hp.layers));
  } else {
    const int32_t interval = keys.optional("full_attention_interval", 4, 1, 1 << 16);
    for (int32_t layer = 0; layer < hp.layers; ++layer) delta.is_recurrent.push_back((layer + 1) % interval != 0);
  }
  if (std::find(delta.is_recurrent.begin(), delta.is_recurrent.end(), 0) == delta.is_recurrent.end())
    throw ModelError("no layer of the " + hp.architecture + " model attends, expected at least one");
  return delta;
}

GatedDeltaNetWeights load_gated_delta_net(const WeightLoader& weights, const Hyperparameters& hp,
                                          const DeltaNetHyperparameters& delta, int32_t layer) {
  const std::string prefix = block_prefix(layer);
  const DeltaNet all{.key_heads = delta.key_heads,
                     .value_heads = delta.value_heads,
                     .head_dim = delta.head_dim,
                     .a = {},
                     .dt_bias = {}};
  // A rank has some key heads and the value heads that read them, whose columns in ssm_out must be whole blocks.
  const std::vector<std::string> tensors{prefix + "ssm_out.weight", prefix + "attn_qkv.weight",
                                         prefix + "attn_gate.weight"};
  const RowRange keys =
      weights.shard().items(SplitKind::recurrence, layer, delta.key_heads,
                            items_per_unit(delta.key_heads, delta.head_dim, weights.block_values(tensors.front())),
                            weights.bytes(tensors) / delta.key_heads, tensors);
  const std::vector<RowRange> values = value_heads_of(keys, delta.key_heads, delta.value_heads);
  const std::vector<RowRange> value_rows = scaled(values, delta.head_dim);
  std::vector<RowRange> qkv_rows;
  for (const int32_t first : {0, all.key_size()})
    qkv_rows.push_back({first + keys.begin * delta.head_dim, first + keys.end * delta.head_dim});
  for (const RowRange range : scaled(values, delta.head_dim, 2 * all.key_size())) qkv_rows.push_back(range);

  GatedDeltaNetWeights w;
  w.is_partial = weights.shard().is_partial(layer);
  w.net.key_heads = keys.size();
  w.net.value_heads = total(values);
  w.net.head_dim = delta.head_dim;
  w.net.a = weights.vector_entries(prefix + "ssm_a", delta.value_heads, values);
  w.net.dt_bias = weights.vector_entries(prefix + "ssm_dt.bias", delta.value_heads, values);
  w.qkv = weights.linear_rows(prefix + "attn_qkv", hp.hidden, channels(all), qkv_rows);
  w.gate = weights.linear_rows(prefix + "attn_gate", hp.hidden, all.value_size(), value_rows);
  w.beta = weights.linear_rows(prefix + "ssm_beta", hp.hidden, delta.value_heads, values);
  w.alpha = weights.linear_rows(prefix + "ssm_alpha", hp.hidden, delta.value_heads, values);
  w.conv = weights.convolution(prefix + "ssm_conv1d", delta.taps, channels(all), qkv_rows);
  w.norm = weights.vector(prefix + "ssm_norm.weight", delta.head_dim);
  w.output = weights.linear_columns(prefix + "ssm_out", all.value_size(), value_rows, hp.hidden);
  return w;
}

std::vector<StateShape> delta_net_state_shapes(const GatedDeltaNetWeights& w) {
  return {{int64_t{w.conv.history()} * w.conv.channels}, {int64_t{w.net.value_size()} * w.net.head_dim}};
}

Tensor gated_delta_net(Ops& ops, Tensor n, const Rows& rows, const DeltaNetState& state, float eps,
                       GateFunction output_gate, const GatedDeltaNetWeights& w) {
  const std::array<const Linear*, 4> weights{&w.qkv, &w.gate, &w.beta, &w.alpha};
  std::array<Tensor, 4> projected;
  ops.multi_linear(n, weights, projected);
  const auto [u, z, beta, alpha] = projected;  // [rows, 2 K + V], [rows, V], [rows, value heads] twice
  if (state.kept_rows > 0) state.kept->keep(ops, {u, beta, alpha}, state.kept_rows);

  const Tensor qkv = ops.causal_conv_silu(u, w.conv, rows, state.history);
  const Tensor o = ops.delta_net(qkv, beta, alpha, w.net, eps, rows, state.memory);  // [rows, V]
  const Tensor g = ops.norm_gate(o, z, w.norm, eps, output_gate);
  const Tensor a = ops.linear(g, w.output);  // [rows, H]
  if (w.is_partial) ops.all_reduce(a);
  return a;
}

DeltaNetState delta_net_state(const ForwardState& state, size_t first) {
  return {state.states[first], state.states[first + 1], state.kept.empty() ? nullptr : &state.kept[first],
          state.kept_rows};
}

void replay_gated_delta_net(Ops& ops, const Rows& rows, const DeltaNetState& state, float eps,
                            const GatedDeltaNetWeights& w) {
  const KeptInputs& kept = *state.kept;
  const Tensor qkv = ops.causal_conv_silu(kept[0], w.conv, rows, state.history);
  ops.delta_net(qkv, kept[1], kept[2], w.net, eps, rows, state.memory);
}

}  // namespace v100
