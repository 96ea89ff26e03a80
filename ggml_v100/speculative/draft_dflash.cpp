// The walk through a lattice.
#include "speculative/draft_dflash.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/error.h"

namespace v100 {

DraftDFlash::DraftDFlash(std::shared_ptr<Engine> target, std::string_view name, const DraftChainParams& params)
    : target_(std::move(target)), name_(name), params_(params) {
  check_draft_chain(params_);
  const DFlash* drafter = target_->model().text().block_drafter();
  const bool wants_dspark = name_ == "draft-dspark";
  if (drafter == nullptr || (drafter->markov_head() != nullptr) != wants_dspark)
    throw InvalidArgument(name_ + " needs a " + (wants_dspark ? "DSpark" : "DFlash") + " drafter (--spec-draft-model)");
  if (wants_dspark && params_.p_min > 0.0f && !drafter->markov_head()->has_confidence())
    throw InvalidArgument("the DSpark drafter has no head of confidence: --spec-draft-p-min must be 0");
  params_.n_max = std::min(params_.n_max, drafter->most_drafted());
  params_.n_min = std::min(params_.n_min, params_.n_max);
  block_rows_ = params_.n_max + drafter->silent_rows();
  draws_ = params_.samples && drafter->is_version_2();
  if (block_rows_ > target_->n_ubatch())
    throw InvalidArgument("a ubatch of " + std::to_string(target_->n_ubatch()) + " has no room for a block of " +
                          std::to_string(block_rows_) + " rows");
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
    const float sure = lattice.confidences.empty() ? shares[static_cast<size_t>(at)].value
                                                   : lattice.confidences[static_cast<size_t>(row)];
    if (!(sure >= params_.p_min)) break;
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
  const auto most = static_cast<size_t>(target_->n_ubatch() / block_rows_);  // blocks of one pass
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
