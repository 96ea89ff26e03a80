// The frame of decoder models.
#include "model/decoder.h"

#include <algorithm>

#include "model/parts.h"

namespace v100 {

bool LayerInputs::wants(int32_t layer) const { return std::find(layers.begin(), layers.end(), layer) != layers.end(); }

void LayerInputs::take(Ops& ops, int32_t layer, Tensor x) const {
  if (values.rows == 0) return;
  for (size_t i = 0; i < layers.size(); ++i)
    if (layers[i] == layer) ops.place(x, values, static_cast<int32_t>(i) * x.features);
}

namespace {

// x += the direction of the layer, if there is one.
void steer(Ops& ops, int32_t layer, const ForwardState& state, Tensor x) {
  if (state.directions.empty()) return;
  const VectorWeight& direction = state.directions[static_cast<size_t>(layer)];
  if (direction) ops.add_vector(x, direction);
}

// Whether the outputs are the rows as they are, so that nothing has to be gathered.
bool are_all_rows(std::span<const int32_t> outputs, const Rows& rows) {
  if (outputs.size() != rows.tokens.size()) return false;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i] != static_cast<int32_t>(i)) return false;
  return true;
}

}  // namespace

Decoder::Decoder(Hyperparameters hyperparameters, const WeightLoader& weights)
    : hp_(std::move(hyperparameters)),
      token_embd_(weights.embedding("token_embd", hp_.hidden, hp_.vocab)),
      output_norm_(weights.vector("output_norm.weight", hp_.hidden)),
      stages_(weights, hp_.layers),
      output_(load_output(weights, hp_)),
      classifier_(load_classifier(weights, hp_)) {}

std::vector<RopeAngles> Decoder::ropes(const RopeSettings& settings, int32_t) const {
  return {rope_angles(hp_.rope, settings, {})};
}

Tensor Decoder::forward(Ops& ops, const Rows& rows, const ForwardState& state, std::span<const int32_t> outputs) const {
  Tensor x = ops.embed(rows.tokens, token_embd_);  // [rows, hidden], the residual stream
  if (embedding_scale_ != 1.0f) ops.scale(x, embedding_scale_);
  const int32_t last = hp_.layers - 1;
  const auto tap = [&](int32_t layer) {
    if (state.taps == nullptr || !state.taps->wants(layer)) return;
    stages_.show(ops, layer, x, state.taps->rank);
    state.taps->take(ops, layer, x);
  };
  for (int32_t layer = 0; layer < last; ++layer) {
    const Ops::Scope scope(ops);
    tap(layer);
    if (stages_.has(layer)) {
      feed_forward(ops, layer, x, attention(ops, layer, rows, state, x));
      steer(ops, layer, state, x);
      ops.tap("block_out", layer, x);
    }
    stages_.hand_over(ops, layer, x);
  }
  tap(last);
  // Past the last layer's keys and values only the rows whose logits are wanted matter.
  const Tensor a = stages_.has(last) ? attention(ops, last, rows, state, x) : Tensor{};
  const bool taps_output = state.taps != nullptr && state.taps->wants(hp_.layers);
  if (follows_hidden() || taps_output) {  // every row matters
    if (stages_.has(last)) {
      feed_forward(ops, last, x, a);
      steer(ops, last, state, x);
    }
    stages_.hand_over(ops, last, x);
    const Tensor hidden = ops.rms_norm(x, output_norm_, hp_.rms_epsilon);
    if (taps_output) state.taps->take(ops, hp_.layers, hidden);
    if (follows_hidden()) follow_hidden(ops, rows, state, hidden);
    if (outputs.empty()) return {};
    ops.narrow(outputs);
    return ops.gather_rows(hidden, outputs);
  }
  if (outputs.empty()) return {};
  const auto of_outputs = [&](Tensor all) { return are_all_rows(outputs, rows) ? all : ops.gather_rows(all, outputs); };
  x = of_outputs(x);  // [outputs, hidden]
  ops.narrow(outputs);
  if (stages_.has(last)) {
    feed_forward(ops, last, x, of_outputs(a));
    steer(ops, last, state, x);
    ops.tap("block_out", last, x);
  }
  stages_.hand_over(ops, last, x);
  return ops.rms_norm(x, output_norm_, hp_.rms_epsilon);
}

Tensor Decoder::head(Ops& ops, Tensor hidden) const {
  const Tensor logits = ops.linear(hidden, output_.matrix);  // [rows, vocabulary]
  if (logit_cap_ > 0.0f) ops.soft_cap(logits, logit_cap_);
  return logits;
}

}  // namespace v100
