// From one token of all sequences to the next.
#include "speculative/draft_mtp.h"

#include <algorithm>

#include "base/error.h"

namespace v100 {

DraftMtp::DraftMtp(std::shared_ptr<Engine> target, const DraftChainParams& params)
    : target_(std::move(target)), chain_(params) {
  if (!target_->can_predict())
    throw InvalidArgument("draft-mtp needs a model with a block of multi-token prediction (nextn tensors)");
}

void DraftMtp::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  const int32_t n_vocab = target_->model().text().hyperparameters().vocab;
  std::vector<PredictionWork> work;
  std::vector<size_t> of_work;
  for (size_t i = 0; i < requests.size(); ++i) {
    const int32_t most = std::min(requests[i].most, chain_.params().n_max);
    if (most < 1) continue;
    work.push_back({requests[i].sequence, requests[i].last, most});
    of_work.push_back(i);
  }
  const auto on_logits = [&](size_t item, std::span<const float> logits) {
    const size_t i = of_work[item];
    return chain_.extend(requests[i], logits, n_vocab, drafts[i]) ? drafts[i].tokens.back() : -1;
  };
  try {
    target_->predict(work, on_logits);
  } catch (const ContextFull&) {
    for (Draft& draft : drafts) draft = {};
  }
  for (Draft& draft : drafts) chain_.finish(draft);
}

}  // namespace v100
