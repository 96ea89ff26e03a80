// Tokens move to other positions: at a context shift those after the dropped ones, at a reuse of chunks those that the new
// text has too. Their keys are turned back by as many positions. A key's rotation by position p times the rotation by -d is its rotation by p - d, so scores between
// the tokens that stay are those of the shorter sequence.
#include <algorithm>
#include <memory>

#include "engine/engine.h"

namespace v100 {

namespace {

// What the ranks need to move keys down; shared, so that it is there for as long as one of them works with it.
struct KeyMove {
  // One table for all rows: each is turned by the same angles. Without the magnitude, which the stored keys have already.
  std::vector<RopeTableBuffer> buffers;
  std::vector<RopeTable> tables;
  std::vector<PageId> pages;
  TokenMove move{};

  void run(const Rank& rank) const {
    Ops& ops = rank.ops();
    const std::vector<KeyRotation> rotations = rank.text().key_rotations();
    // Ascending, each piece read before it is written: what is overwritten has been read, since tokens only move down.
    std::vector<int32_t> indices;
    std::vector<RowRange> visible;
    const Ops::Scope all(ops);
    std::vector<RopeTable> angles;
    for (const RopeTable& table : tables) angles.push_back(ops.place_angles(table));
    for (int32_t from = move.from; from < move.from + move.length; from += kPageTokens) {
      const int32_t end = std::min(move.from + move.length, from + kPageTokens);
      indices.clear();
      for (int32_t index = from; index < end; ++index) indices.push_back(index - (move.from - move.to));
      visible.assign(indices.size(), {});
      const SequenceRows rows_of_sequence{{0, end - from}, pages, {}, -1, -1};
      const Rows rows{indices, indices, indices, visible, {&rows_of_sequence, 1}};
      for (size_t layer = 0; layer < rotations.size(); ++layer) {
        const Ops::Scope scope(ops);
        const KvLayer& kv = rank.kv_layer(layer);
        const KeysValues moved = ops.kv_read({from, end}, pages, kv);
        if (const auto [rope, layout] = rotations[layer]; rope >= 0)
          ops.rope(moved.k, kv.shape.kv_heads, kv.shape.head_dim_k, angles[static_cast<size_t>(rope)], layout);
        ops.kv_append(moved.k, moved.v, rows, kv);
      }
    }
  }
};

}  // namespace

bool Engine::can_shift() const { return !needs_checkpoints() && !model_->text().key_rotations().empty(); }

void Engine::require_shift() const {
  if (!can_shift())
    throw InvalidArgument("the context of a " + model_->text().hyperparameters().architecture +
                          " model cannot be shifted: its tokens cannot be moved to other positions");
}

void Engine::shift(int32_t sequence, int32_t n_keep, int32_t n_discard) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  require_shift();
  const int32_t length = memory_.length(sequence);
  if (n_keep < 0 || n_discard < 1 || n_discard > length - n_keep)
    throw InvalidArgument("sequence " + std::to_string(sequence) + " holds " + std::to_string(length) +
                          " tokens; cannot keep " + std::to_string(n_keep) + " and discard the next " +
                          std::to_string(n_discard));
  const int32_t shortened = length - n_discard;
  memory_.make_own(sequence, n_keep, shortened);
  prefixes_->mark_moved(sequence, n_keep);
  try {
    const TokenMove move{n_keep + n_discard, n_keep, shortened - n_keep};
    move_down(sequence, {&move, 1});
  } catch (...) {  // some pages are half old, half new
    cut(sequence, 0);
    throw;
  }
  memory_.truncate(sequence, shortened);
  std::vector<int32_t>& tokens = tokens_[static_cast<size_t>(sequence)];
  tokens.erase(tokens.begin() + n_keep, tokens.begin() + n_keep + n_discard);
}

void Engine::move_down(int32_t sequence, std::span<const TokenMove> moves) {
  for (const TokenMove& move : moves) {
    if (move.from == move.to || move.length == 0) continue;
    const auto key_move = std::make_shared<KeyMove>();
    key_move->move = move;
    const auto pages = memory_.pages(sequence);
    key_move->pages.assign(pages.begin(), pages.end());
    key_move->buffers.resize(ropes_.size());
    const std::vector<RopePosition> back(static_cast<size_t>(kPageTokens), text_position(move.to - move.from));
    for (size_t i = 0; i < ropes_.size(); ++i) {
      RopeAngles angles = ropes_[i];
      angles.magnitude = 1.0;
      key_move->tables.push_back(key_move->buffers[i].fill(angles, back));
    }
    ranks_->on_each([key_move](const Rank& rank) { key_move->run(rank); });
  }
}

// False when nothing was changed: an exact beginning is as long, or shared pages find no room for their copies.
bool Engine::reuse_chunks(int32_t sequence, std::span<const int32_t> tokens, int32_t most, int32_t least_chunk,
                          PrefixReuse& result) {
  std::vector<int32_t>& held = tokens_[static_cast<size_t>(sequence)];
  const ChunkPlan plan = plan_chunks(held, tokens, most, least_chunk);
  if (plan.length <= prefixes_->reusable(sequence, tokens, most, scales_[static_cast<size_t>(sequence)])) return false;
  prefixes_->keep_lost(sequence, plan.common);
  if (!plan.moves.empty()) {
    try {
      memory_.make_own(sequence, plan.common, plan.length);
    } catch (const ContextFull&) {
      return false;
    }
    prefixes_->mark_moved(sequence, plan.common);
    try {
      move_down(sequence, plan.moves);
    } catch (...) {  // some pages are half old, half new
      cut(sequence, 0);
      throw;
    }
  }
  cut(sequence, plan.length);
  std::copy_n(tokens.begin(), plan.length, held.begin());
  result = {
      plan.length, plan.length, "own", -1, plan.length == most ? "prompt" : "not cached", plan.length - plan.common};
  return true;
}

}  // namespace v100
