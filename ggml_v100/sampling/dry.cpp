// Repetitions come from the Z-function of the reversed history, in time linear in its length.
#include "sampling/dry.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace v100 {

namespace {

// z[k]: length of the longest common beginning of `text` and `text` from k on. z[0] is 0, nobody asks for it.
std::vector<size_t> common_beginnings(std::span<const int32_t> text) {
  std::vector<size_t> z(text.size(), 0);
  size_t left = 0, right = 0;  // [left, right): the match found so far that reaches farthest
  for (size_t k = 1; k < text.size(); ++k) {
    if (k < right) z[k] = std::min(right - k, z[k - left]);
    while (k + z[k] < text.size() && text[z[k]] == text[k + z[k]]) ++z[k];
    if (k + z[k] > right) {
      left = k;
      right = k + z[k];
    }
  }
  return z;
}

}  // namespace

DryBreakers::DryBreakers(const std::vector<DryBreaker>& breakers) {
  for (const DryBreaker& breaker : breakers) tails_[breaker.head].push_back(breaker.tail);
}

ptrdiff_t DryBreakers::longest_tail(std::span<const int32_t> newest_first, size_t i) const {
  ptrdiff_t longest = -1;
  const auto found = tails_.find(newest_first[i]);
  if (found == tails_.end()) return longest;
  for (const std::vector<int32_t>& tail : found->second) {
    if (tail.size() > i || static_cast<ptrdiff_t>(tail.size()) <= longest) continue;
    // In text order the tail follows its head, which in this order are the tokens before it, going back.
    if (std::equal(tail.begin(), tail.end(), std::reverse_iterator(newest_first.begin() + static_cast<ptrdiff_t>(i))))
      longest = static_cast<ptrdiff_t>(tail.size());
  }
  return longest;
}

bool DryBreakers::is_single(int32_t token) const {
  const auto found = tails_.find(token);
  return found != tails_.end() &&
         std::any_of(found->second.begin(), found->second.end(), [](const auto& tail) { return tail.empty(); });
}

void DryHistory::append(std::span<const int32_t> tokens) {
  if (tokens.size() > capacity_) tokens = tokens.last(capacity_);
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  if (tokens_.size() / 2 >= capacity_)
    tokens_.erase(tokens_.begin(), tokens_.end() - static_cast<ptrdiff_t>(capacity_));
}

std::vector<int32_t> DryHistory::newest_first() const {
  const size_t n = std::min(tokens_.size(), capacity_);
  return {tokens_.rbegin(), tokens_.rbegin() + static_cast<ptrdiff_t>(n)};
}

std::unordered_map<int32_t, size_t> repetitions(std::span<const int32_t> newest_first, size_t allowed_length,
                                                const DryBreakers& breakers) {
  std::unordered_map<int32_t, size_t> result;
  if (newest_first.size() <= allowed_length) return result;
  size_t limit = newest_first.size();
  for (size_t i = 0; i < newest_first.size(); ++i) {
    if (const ptrdiff_t tail = breakers.longest_tail(newest_first, i); tail >= 0) {
      limit = i - static_cast<size_t>(tail);
      break;
    }
  }
  if (limit < allowed_length) return result;
  const std::vector<size_t> z = common_beginnings(newest_first);
  for (size_t k = 1; k < newest_first.size(); ++k) {
    const size_t length = std::min(limit, z[k]);
    if (length < allowed_length) continue;
    size_t& longest = result.try_emplace(newest_first[k - 1], 0).first->second;
    longest = std::max(longest, length);
  }
  return result;
}

void apply_dry(const DryParams& params, const DryHistory& history, const DryBreakers& breakers,
               CandidateList& candidates) {
  constexpr float kLargestFinite = std::numeric_limits<float>::max();
  const size_t allowed = static_cast<size_t>(params.allowed_length);
  // base^exponent stays finite up to here: ln of the largest f32, about 88.72, over ln base.
  const bool grows = params.base > 1.000001f;
  const size_t largest_exponent = grows ? static_cast<size_t>(88.7228391f / std::log(params.base)) : 0;
  const auto penalised = [&](float logit, size_t length) {
    const size_t exponent = grows ? std::min(length - allowed, largest_exponent) : length - allowed;
    const float penalty = params.multiplier * std::pow(params.base, static_cast<float>(exponent));
    if (logit == -std::numeric_limits<float>::infinity()) return logit;
    return std::clamp(logit - std::clamp(penalty, -kLargestFinite, kLargestFinite), -kLargestFinite, kLargestFinite);
  };

  const auto lengths = repetitions(history.newest_first(), allowed, breakers);
  if (candidates.is_whole_row()) {
    for (const auto& [token, length] : lengths)
      if (!breakers.is_single(token)) candidates.set_logit(token, penalised(candidates.logit(token), length));
  } else {
    for (Candidate& c : candidates.listed())
      if (const auto found = lengths.find(c.token); found != lengths.end() && !breakers.is_single(c.token))
        c.logit = penalised(c.logit, found->second);
  }
  candidates.forget_order();
}

}  // namespace v100
