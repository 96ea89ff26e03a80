// Drafts by a drafter of whole blocks: one pass for the blocks of all sequences, on pages that are given back.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/borrowed_pages.h"
#include "engine/engine.h"
#include "model/dflash.h"
#include "sampling/row_scan.h"

namespace v100 {

namespace {

// One pass of the drafter: its states on the rank that has it, their logits on all that have rows of the output matrix, then
// the lattices. Shared with the ranks, so that it is there for as long as one of them works with it.
struct BlockPass {
  Ubatch ubatch;
  int32_t block_rows = 0, n_draft = 0;
  std::vector<int32_t> anchors;
  std::vector<DraftLattice> lattices;

  // is_shared: other ranks have rows of the output matrix too.
  void allocate(const DFlash& drafter, const Hyperparameters& hp, bool is_shared) {
    hidden_ = hp.hidden;
    has_head_ = drafter.has_head();
    width_ = drafter.head_rows();
    const auto n = ubatch.outputs.size();
    logits_.resize(n * static_cast<size_t>(width_));
    if (is_shared && !has_head_) states_.resize(n * static_cast<size_t>(hidden_));
  }

  void compute_states(const Rank& rank) {
    if (!rank.text().has_block_drafter()) return;
    Ops& ops = rank.ops();
    scope_.emplace(ops);
    const Tensor all = rank.block_states(ubatch, block_rows);
    drafted_ = ops.gather_rows(all, ubatch.outputs);  // [drafts * n_draft, E]
    if (!states_.empty()) ops.read(drafted_, states_);
  }

  void compute_logits(const Rank& rank) {
    const bool has_drafter = rank.text().has_block_drafter();
    if (!has_drafter && (has_head_ || rank.text().vocabulary().size() == 0)) return;
    Ops& ops = rank.ops();
    const Ops::Scope scope(ops);
    Tensor states = drafted_;
    if (!has_drafter) {
      states = ops.create(static_cast<int32_t>(ubatch.outputs.size()), hidden_);
      ops.write_bytes(reinterpret_cast<const std::byte*>(states_.data()), reinterpret_cast<std::byte*>(states.data),
                      states_.size() * sizeof(float));
    }
    const Tensor part = has_drafter ? rank.text().block_head(ops, states) : rank.text().head(ops, states);
    read_part(ops, part, rank.text().vocabulary().begin, logits_, width_);
  }

  void make_lattices(const Rank& rank) {
    if (!rank.text().has_block_drafter()) return;
    const DFlash* drafter = rank.text().block_drafter();
    if (drafter->markov_head() != nullptr) correct_for_predecessors(rank.ops(), *drafter);
    const auto k = static_cast<size_t>(drafter->candidates(width_));
    std::vector<Candidate> chosen;
    std::vector<int32_t> ids;
    std::vector<float> of_ids;
    for (size_t i = 0; i < anchors.size(); ++i) {
      const auto first = static_cast<int32_t>(i) * n_draft;
      ids.clear(), of_ids.clear();
      for (int32_t t = first; t < first + n_draft; ++t) {
        select_first_of_untrusted(logits_of(static_cast<size_t>(t)), k, chosen);
        for (const Candidate& c : chosen) ids.push_back(c.token), of_ids.push_back(c.logit);
      }
      lattices.push_back(
          drafter->lattice(rank.ops(), anchors[i], {drafted_.row(first), n_draft, drafted_.features}, ids, of_ids));
      if (confidences_.empty()) continue;
      const auto own = std::span(confidences_).subspan(static_cast<size_t>(first), static_cast<size_t>(n_draft));
      lattices.back().confidences.assign(own.begin(), own.end());
    }
    scope_.reset();
  }

 private:
  std::span<float> logits_of(size_t row) {
    return std::span(logits_).subspan(row * static_cast<size_t>(width_), static_cast<size_t>(width_));
  }

  // From left to right, all blocks at once: the predecessor of a row is the best token of the row before, the anchor first.
  void correct_for_predecessors(Ops& ops, const DFlash& drafter) {
    const MarkovHead& head = *drafter.markov_head();
    std::vector<int32_t> predecessors = anchors, rows(anchors.size());
    std::vector<float> corrections(anchors.size() * static_cast<size_t>(width_)), sure(anchors.size());
    if (head.has_confidence()) confidences_.resize(anchors.size() * static_cast<size_t>(n_draft));
    std::vector<Candidate> best;
    for (int32_t t = 0; t < n_draft; ++t) {
      const Ops::Scope scope(ops);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i) * n_draft + t;
      const Tensor embedded = head.embed(ops, predecessors);
      ops.read(head.corrections(ops, embedded), corrections);
      if (head.has_confidence()) ops.read(head.confidences(ops, ops.gather_rows(drafted_, rows), embedded), sure);
      for (size_t i = 0; i < rows.size(); ++i) {
        const auto row = static_cast<size_t>(rows[i]);
        const std::span<float> logits = logits_of(row);
        const float* correction = corrections.data() + i * logits.size();
        std::transform(logits.begin(), logits.end(), correction, logits.begin(), std::plus<>());
        if (head.has_confidence()) confidences_[row] = 1.0f / (1.0f + std::exp(-sure[i]));
        select_first_of_untrusted(logits, 1, best);
        predecessors[i] = drafter.target_token(best[0].token);
      }
    }
  }

  int32_t hidden_ = 0, width_ = 0;
  bool has_head_ = false;
  std::optional<Ops::Scope> scope_;  // of the rank with the drafter
  Tensor drafted_;
  std::vector<float> states_;       // for the others, where they have rows of the output matrix; else empty
  std::vector<float> logits_;       // [drafts * n_draft, width]
  std::vector<float> confidences_;  // [drafts * n_draft], or none
};

}  // namespace

std::vector<DraftLattice> Engine::draft_blocks(std::span<const BlockWork> work, int32_t n_draft) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  const DFlash* drafter = model_->text().block_drafter();
  if (drafter == nullptr) throw InvalidArgument("the model was loaded without a drafter of blocks");
  if (n_draft < 1 || n_draft > drafter->most_drafted())
    throw InvalidArgument("a draft of " + std::to_string(n_draft) + " tokens; the drafter makes 1 to " +
                          std::to_string(drafter->most_drafted()));
  const int32_t block_rows = drafter->silent_rows() + n_draft;
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
      u.place(n + j, 0);  // no block is completed: the target's caches are not written
      u.visible.push_back(drafter->visible(n, j, block_rows, false));
      u.windowed.push_back(drafter->visible(n, j, block_rows, true));
      if (j >= drafter->silent_rows()) u.outputs.push_back(row + j);
    }
  }
  fill_rope_tables();
  const auto pass = std::make_shared<BlockPass>();
  const Rows rows{u.tokens, u.positions, u.positions, u.visible, u.sequences};
  const Rows windowed{u.tokens, u.positions, u.positions, u.windowed, u.windowed_sequences};
  pass->ubatch = {rows, windowed, u.tables, u.block_tables, u.outputs};
  pass->block_rows = block_rows;
  pass->n_draft = n_draft;
  for (const BlockWork& w : work) pass->anchors.push_back(w.last);
  bool is_shared = false;
  for (int32_t r = 0; r < ranks_->size(); ++r)
    is_shared |= !model_->text(r).has_block_drafter() && model_->text(r).vocabulary().size() > 0;
  pass->allocate(*drafter, model_->text().hyperparameters(), is_shared);
  ranks_->on_each([pass](const Rank& rank) { pass->compute_states(rank); });
  ranks_->on_each([pass](const Rank& rank) { pass->compute_logits(rank); });
  ranks_->on_each([pass](const Rank& rank) { pass->make_lattices(rank); });
  return std::move(pass->lattices);
}

}  // namespace v100
