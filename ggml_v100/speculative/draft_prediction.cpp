// From one token of all sequences to the next.
#include "speculative/draft_prediction.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "model/eagle3.h"

namespace v100 {

DraftPrediction::DraftPrediction(std::shared_ptr<Engine> target, std::string_view name, const DraftChainParams& params)
    : target_(std::move(target)), name_(name), chain_(params) {
  const bool has_eagle3 = target_->model().text().token_drafter() != nullptr;
  if (name_ == "draft-eagle3" && !has_eagle3)
    throw InvalidArgument("draft-eagle3 needs an EAGLE-3 drafter (--spec-draft-model)");
  if (name_ == "draft-mtp" && (has_eagle3 || !target_->can_predict()))
    throw InvalidArgument("draft-mtp needs a model with a block of multi-token prediction (nextn tensors)");
}

void DraftPrediction::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const TextModel& text = target_->model().text();
  const std::span<const int32_t> tokens =
      text.token_drafter() != nullptr ? text.token_drafter()->draft_tokens() : std::span<const int32_t>{};
  std::vector<PredictionWork> work;
  std::vector<size_t> of_work;
  for (size_t i = 0; i < requests.size(); ++i) {
    const int32_t most = std::min(requests[i].most, chain_.params().n_max);
    if (most < 1 || requests[i].history.size() < static_cast<size_t>(text.first_predicted())) continue;
    work.push_back({requests[i].sequence, requests[i].last, most});
    of_work.push_back(i);
  }
  const auto on_logits = [&](size_t item, std::span<const float> logits) {
    const size_t i = of_work[item];
    return chain_.extend(requests[i], logits, tokens, text.hyperparameters().vocab, drafts[i]) ? drafts[i].tokens.back()
                                                                                               : -1;
  };
  try {
    target_->predict(work, on_logits);
  } catch (const ContextFull&) {
    for (Draft& draft : drafts) draft = {};
  }
  for (Draft& draft : drafts) chain_.finish(draft);
}

}  // namespace v100
