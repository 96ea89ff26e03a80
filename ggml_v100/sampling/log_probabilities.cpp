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

Normaliser normaliser(const LogitsRow& logits) {
  const float largest = logits.is_whole() ? largest_checked(logits.all()) : logits.largest().front().logit;
  if (largest == -std::numeric_limits<float>::infinity())
    throw InvalidArgument("log probabilities of a row of " + std::to_string(logits.n_vocab()) +
                          " logits that are all -inf; expected at least one finite value");
  return {largest, std::log(logits.is_whole() ? sum_exp(logits.all(), largest) : logits.sum())};
}

float logit_of(const LogitsRow& logits, int32_t token) {
  if (logits.is_whole()) return logits.all()[static_cast<size_t>(token)];
  for (const Candidate& c : logits.part())
    if (c.token == token) return c.logit;
  throw InvalidArgument("log probability of token " + std::to_string(token) + ", which the part of the row has not");
}

}  // namespace

LogProbabilities log_probabilities(const LogitsRow& logits, int32_t token, int32_t n_top) {
  if (token < 0 || static_cast<size_t>(token) >= logits.n_vocab())
    throw InvalidArgument("log probability of token " + std::to_string(token) + "; expected 0 to " +
                          std::to_string(static_cast<int64_t>(logits.n_vocab()) - 1));
  if (n_top < 0)
    throw InvalidArgument("number of most likely tokens is " + std::to_string(n_top) + "; expected 0 or more");

  const Normaliser row = normaliser(logits);
  const auto log_probability = [&](float logit) {
    const double value = static_cast<double>(logit) - row.largest - row.log_sum;
    return static_cast<float>(std::max(value, -static_cast<double>(std::numeric_limits<float>::max())));
  };

  LogProbabilities result;
  result.chosen = log_probability(logit_of(logits, token));
  std::vector<Candidate> top;
  if (logits.is_whole()) {
    select_first(logits.all(), static_cast<size_t>(n_top), top);
  } else {
    const size_t kept = std::min(static_cast<size_t>(n_top), logits.largest().size());
    top.assign(logits.largest().begin(), logits.largest().begin() + static_cast<ptrdiff_t>(kept));
  }
  result.top.reserve(top.size());
  for (const Candidate& c : top) result.top.push_back({c.token, log_probability(c.logit)});
  return result;
}

double log_sum_exp(std::span<const float> logits) {
  const Normaliser row = normaliser(logits);
  return row.largest + row.log_sum;
}

}  // namespace v100
