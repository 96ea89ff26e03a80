// Context shift: tokens in the middle of a sequence are dropped, those after them move down and their keys are turned back
// by as many positions. A key's rotation by position p times the rotation by -d is its rotation by p - d, so scores between
// the tokens that stay are those of the shorter sequence.
#include <algorithm>

#include "engine/engine.h"

namespace v100 {

bool Engine::can_shift() const { return !needs_checkpoints() && !model_->text().key_rotations().empty(); }

void Engine::shift(int32_t sequence, int32_t n_keep, int32_t n_discard) {
  const std::lock_guard lock(mutex_);
  if (!can_shift())
    throw InvalidArgument("the context of a " + model_->text().hyperparameters().architecture +
                          " model cannot be shifted: its tokens cannot be moved to other positions");
  const int32_t length = memory_.length(sequence);
  if (n_keep < 0 || n_discard < 1 || n_discard > length - n_keep)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " holds " + std::to_string(length) +
                          " tokens; cannot keep " + std::to_string(n_keep) + " and discard the next " +
                          std::to_string(n_discard));
  const int32_t shortened = length - n_discard;
  memory_.make_own(sequence, n_keep, shortened);
  prefixes_->mark_moved(sequence, n_keep);
  try {
    move_down(sequence, n_keep, n_discard);
  } catch (...) {  // some pages are half old, half new
    cut(sequence, 0);
    throw;
  }
  memory_.truncate(sequence, shortened);
  std::vector<int32_t>& tokens = tokens_[static_cast<size_t>(sequence)];
  tokens.erase(tokens.begin() + n_keep, tokens.begin() + n_keep + n_discard);
}

void Engine::move_down(int32_t sequence, int32_t n_keep, int32_t n_discard) {
  const std::vector<KeyRotation> rotations = model_->text().key_rotations();
  // One table for all rows: each is turned by the same angles. Without the magnitude, which the stored keys have already.
  std::vector<RopeTableBuffer> buffers(ropes_.size());
  std::vector<RopeTable> tables;
  const std::vector<RopePosition> back(static_cast<size_t>(kPageTokens), text_position(-n_discard));
  for (size_t i = 0; i < ropes_.size(); ++i) {
    RopeAngles angles = ropes_[i];
    angles.magnitude = 1.0;
    tables.push_back(buffers[i].fill(angles, back));
  }
  const auto pages = memory_.pages(sequence);
  const int32_t length = memory_.length(sequence);
  Ops& ops = rank_->ops();
  ops.set_threads(n_threads_batch_);
  // Ascending, each piece read before it is written: what is overwritten has been read, since tokens only move down.
  std::vector<int32_t> indices;
  std::vector<RowRange> visible;
  for (int32_t from = n_keep + n_discard; from < length; from += kPageTokens) {
    const int32_t end = std::min(length, from + kPageTokens);
    indices.clear();
    for (int32_t index = from; index < end; ++index) indices.push_back(index - n_discard);
    visible.assign(indices.size(), {});
    const SequenceRows rows_of_sequence{{0, end - from}, pages, {}, -1, -1};
    const Rows rows{indices, indices, indices, visible, {&rows_of_sequence, 1}};
    for (size_t layer = 0; layer < rotations.size(); ++layer) {
      const Ops::Scope scope(ops);
      const KvLayer& kv = rank_->kv_layer(layer);
      const KeysValues moved = ops.kv_read({from, end}, pages, kv);
      ops.rope(moved.k, kv.shape.kv_heads, kv.shape.head_dim_k, tables[static_cast<size_t>(rotations[layer].rope)],
               rotations[layer].layout);
      ops.kv_append(moved.k, moved.v, rows, kv);
    }
  }
}

}  // namespace v100
