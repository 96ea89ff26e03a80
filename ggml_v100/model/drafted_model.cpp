// A target and its drafter side by side.
#include "model/drafted_model.h"

#include <utility>

#include "base/error.h"

namespace v100 {

DraftedModel::DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const DFlash> drafter, int32_t home,
                           bool is_here)
    : DraftedModel(std::move(target), std::shared_ptr<const HiddenDrafter>(drafter), home, is_here) {
  blocks_ = drafter.get();
}

DraftedModel::DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const Eagle3> drafter, int32_t home,
                           bool is_here)
    : DraftedModel(std::move(target), std::shared_ptr<const HiddenDrafter>(drafter), home, is_here) {
  tokens_ = drafter.get();
}

DraftedModel::DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const HiddenDrafter> drafter,
                           int32_t home, bool is_here)
    : target_(std::move(target)),
      drafter_(std::move(drafter)),
      home_(home),
      is_here_(is_here),
      target_layers_(target_->kv_shapes().size()) {
  if (!target_->has_taps())
    throw ModelError("there are no drafters for models of architecture " + target_->hyperparameters().architecture +
                     " yet");
  drafter_->require_fit(*target_);
  // The engine knows one window. Pages of a drafter with another are kept whole.
  const int32_t theirs_window = target_->sliding_window();
  is_windowed_ = drafter_->window() > 0 && (theirs_window == 0 || theirs_window == drafter_->window());
  window_ = is_windowed_ ? drafter_->window() : theirs_window;
}

std::vector<KvShape> DraftedModel::kv_shapes() const {
  std::vector<KvShape> shapes = target_->kv_shapes();
  if (!is_here_) return shapes;
  for (KvShape shape : drafter_->kv_shapes()) {
    shape.is_windowed = is_windowed_;
    shapes.push_back(shape);
  }
  return shapes;
}

std::vector<RopeAngles> DraftedModel::ropes(const RopeSettings& settings, int32_t n_ctx) const {
  std::vector<RopeAngles> ropes = target_->ropes(settings, n_ctx);
  ropes.push_back(drafter_->rope());
  return ropes;
}

std::vector<KeyRotation> DraftedModel::key_rotations() const {
  std::vector<KeyRotation> rotations = target_->key_rotations();
  if (rotations.empty() || !is_here_) return rotations;
  const auto last = static_cast<int32_t>(target_->ropes({}, 1).size());
  for (const auto layout : drafter_->key_layouts())
    rotations.push_back(layout ? KeyRotation{last, *layout} : KeyRotation{.rope = -1});
  return rotations;
}

ForwardState DraftedModel::of_target(const ForwardState& state) const {
  ForwardState part = state;
  part.kv = state.kv.first(target_layers_);
  part.ropes = state.ropes.first(state.ropes.size() - 1);
  if (!state.block_ropes.empty()) part.block_ropes = state.block_ropes.first(state.block_ropes.size() - 1);
  return part;
}

Tensor DraftedModel::forward(Ops& ops, const Rows& rows, const ForwardState& state,
                             std::span<const int32_t> outputs) const {
  const auto& layers = drafter_->target_layers();
  LayerInputs taps{layers, home_, {}};
  if (is_here_) taps.values = ops.create(rows.count(), static_cast<int32_t>(layers.size()) * hyperparameters().hidden);
  ForwardState part = of_target(state);
  part.taps = &taps;
  const Tensor hidden = target_->forward(ops, rows, part, outputs);
  if (!is_here_) return hidden;
  const Ops::Scope scope(ops);
  drafter_->take_in(ops, taps.values, *target_, is_windowed_ ? state.windowed : rows, state.kv.subspan(target_layers_),
                    state.ropes.back());
  return hidden;
}

Tensor DraftedModel::predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const {
  if (tokens_ == nullptr) return target_->predict(ops, rows, of_target(state), before);
  if (!is_here_) {
    const Tensor normed = ops.create(rows.count(), tokens_->hyperparameters().hidden);
    ops.broadcast(normed, home_);
    return normed;
  }
  const Tensor found =
      tokens_->predict(ops, *target_, rows, before, state.kv.subspan(target_layers_), state.ropes.back());
  ops.broadcast(tokens_->norm(ops, found), home_);
  return found;
}

Tensor DraftedModel::predicted_head(Ops& ops, Tensor hidden) const {
  if (tokens_ == nullptr) return target_->predicted_head(ops, hidden);
  if (is_here_) return tokens_->head(ops, *target_, tokens_->norm(ops, hidden));
  return tokens_->has_head() ? ops.create(hidden.rows, 0) : target_->head(ops, hidden);
}

Tensor DraftedModel::block_states(Ops& ops, const Rows& rows, int32_t block_rows, const ForwardState& state) const {
  return blocks_->states(ops, drafter_->embed(ops, *target_, rows.tokens), rows, state.windowed, block_rows,
                         state.kv.subspan(target_layers_), state.ropes.back());
}

Tensor DraftedModel::block_head(Ops& ops, Tensor states) const { return drafter_->head(ops, *target_, states); }

}  // namespace v100
