// Loading of EAGLE-3 drafters and their forward passes.
#include "model/eagle3.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "base/error.h"
#include "model/keys.h"
#include "model/parts.h"

namespace v100 {

namespace {

constexpr size_t kTaps = 3;

}  // namespace

Eagle3::Eagle3(const Metadata& metadata, const WeightLoader& weights) : HiddenDrafter(metadata, weights) {
  const Keys keys(metadata);
  if (hp_.layers != 1) throw ModelError("eagle3.block_count is " + std::to_string(hp_.layers) + ", expected one layer");
  if (target_layers_.size() != kTaps)
    throw ModelError("eagle3.target_layers has " + std::to_string(target_layers_.size()) + " layers, expected three");
  const int32_t hidden = hp_.hidden, d = hp_.head_dim_k, heads = hp_.heads[0], kv_heads = hp_.kv_heads[0];
  if (hp_.head_dim_v != d)
    throw ModelError("eagle3: keys of " + std::to_string(d) + " and values of " + std::to_string(hp_.head_dim_v) +
                     " features, expected the same size");
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    throw ModelError("eagle3: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                     " kv heads do not make an attention layer");
  if (d > hidden) throw ModelError("eagle3: heads are wider than the " + std::to_string(hidden) + " features");
  target_hidden_ = keys.required("target_hidden_size", 1, 1 << 20);
  streams_normed_ = metadata.find_bool(keys.full("norm_before_residual")).value_or(false);

  // Two halves, each whole heads.
  state_shape_ = {.kv_heads = (hidden + 2 * d - 1) / (2 * d), .head_dim_k = d, .head_dim_v = d, .holds_states = true};
  const int32_t inputs = static_cast<int32_t>(kTaps) * target_hidden_;
  if (metadata.find_bool(keys.full("norm_before_fc")).value_or(false))
    fuse_norm_ = weights.vector("enc.output_norm.weight", inputs);
  fuse_first_ = weights.linear_rows("fc", inputs, hidden, std::array{RowRange{0, half()}});
  fuse_last_ = weights.linear_rows("fc", inputs, hidden, std::array{RowRange{hidden - half(), hidden}});

  const std::string prefix = block_prefix(0);
  token_norm_ = weights.vector(prefix + "attn_norm.weight", hidden);
  state_norm_ = weights.vector(prefix + "attn_norm_2.weight", hidden);
  q_ = weights.linear(prefix + "attn_q", 2 * hidden, heads * d);
  k_ = weights.linear(prefix + "attn_k", 2 * hidden, kv_heads * d);
  v_ = weights.linear(prefix + "attn_v", 2 * hidden, kv_heads * d);
  output_ = weights.linear(prefix + "attn_output", heads * d, hidden);
  ffn_norm_ = weights.vector(prefix + "ffn_norm.weight", hidden);
  gate_ = weights.linear(prefix + "ffn_gate", hidden, hp_.ffn[0]);
  up_ = weights.linear(prefix + "ffn_up", hidden, hp_.ffn[0]);
  down_ = weights.linear(prefix + "ffn_down", hp_.ffn[0], hidden);
  output_norm_ = weights.vector("output_norm.weight", hidden);
  rope_divisors_ = weights.optional_values("rope_freqs.weight", hp_.rope.dimension / 2);
}

void Eagle3::require_fit(const TextModel& target) const {
  const Hyperparameters& theirs = target.hyperparameters();
  if (target_hidden_ != theirs.hidden) differ("target's width", target_hidden_, theirs.hidden);
  if (hp_.hidden != theirs.hidden && !(has_embeddings() && has_head())) differ("width", hp_.hidden, theirs.hidden);
  require_vocabulary_and_layers(target, theirs.layers + 1);
}

std::vector<KvShape> Eagle3::kv_shapes() const {
  return {{.kv_heads = hp_.kv_heads[0], .head_dim_k = hp_.head_dim_k, .head_dim_v = hp_.head_dim_v}, state_shape_};
}

RopeAngles Eagle3::rope() const { return rope_angles(hp_.rope, {}, rope_divisors_); }

// All are read back from the pages, those of these rows too: what a row sees is rounded alike however a text is cut.
Tensor Eagle3::states_before(Ops& ops, const Rows& rows, const KvLayer& kept) const {
  const Tensor states = ops.create(rows.count(), hp_.hidden);
  for (const SequenceRows& sequence : rows.sequences) {
    const Ops::Scope scope(ops);
    const int32_t index = rows.kv_index[static_cast<size_t>(sequence.rows.begin)], n = sequence.rows.size();
    const int32_t first = std::max(index - 1, 0), alone = index == 0 ? 1 : 0;
    const KeysValues halves = ops.kv_read({first, std::max(index + n - 1, first + 1)}, sequence.pages, kept);
    const auto put = [&](int32_t row, int32_t count) {
      const Tensor to{states.row(row), count, states.features};
      ops.place({halves.k.data, count, half()}, to, 0);
      ops.place({halves.v.data, count, half()}, to, states.features - half());
    };
    if (alone > 0) put(sequence.rows.begin, 1);
    if (n > alone) put(sequence.rows.begin + alone, n - alone);
  }
  return states;
}

Eagle3::Joined Eagle3::join(Ops& ops, const TextModel& target, const Rows& rows, Tensor before) const {
  const Tensor tokens = ops.rms_norm(embed(ops, target, rows.tokens), token_norm_, hp_.rms_epsilon);
  const Tensor normed = ops.rms_norm(before, state_norm_, hp_.rms_epsilon);
  const Tensor input = ops.concatenate(tokens, normed);
  return {streams_normed_ ? normed : before, input};
}

void Eagle3::take_in(Ops& ops, Tensor taps, const TextModel& target, const Rows& rows, std::span<const KvLayer> kv,
                     const RopeTable& rope) const {
  if (fuse_norm_) taps = ops.rms_norm(taps, fuse_norm_, hp_.rms_epsilon);
  const std::array<const Linear*, 2> fuse{&fuse_first_, &fuse_last_};
  std::array<Tensor, 2> halves;
  ops.multi_linear(taps, fuse, halves);
  ops.kv_append(halves[0], halves[1], rows, kv[1]);
  const Tensor input = join(ops, target, rows, states_before(ops, rows, kv[1])).input;
  const std::array<const Linear*, 2> weights{&k_, &v_};
  std::array<Tensor, 2> made;
  ops.multi_linear(input, weights, made);
  ops.rotate_and_append({nullptr, input.rows, 0}, made[0], made[1], 0, rotation(rope), rows, kv[0]);
}

Tensor Eagle3::predict(Ops& ops, const TextModel& target, const Rows& rows, Tensor before, std::span<const KvLayer> kv,
                       const RopeTable& rope) const {
  if (before.rows == 0) before = states_before(ops, rows, kv[1]);
  const auto [x, input] = join(ops, target, rows, before);
  const std::array<const Linear*, 3> weights{&q_, &k_, &v_};
  std::array<Tensor, 3> made;
  ops.multi_linear(input, weights, made);
  const int32_t heads = hp_.heads[0];
  ops.rotate_and_append(made[0], made[1], made[2], heads, rotation(rope), rows, kv[0]);
  const float scale = 1.0f / std::sqrt(static_cast<float>(hp_.head_dim_k));
  const Tensor a = ops.linear(ops.attention(made[0], rows, kv[0], heads, scale), output_);
  const Tensor n = ops.add_rms_norm(x, a, ffn_norm_, hp_.rms_epsilon);
  ops.add_linear(x, ops.gated_linear(n, gate_, up_, Activation::silu), down_);
  return x;
}

}  // namespace v100
