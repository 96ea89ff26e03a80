// Loading of the head of DSpark drafters.
#include "model/markov_head.h"

#include "base/error.h"
#include "model/keys.h"

namespace v100 {

MarkovHead::MarkovHead(const Metadata& metadata, const WeightLoader& weights, int32_t hidden, int32_t vocab,
                       int32_t width) {
  const int32_t rank = weights.columns("markov_w1.weight");
  before_ = weights.embedding("markov_w1", rank, vocab);
  after_ = weights.linear("markov_w2", rank, width);
  // Files without the key have the head if they have its weights.
  const std::string key = Keys(metadata).full("has_confidence_head");
  const auto declared = metadata.find_bool(key);
  if (declared.value_or(false) && !weights.has("conf_proj.weight"))
    throw ModelError(key + " is true, but there is no tensor conf_proj.weight");
  if (declared.value_or(weights.has("conf_proj.weight"))) confidence_ = weights.linear("conf_proj", hidden + rank, 1);
}

}  // namespace v100
