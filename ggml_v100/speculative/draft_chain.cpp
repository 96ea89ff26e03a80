// The ten best, their softmax, the choice.
#include "speculative/draft_chain.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "sampling/row_scan.h"

namespace v100 {

namespace {

constexpr size_t kCandidates = 10;

}  // namespace

void check_draft_chain(const DraftChainParams& params) {
  if (params.n_max < 0)
    throw InvalidArgument("draft n max is " + std::to_string(params.n_max) + ", expected 0 or more");
  if (params.n_min < 0)
    throw InvalidArgument("draft n min is " + std::to_string(params.n_min) + ", expected 0 or more");
  if (!(params.p_min >= 0.0f && params.p_min <= 1.0f))
    throw InvalidArgument("draft p min is " + std::to_string(params.p_min) + ", expected 0 to 1");
}

bool DraftChain::has_room(const DraftRequest& request, const Draft& draft) const {
  return static_cast<int32_t>(draft.tokens.size()) < std::min(params_.n_max, request.most);
}

bool DraftChain::extend(const DraftRequest& request, std::span<const float> logits, std::span<const int32_t> tokens,
                        int32_t n_vocab, Draft& draft) {
  std::vector<Candidate> candidates;
  select_first_of_untrusted(logits, kCandidates, candidates);
  if (candidates.empty() || !std::isfinite(candidates.front().logit)) return false;
  Proposal best;
  for (const Candidate& c : candidates)
    best.push_back({tokens.empty() ? c.token : tokens[static_cast<size_t>(c.token)], c.logit});
  // The cut looks at the distribution, never at what is drawn from it: else the text's distribution would change.
  if (softmax(best, 1.0f).front().value < params_.p_min) return false;
  int32_t token = best.front().token;
  if (params_.samples && request.temperature > 0.0f) {
    Proposal proposal = softmax(best, request.temperature);
    const double uniform = static_cast<double>(numbers_.next(request.sequence, request.seed)) * 0x1p-32;
    double reached = 0.0;
    for (const TokenProbability& c : proposal) {
      if (c.value > 0.0f) token = c.token;
      reached += static_cast<double>(c.value);
      if (reached > uniform) break;
    }
    if (token >= n_vocab) return false;
    draft.proposals.push_back(std::move(proposal));
  }
  if (token >= n_vocab) return false;
  draft.tokens.push_back(token);
  return true;
}

void DraftChain::finish(Draft& draft) const {
  if (static_cast<int32_t>(draft.tokens.size()) < params_.n_min) draft = {};
}

}  // namespace v100
