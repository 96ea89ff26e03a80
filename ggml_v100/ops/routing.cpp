// Top-k by insertion: k is 2 to 10, and nearly every expert fails the first comparison.
#include "ops/routing.h"

#include <algorithm>
#include <limits>

#include "base/math.h"

namespace v100 {

namespace {

constexpr float kLeastTotal = 0x1p-14f;

// The nearest finite number, the lowest for NaN: a total order, and differences that are numbers.
float finite(float logit) {
  constexpr float kLowest = std::numeric_limits<float>::lowest(), kHighest = std::numeric_limits<float>::max();
  return logit > kLowest ? std::min(logit, kHighest) : kLowest;
}

}  // namespace

void route_row(std::span<const float> logits, std::span<int32_t> expert, std::span<float> weight) {
  size_t chosen = 0;
  for (size_t e = 0; e < logits.size(); ++e) {
    size_t at = chosen;
    while (at > 0 && finite(logits[e]) > finite(logits[static_cast<size_t>(expert[at - 1])])) --at;
    if (at == expert.size()) continue;
    if (chosen < expert.size()) ++chosen;
    std::copy_backward(expert.begin() + at, expert.begin() + (chosen - 1), expert.begin() + chosen);
    expert[at] = static_cast<int32_t>(e);
  }
  const auto power = [&, largest = finite(logits[static_cast<size_t>(expert[0])])](size_t e) {
    return exp_f32(finite(logits[e]) - largest);
  };
  float partial[16] = {};
  for (size_t e = 0; e < logits.size(); ++e) partial[e % 16] += power(e);
  const float all = sum_of_16(partial);
  float total = 0;
  for (size_t j = 0; j < expert.size(); ++j) {
    weight[j] = power(static_cast<size_t>(expert[j])) / all;
    total += weight[j];
  }
  for (float& w : weight) w /= std::max(total, kLeastTotal);
}

}  // namespace v100
