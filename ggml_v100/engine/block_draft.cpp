// Drafts by a drafter of whole blocks: one pass for the blocks of all sequences, on pages that are given back.
#include <optional>

#include "base/error.h"
#include "engine/borrowed_pages.h"
#include "engine/engine.h"
#include "model/dflash.h"
#include "sampling/row_scan.h"

namespace v100 {

std::vector<DraftLattice> Engine::draft_blocks(std::span<const BlockWork> work, int32_t n_draft) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  const DFlash* drafter = model_->text().block_drafter();
  if (drafter == nullptr) throw InvalidArgument("the model was loaded without a drafter of blocks");
  if (n_draft < 1 || n_draft >= drafter->block_size())
    throw InvalidArgument("a draft of " + std::to_string(n_draft) + " tokens; the drafter makes 1 to " +
                          std::to_string(drafter->block_size() - 1));
  const int32_t block_rows = n_draft + 1;
  if (static_cast<int64_t>(work.size()) * block_rows > n_ubatch_)
    throw InvalidArgument(std::to_string(work.size()) + " drafts of " + std::to_string(n_draft) +
                          " tokens do not fit into a ubatch of " + std::to_string(n_ubatch_));
  if (work.empty()) return {};

  BorrowedPages pages(memory_);
  std::optional<BorrowedPages> window_pages;
  if (window_memory_ != nullptr) window_pages.emplace(*window_memory_);
  for (const BlockWork& w : work) {
    check_token(w.last);
    pages.append(w.sequence, block_rows);
    if (window_pages) window_pages->append(w.sequence, block_rows);
  }

  auto& u = ubatch_;
  u.clear();
  for (const BlockWork& w : work) {
    const auto row = static_cast<int32_t>(u.tokens.size());
    const int32_t n = memory_.length(w.sequence) - block_rows;
    // Neither a recurrent state nor adapters: the block is the drafter's alone.
    u.sequences.push_back({{row, row + block_rows}, memory_.pages(w.sequence), {}, -1, -1, {}});
    u.windowed_sequences.push_back(u.sequences.back());
    if (window_memory_ != nullptr) u.windowed_sequences.back().pages = window_memory_->pages(w.sequence);
    for (int32_t j = 0; j < block_rows; ++j) {
      u.tokens.push_back(j == 0 ? w.last : drafter->mask_token());
      u.positions.push_back(n + j);
      u.rope_positions.push_back(text_position(n + j));
      u.visible.push_back(drafter->visible(n, j, block_rows, false));
      u.windowed.push_back(drafter->visible(n, j, block_rows, true));
      if (j > 0) u.outputs.push_back(row + j);
    }
  }
  fill_rope_tables();
  const Rows rows{u.tokens, u.positions, u.positions, u.visible, u.sequences};
  const Rows windowed{u.tokens, u.positions, u.positions, u.windowed, u.windowed_sequences};
  std::vector<DraftLattice> lattices;
  ranks_->on_each([&](const Rank& rank) {
    Ops& ops = rank.ops();
    const Ops::Scope scope(ops);
    const Tensor all = rank.block_states({rows, windowed, u.tables, u.block_tables, u.outputs}, block_rows);
    const Tensor states = ops.gather_rows(all, u.outputs);  // [drafts * n_draft, E]
    const Tensor logits = rank.text().block_head(ops, states);
    std::vector<float> values(static_cast<size_t>(logits.size()));
    ops.read(logits, values);
    const int32_t k = drafter->candidates(logits.features);
    std::vector<Candidate> chosen;
    std::vector<int32_t> ids;
    std::vector<float> of_ids;
    for (size_t i = 0; i < work.size(); ++i) {
      const auto first = static_cast<int32_t>(i) * n_draft;
      ids.clear(), of_ids.clear();
      for (int32_t t = first; t < first + n_draft; ++t) {
        const auto width = static_cast<size_t>(logits.features);
        select_first_of_untrusted(std::span(values).subspan(static_cast<size_t>(t) * width, width),
                                  static_cast<size_t>(k), chosen);
        for (const Candidate& c : chosen) ids.push_back(c.token), of_ids.push_back(c.logit);
      }
      lattices.push_back(
          drafter->lattice(ops, work[i].last, {states.row(first), n_draft, states.features}, ids, of_ids));
    }
  });
  return lattices;
}

}  // namespace v100
