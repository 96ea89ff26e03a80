// Shares in f64, generators by sequence.
#include "speculative/drawing.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace v100 {

Proposal softmax(Proposal candidates, float temperature) {
  const auto by_value = [](const TokenProbability& a, const TokenProbability& b) { return a.value < b.value; };
  const double largest = std::max_element(candidates.begin(), candidates.end(), by_value)->value;
  double sum = 0.0;
  std::vector<double> weights;
  for (const TokenProbability& c : candidates) {
    weights.push_back(std::exp((static_cast<double>(c.value) - largest) / static_cast<double>(temperature)));
    sum += weights.back();
  }
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i].value = static_cast<float>(weights[i] / sum);
  return candidates;
}

uint32_t DraftNumbers::next(int32_t sequence, uint32_t seed) {
  seed ^= salt_;
  const auto found = generators_.find(sequence);
  if (found == generators_.end() || found->second.seed != seed)
    generators_.insert_or_assign(sequence, Generator{seed, std::mt19937(seed)});
  return static_cast<uint32_t>(generators_.at(sequence).numbers());
}

}  // namespace v100
