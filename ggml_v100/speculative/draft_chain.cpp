// The ten best, their softmax, the choice.
#include "speculative/draft_chain.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

constexpr size_t kCandidates = 10;
// Drafts and their verification must not use the same random numbers: the sampler's generator has the seed itself.
constexpr uint32_t kDraftSeed = 0x85ebca6bu;

// The ten largest logits, falling, of equal ones the smaller id first; softmax at a temperature.
Proposal best_candidates(std::span<const float> logits) {
  Proposal best;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float logit = logits[i];
    if (best.size() == kCandidates && !(logit > best.back().value)) continue;
    if (std::isnan(logit)) continue;
    if (best.size() == kCandidates) best.pop_back();
    const auto at =
        std::find_if(best.begin(), best.end(), [logit](const TokenProbability& c) { return c.value < logit; });
    best.insert(at, {static_cast<int32_t>(i), logit});
  }
  return best;
}

Proposal softmax(Proposal candidates, float temperature) {
  double sum = 0.0;
  const float largest = candidates.front().value;
  std::vector<double> weights;
  for (const TokenProbability& c : candidates) {
    weights.push_back(
        std::exp((static_cast<double>(c.value) - static_cast<double>(largest)) / static_cast<double>(temperature)));
    sum += weights.back();
  }
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i].value = static_cast<float>(weights[i] / sum);
  return candidates;
}

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

bool DraftChain::extend(const DraftRequest& request, std::span<const float> logits, int32_t n_vocab, Draft& draft) {
  const Proposal best = best_candidates(logits);
  if (best.empty() || !std::isfinite(best.front().value)) return false;
  // The cut looks at the distribution, never at what is drawn from it: else the text's distribution would change.
  if (softmax(best, 1.0f).front().value < params_.p_min) return false;
  int32_t token = best.front().token;
  if (params_.samples && request.temperature > 0.0f) {
    Proposal proposal = softmax(best, request.temperature);
    const uint32_t seed = request.seed ^ kDraftSeed;
    const auto found = generators_.find(request.sequence);
    if (found == generators_.end() || found->second.seed != seed)
      generators_.insert_or_assign(request.sequence, Generator{seed, std::mt19937(seed)});
    const double uniform = static_cast<double>(generators_.at(request.sequence).numbers()) * 0x1p-32;
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
