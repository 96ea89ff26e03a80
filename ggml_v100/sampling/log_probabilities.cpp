// Log probabilities of the raw logits: value - largest - ln(sum), so that large logits lose no digits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"
#include "sampling/row_scan.h"
#include "sampling/sampler.h"

namespace v100 {

namespace {

struct Normaliser {
  double largest, log_sum;  // apart, because a large `largest` would swallow digits of the sum
};

Normaliser normaliser(std::span<const float> logits) {
  const float largest = largest_checked(logits);
  if (largest == -std::numeric_limits<float>::infinity())
    throw InvalidArgument("log probabilities of a row of " + std::to_string(logits.size()) +
                          " logits that are all -inf; expected at least one finite value");
  return {largest, std::log(sum_exp(logits, largest))};
}

}  // namespace

LogProbabilities log_probabilities(std::span<const float> logits, int32_t token, int32_t n_top) {
  if (token < 0 || static_cast<size_t>(token) >= logits.size())
    throw InvalidArgument("log probability of token " + std::to_string(token) + "; expected 0 to " +
                          std::to_string(static_cast<int64_t>(logits.size()) - 1));
  if (n_top < 0)
    throw InvalidArgument("number of most likely tokens is " + std::to_string(n_top) + "; expected 0 or more");

  const Normaliser row = normaliser(logits);
  const auto log_probability = [&](float logit) {
    const double value = static_cast<double>(logit) - row.largest - row.log_sum;
    return static_cast<float>(std::max(value, -static_cast<double>(std::numeric_limits<float>::max())));
  };

  LogProbabilities result;
  result.chosen = log_probability(logits[static_cast<size_t>(token)]);
  std::vector<Candidate> top;
  select_first(logits, static_cast<size_t>(n_top), top);
  result.top.reserve(top.size());
  for (const Candidate& c : top) result.top.push_back({c.token, log_probability(c.logit)});
  return result;
}

double log_sum_exp(std::span<const float> logits) {
  const Normaliser row = normaliser(logits);
  return row.largest + row.log_sum;
}

}  // namespace v100
