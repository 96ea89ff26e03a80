// Drafts by the model's own block of multi-token prediction: one row per sequence and token, on pages that are given back.
#include <algorithm>

#include "base/error.h"
#include "engine/borrowed_pages.h"
#include "engine/engine.h"

namespace v100 {

void Engine::predict(std::span<const PredictionWork> work, const OnPrediction& on_logits) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  if (!can_predict()) throw InvalidArgument("the model has no block of multi-token prediction that was loaded");
  const int32_t first = model_->text().first_predicted();
  struct Item {
    size_t index;
    int32_t token, place;
    int32_t row = -1;  // in the prediction before
  };
  BorrowedPages pages(memory_);
  std::vector<Item> items;
  for (size_t i = 0; i < work.size(); ++i) {
    const PredictionWork& w = work[i];
    check_token(w.last);
    if (w.most < 1) throw InvalidArgument("a draft of " + std::to_string(w.most) + " tokens; expected 1 or more");
    if (memory_.length(w.sequence) < first)
      throw InvalidArgument("sequence " + std::to_string(w.sequence) + " has no token to go on from");
    items.push_back({i, w.last, memory_.length(w.sequence)});
    pages.append(w.sequence, w.most);
  }

  auto& u = ubatch_;
  std::vector<int32_t> before;
  for (int32_t step = 0; !items.empty(); ++step) {
    u.clear();
    before.clear();
    for (const Item& item : items) {
      const auto row = static_cast<int32_t>(u.tokens.size());
      SequenceRows sequence = sequence_rows(work[item.index].sequence, row, false);
      sequence.rows.end = row + 1;
      sequence.state_to = -1;
      u.sequences.push_back(sequence);
      u.tokens.push_back(item.token);
      u.place(item.place, model_->text().block_tokens());
      u.visible.push_back({first, item.place + 1});
      if (step > 0) before.push_back(item.row);
    }
    fill_rope_tables();
    const Rows rows{u.tokens, u.positions, u.positions, u.visible, u.sequences};
    ranks_->predict({rows, rows, u.tables, u.block_tables, {}}, before);
    const Tensor logits = ranks_->logits();
    std::vector<Item> going_on;
    for (size_t row = 0; row < items.size(); ++row) {
      Item item = items[row];
      item.token = on_logits(item.index, {logits.row(static_cast<int32_t>(row)), static_cast<size_t>(logits.features)});
      if (item.token < 0 || step + 1 == work[item.index].most) continue;
      check_token(item.token);
      ++item.place;
      item.row = static_cast<int32_t>(row);
      going_on.push_back(item);
    }
    items = std::move(going_on);
  }
}

}  // namespace v100
