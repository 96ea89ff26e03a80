// Penalties change only tokens of the window: found by id in a whole row, by look-up from a narrowed list.
#include "sampling/penalties.h"

#include <algorithm>
#include <limits>

namespace v100 {

namespace {

float bounded(float value) {
  constexpr float kLargestFinite = std::numeric_limits<float>::max();
  return std::clamp(value, -kLargestFinite, kLargestFinite);
}

}  // namespace

void TokenWindow::append(std::span<const int32_t> tokens) {
  if (capacity_ == 0) return;
  if (tokens.size() > capacity_) tokens = tokens.last(capacity_);
  for (const int32_t token : tokens) {
    if (tokens_.size() < capacity_) {
      tokens_.push_back(token);
    } else {
      const auto leaving = counts_.find(tokens_[oldest_]);
      if (--leaving->second == 0) counts_.erase(leaving);
      tokens_[oldest_] = token;
      oldest_ = (oldest_ + 1) % capacity_;
    }
    ++counts_[token];
  }
}

void TokenWindow::clear() {
  oldest_ = 0;
  tokens_.clear();
  counts_.clear();
}

float Penalties::apply(float logit, int32_t count) const {
  if (logit == -std::numeric_limits<float>::infinity()) return logit;
  const float scaled = bounded(logit <= 0.0f ? logit * repeat : logit / repeat);
  const float subtracted = bounded(bounded(static_cast<float>(count) * frequency) + presence);
  return bounded(scaled - subtracted);
}

void apply_penalties(const Penalties& penalties, const TokenWindow& window, CandidateList& candidates) {
  const auto& counts = window.counts();
  if (candidates.is_whole_row()) {
    for (const auto& [token, count] : counts)
      candidates.set_logit(token, penalties.apply(candidates.logit(token), count));
  } else {
    for (Candidate& c : candidates.listed())
      if (const auto found = counts.find(c.token); found != counts.end())
        c.logit = penalties.apply(c.logit, found->second);
  }
  candidates.forget_order();
}

}  // namespace v100
