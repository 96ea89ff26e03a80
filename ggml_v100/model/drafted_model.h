// A model and the drafter on its hidden states that was made for it, as one model: with every token the target computes, the
// drafter takes in what it will draft from. What it keeps lies in the same pages as the target's keys and values, so that
// whatever happens to a sequence (forks, cuts, reuse, files) happens to both.
#pragma once

#include <memory>

#include "gguf/metadata.h"
#include "model/dflash.h"
#include "model/eagle3.h"
#include "model/loader.h"
#include "model/model.h"

namespace v100 {

class DraftedModel final : public TextModel {
 public:
  // Throw ModelError for a drafter that does not fit the target.
  DraftedModel(std::unique_ptr<TextModel> target, std::unique_ptr<DFlash> drafter);
  DraftedModel(std::unique_ptr<TextModel> target, std::unique_ptr<Eagle3> drafter);

  const Hyperparameters& hyperparameters() const override { return target_->hyperparameters(); }
  std::vector<KvShape> kv_shapes() const override;  // the target's, then the drafter's
  std::vector<StateShape> state_shapes() const override { return target_->state_shapes(); }
  int32_t loaded_mtp_blocks() const override { return target_->loaded_mtp_blocks(); }
  std::vector<RopeAngles> ropes(const RopeSettings& settings,
                                int32_t n_ctx) const override;  // the drafter's is the last
  std::vector<KeyRotation> key_rotations() const override;
  int32_t sliding_window() const override { return window_; }
  int32_t block_tokens() const override { return target_->block_tokens(); }
  Tensor forward(Ops& ops, const Rows& rows, const ForwardState& state,
                 std::span<const int32_t> outputs) const override;
  void replay(Ops& ops, const Rows& rows, const ForwardState& state) const override {
    target_->replay(ops, rows, of_target(state));
  }
  Tensor predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const override;
  bool can_predict() const override { return tokens_ != nullptr || target_->can_predict(); }
  int32_t first_predicted() const override {
    return tokens_ != nullptr ? Eagle3::kFirstRow : target_->first_predicted();
  }
  const Eagle3* token_drafter() const override { return tokens_; }
  Tensor predicted_head(Ops& ops, Tensor hidden) const override {
    return tokens_ != nullptr ? tokens_->predicted_head(ops, *target_, hidden) : target_->predicted_head(ops, hidden);
  }
  bool has_residual_stream() const override { return target_->has_residual_stream(); }
  RowRange vocabulary() const override { return target_->vocabulary(); }
  Tensor embed(Ops& ops, std::span<const int32_t> tokens) const override { return target_->embed(ops, tokens); }
  Tensor head(Ops& ops, Tensor hidden) const override { return target_->head(ops, hidden); }
  const Classifier* classifier() const override { return target_->classifier(); }
  const DFlash* block_drafter() const override { return blocks_; }
  // States of blocks, see DFlash::states: rows of an anchor and mask tokens each.
  Tensor block_states(Ops& ops, const Rows& rows, int32_t block_rows, const ForwardState& state) const override;
  // Logits [rows, vocab] of such states.
  Tensor block_head(Ops& ops, Tensor states) const override;

 private:
  DraftedModel(std::unique_ptr<TextModel> target, std::unique_ptr<HiddenDrafter> drafter);
  ForwardState of_target(const ForwardState& state) const;

  std::unique_ptr<TextModel> target_;
  std::unique_ptr<HiddenDrafter> drafter_;
  const DFlash* blocks_ = nullptr;  // the drafter, if it is one of blocks
  const Eagle3* tokens_ = nullptr;  // the drafter, if it is one of single tokens
  size_t target_layers_;            // of kv_shapes
  int32_t window_;                  // of the target's layers with one, or of the drafter's
  bool is_windowed_;                // whether the drafter's pages are given back behind the window
};

// The target with the drafter of a file. Throws ModelError.
std::unique_ptr<TextModel> add_drafter(std::unique_ptr<TextModel> target, const Metadata& metadata,
                                       const WeightLoader& weights);

}  // namespace v100
