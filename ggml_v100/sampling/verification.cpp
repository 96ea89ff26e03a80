// Match and rejection.
#include "sampling/verification.h"

#include <algorithm>

namespace v100 {

namespace {

double probability_of(int32_t token, std::span<const TokenProbability> candidates) {
  for (const TokenProbability& candidate : candidates)
    if (candidate.token == token) return static_cast<double>(candidate.value);
  return 0.0;
}

}  // namespace

int32_t draw_residual(std::span<const TokenProbability> p, const Proposal& q, double uniform) {
  std::vector<double> residual;
  double sum = 0.0;
  for (const TokenProbability& candidate : p) {
    residual.push_back(std::max(0.0, static_cast<double>(candidate.value) - probability_of(candidate.token, q)));
    sum += residual.back();
  }
  if (sum <= 0.0) {  // p is q, up to rounding
    residual.clear();
    for (const TokenProbability& candidate : p) {
      residual.push_back(static_cast<double>(candidate.value));
      sum += residual.back();
    }
  }
  double reached = 0.0;
  size_t drawn = 0;
  for (size_t i = 0; i < residual.size(); ++i) {
    if (residual[i] <= 0.0) continue;
    drawn = i;  // the last one, should rounding leave the sum short
    reached += residual[i];
    if (reached > uniform * sum) break;
  }
  return p[drawn].token;
}

bool Verification::ends_text(int32_t token) const {
  return std::find(ends_.begin(), ends_.end(), token) != ends_.end();
}

int32_t Verification::accept_or_redraw(const LogitsRow& logits, int32_t drafted, const Proposal& proposal) const {
  const std::vector<TokenProbability> p = sampler_.distribution(logits);
  const double q = probability_of(drafted, proposal);
  if (q > 0.0 && sampler_.next_uniform() * q < probability_of(drafted, p)) return drafted;
  return draw_residual(p, proposal, sampler_.next_uniform());
}

int32_t Verification::draw(const LogitsRow& logits) const {
  const auto row = static_cast<size_t>(n_accepted_);
  if (row < draft_.size() && synthetic_ != nullptr) {
    const double rate = row < synthetic_->rates.size() ? synthetic_->rates[row] : 0.0;
    const double uniform = static_cast<double>(synthetic_->generator()) * 0x1p-32;
    if (uniform < rate && !ends_text(draft_[row])) return draft_[row];
    return sampler_.sample(logits);
  }
  if (row < draft_.size() && row < proposals_.size() && sampler_.draws_from_distribution())
    return accept_or_redraw(logits, draft_[row], proposals_[row]);
  return sampler_.sample(logits);
}

int32_t Verification::next(const LogitsRow& logits) {
  const auto row = static_cast<size_t>(n_accepted_);
  if (!masks_.empty()) {
    const size_t words = masks_.size() / (draft_.size() + 1);
    sampler_.set_mask(masks_.subspan(row * words, words));
  }
  const int32_t token = draw(logits);
  sampler_.accept({&token, 1});
  if (row < draft_.size() && token == draft_[row] && !ends_text(token))
    ++n_accepted_;
  else
    is_decided_ = true;
  return token;
}

}  // namespace v100
