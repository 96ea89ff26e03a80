// `eagle3`: drafters of the kind EAGLE-3 (Li et al. 2025). One layer guesses a token after the other, from the token before
// and what a larger model, the target, computed for the text so far.
//
// The inputs of three of the target's layers are fused into one state of each token of the text. A row of the layer pairs a
// token with the state of the token before it; the first token of a text has no such row. What the layer gives for a row,
// before the output norm, is the state that the next drafted token is paired with.
//
// States lie in the pages beside the layer's keys and values, the first half where keys would be: so a sequence can be cut,
// forked or taken up again anywhere, and the state of its last token is there.
//
// E hidden, Et hidden of the target.
#pragma once

#include "model/hidden_drafter.h"

namespace v100 {

class Eagle3 final : public HiddenDrafter {
 public:
  // Throws ModelError for a file that does not fit together.
  Eagle3(const Metadata& metadata, const WeightLoader& weights);

  // kv index of the first token with a row of the layer.
  static constexpr int32_t kFirstRow = 1;

  void require_fit(const TextModel& target) const override;
  std::vector<KvShape> kv_shapes() const override;  // of the layer, then of the states
  std::vector<std::optional<RopeLayout>> key_layouts() const override { return {kLayout, std::nullopt}; }
  RopeAngles rope() const override;
  // Appends the rows' states, and keys and values of the layer.
  void take_in(Ops& ops, Tensor taps, const TextModel& target, const Rows& rows, std::span<const KvLayer> kv,
               const RopeTable& rope) const override;

  // The layer's rows [rows, E] of the next token of each sequence, one each. before [rows, E]: what this returned for the
  // token before; no rows: the states that were taken in.
  Tensor predict(Ops& ops, const TextModel& target, const Rows& rows, Tensor before, std::span<const KvLayer> kv,
                 const RopeTable& rope) const;
  // What the output matrix is multiplied with, of such rows.
  Tensor norm(Ops& ops, Tensor rows) const { return ops.rms_norm(rows, output_norm_, hp_.rms_epsilon); }

 private:
  static constexpr RopeLayout kLayout = RopeLayout::interleaved;

  // What the layer begins with: the residual stream [rows, E], and what attention reads [rows, 2 E].
  struct Joined {
    Tensor stream, input;
  };
  Joined join(Ops& ops, const TextModel& target, const Rows& rows, Tensor before) const;
  // Of each row the state of the token before it, [rows, E]. The first token of a text gets its own.
  Tensor states_before(Ops& ops, const Rows& rows, const KvLayer& kept) const;
  Rotation rotation(const RopeTable& rope) const { return {rope, kLayout, nullptr, nullptr, hp_.rms_epsilon}; }
  int32_t half() const { return state_shape_.kv_heads * state_shape_.head_dim_k; }  // values of a half of a state

  int32_t target_hidden_ = 0;  // Et
  KvShape state_shape_;
  std::vector<float> rope_divisors_;
  VectorWeight fuse_norm_;                // [3 Et] or empty
  Linear fuse_first_, fuse_last_;         // [half, 3 Et]: the first and the last rows of one matrix, which may overlap
  VectorWeight token_norm_, state_norm_;  // [E]
  bool streams_normed_ = false;           // the residual stream begins with the normed state
  Linear q_, k_, v_, output_;             // of 2 E features, output_ of all heads
  VectorWeight ffn_norm_;
  Linear gate_, up_, down_;
  VectorWeight output_norm_;
};

}  // namespace v100
