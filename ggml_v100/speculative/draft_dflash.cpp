// The walk through a lattice.
#include "speculative/draft_dflash.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"

namespace v100 {

DraftDFlash::DraftDFlash(std::shared_ptr<Engine> target, const DraftChainParams& params)
    : target_(std::move(target)), params_(params) {
  check_draft_chain(params_);
  const DFlash* drafter = target_->model().text().block_drafter();
  if (drafter == nullptr) throw InvalidArgument("draft-dflash needs a DFlash drafter (--spec-draft-model)");
  params_.n_max = std::min(params_.n_max, drafter->block_size() - 1);
  params_.n_min = std::min(params_.n_min, params_.n_max);
  draws_ = params_.samples && drafter->is_version_2();
  if (params_.n_max + 1 > target_->n_ubatch())
    throw InvalidArgument("a ubatch of " + std::to_string(target_->n_ubatch()) + " has no room for a block of " +
                          std::to_string(params_.n_max + 1) + " rows");
}

Draft DraftDFlash::walk(const DraftRequest& request, const DraftLattice& lattice) {
  const bool draws = draws_ && request.temperature > 0.0f;
  Draft draft;
  int32_t at = 0;
  for (int32_t row = 0; row < lattice.rows; ++row) {
    const std::span<const float> scores = lattice.after(row, at);
    if (!std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); })) break;
    Proposal shares;
    for (int32_t j = 0; j < lattice.candidates; ++j)
      shares.push_back({lattice.token(row, j), scores[static_cast<size_t>(j)]});
    shares = softmax(std::move(shares), draws ? request.temperature : 1.0f);
    at = static_cast<int32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
    // The cut looks at the distribution, never at what is drawn from it: else the text's distribution would change.
    if (shares[static_cast<size_t>(at)].value < params_.p_min) break;
    if (draws) {
      const float uniform = static_cast<float>(numbers_.next(request.sequence, request.seed) >> 8) * 0x1p-24f;
      float reached = 0;
      for (int32_t j = 0; j < lattice.candidates && reached <= uniform; ++j) {
        const float share = shares[static_cast<size_t>(j)].value;
        if (share > 0.0f) at = j;
        reached += share;
      }
      draft.proposals.push_back(std::move(shares));
    }
    draft.tokens.push_back(lattice.token(row, at));
  }
  if (static_cast<int32_t>(draft.tokens.size()) < params_.n_min) return {};
  return draft;
}

void DraftDFlash::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  if (params_.n_max < 1) return;
  const auto most = static_cast<size_t>(target_->n_ubatch() / (params_.n_max + 1));  // blocks of one pass
  try {
    for (size_t first = 0; first < requests.size(); first += most) {
      std::vector<BlockWork> work;
      for (const DraftRequest& request : requests.subspan(first, std::min(most, requests.size() - first)))
        work.push_back({request.sequence, request.last});
      const std::vector<DraftLattice> lattices = target_->draft_blocks(work, params_.n_max);
      for (size_t i = 0; i < lattices.size(); ++i) drafts[first + i] = walk(requests[first + i], lattices[i]);
    }
  } catch (const ContextFull&) {
    for (Draft& draft : drafts) draft = {};
  }
}

}  // namespace v100
