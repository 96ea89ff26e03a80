// The frame of decoder models.
#include "model/decoder.h"

#include <algorithm>
#include <array>

namespace v100 {

namespace {

// The embeddings where the file has no matrix of its own.
std::string output_name(const WeightLoader& weights) { return weights.has("output.weight") ? "output" : "token_embd"; }

}  // namespace

Decoder::Decoder(Hyperparameters hyperparameters, const WeightLoader& weights)
    : hp_(std::move(hyperparameters)),
      token_embd_(weights.embedding("token_embd", hp_.hidden, hp_.vocab)),
      output_norm_(weights.vector("output_norm.weight", hp_.hidden)),
      rank_(weights.shard().rank()),
      stages_(weights.shard().stages(hp_.layers)),
      vocabulary_(weights.shard().vocabulary(hp_.vocab, output_name(weights) + ".weight")),
      output_(weights.linear_rows(output_name(weights), hp_.hidden, hp_.vocab, std::array{vocabulary_})) {}

std::vector<RopeAngles> Decoder::ropes(const RopeSettings& settings, int32_t) const {
  return {rope_angles(hp_.rope, settings, {})};
}

Tensor Decoder::forward(Ops& ops, const Rows& rows, const ForwardState& state, std::span<const int32_t> outputs) const {
  Tensor x = ops.embed(rows.tokens, token_embd_);  // [rows, hidden], the residual stream
  if (embedding_scale_ != 1.0f) ops.scale(x, embedding_scale_);
  const int32_t last = hp_.layers - 1;
  for (const Shard::Stage& stage : stages_) {
    for (int32_t layer = stage.layers.begin; layer < std::min(stage.layers.end, last) && is_mine(stage); ++layer) {
      const Ops::Scope scope(ops);
      feed_forward(ops, layer, x, attention(ops, layer, rows, state, x));
      ops.tap("block_out", layer, x);
    }
    if (stage.layers.end <= last) hand_over(ops, x, stage);
  }
  // Past the last layer's keys and values only the rows whose logits are wanted matter.
  const Tensor a = is_mine(stages_.back()) ? attention(ops, last, rows, state, x) : Tensor{};
  if (outputs.empty()) return {};
  x = ops.gather_rows(x, outputs);  // [outputs, hidden]
  if (is_mine(stages_.back())) {
    feed_forward(ops, last, x, ops.gather_rows(a, outputs));
    ops.tap("block_out", last, x);
  }
  hand_over(ops, x, stages_.back());
  return ops.rms_norm(x, output_norm_, hp_.rms_epsilon);
}

Tensor Decoder::head(Ops& ops, Tensor hidden) const {
  const Tensor logits = ops.linear(hidden, output_);  // [rows, vocabulary]
  if (logit_cap_ > 0.0f) ops.soft_cap(logits, logit_cap_);
  return logits;
}

}  // namespace v100
