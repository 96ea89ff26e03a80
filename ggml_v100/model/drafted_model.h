// A model and the drafter on its hidden states that was made for it, as one model: with every token the target computes, the
// drafter takes in what it will draft from. What it keeps lies in the same pages as the target's keys and values, so that
// whatever happens to a sequence (forks, cuts, reuse, files) happens to both.
#pragma once

#include <memory>

#include "model/dflash.h"
#include "model/eagle3.h"
#include "model/model.h"

namespace v100 {

class DraftedModel final : public TextModel {
 public:
  // target: the part of one rank. drafter: on the rank `home`, which is this one if is_here. Throw ModelError for a drafter
  // that does not fit the target.
  DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const DFlash> drafter, int32_t home, bool is_here);
  DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const Eagle3> drafter, int32_t home, bool is_here);

  const Hyperparameters& hyperparameters() const override { return target_->hyperparameters(); }
  std::vector<KvShape> kv_shapes() const override;  // the target's, then the drafter's if it is here
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
  // Of a drafter of single tokens: on its own rank what Eagle3::predict gives, on others that after its output norm.
  Tensor predict(Ops& ops, const Rows& rows, const ForwardState& state, Tensor before) const override;
  bool can_predict() const override { return tokens_ != nullptr || target_->can_predict(); }
  int32_t first_predicted() const override {
    return tokens_ != nullptr ? Eagle3::kFirstRow : target_->first_predicted();
  }
  const Eagle3* token_drafter() const override { return tokens_; }
  Tensor predicted_head(Ops& ops, Tensor hidden) const override;
  int32_t predicted_width() const override {
    return tokens_ != nullptr ? tokens_->head_rows() : target_->predicted_width();
  }
  bool has_residual_stream() const override { return target_->has_residual_stream(); }
  RowRange vocabulary() const override { return target_->vocabulary(); }
  Tensor embed(Ops& ops, std::span<const int32_t> tokens) const override { return target_->embed(ops, tokens); }
  Tensor head(Ops& ops, Tensor hidden) const override { return target_->head(ops, hidden); }
  const Classifier* classifier() const override { return target_->classifier(); }
  const DFlash* block_drafter() const override { return blocks_; }
  bool has_block_drafter() const override { return blocks_ != nullptr && is_here_; }
  // States of blocks, see DFlash::states: rows of an anchor and mask tokens each.
  Tensor block_states(Ops& ops, const Rows& rows, int32_t block_rows, const ForwardState& state) const override;
  // Logits [rows, vocab] of such states.
  Tensor block_head(Ops& ops, Tensor states) const override;

 private:
  DraftedModel(std::unique_ptr<TextModel> target, std::shared_ptr<const HiddenDrafter> drafter, int32_t home,
               bool is_here);
  ForwardState of_target(const ForwardState& state) const;

  std::unique_ptr<TextModel> target_;
  std::shared_ptr<const HiddenDrafter> drafter_;
  const DFlash* blocks_ = nullptr;  // the drafter, if it is one of blocks
  const Eagle3* tokens_ = nullptr;  // the drafter, if it is one of single tokens
  int32_t home_;
  bool is_here_;
  size_t target_layers_;  // of kv_shapes
  int32_t window_;        // of the target's layers with one, or of the drafter's
  bool is_windowed_;      // whether the drafter's pages are given back behind the window
};

}  // namespace v100
