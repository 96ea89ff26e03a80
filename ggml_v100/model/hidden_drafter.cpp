// What all drafters on hidden states load, and their checks against the target.
#include "model/hidden_drafter.h"

#include <string>

#include "base/error.h"
#include "model/keys.h"

namespace v100 {

namespace {

std::vector<int32_t> read_target_layers(const Metadata& metadata, const Keys& keys) {
  const std::string key = keys.full("target_layers");
  const auto count = metadata.find_array_size(key);
  if (!count || *count < 1 || *count > 64) throw ModelError(key + " is missing, or is not a list of 1 to 64 layers");
  std::vector<int32_t> layers = keys.per_layer("target_layers", static_cast<int32_t>(*count), {}, 0, 512);
  layers.resize(*count);
  return layers;
}

}  // namespace

HiddenDrafter::HiddenDrafter(const Metadata& metadata, const WeightLoader& weights)
    : hp_(read_hyperparameters(metadata)), target_layers_(read_target_layers(metadata, Keys(metadata))) {
  if (weights.has("token_embd.weight")) token_embd_ = weights.embedding("token_embd", hp_.hidden, hp_.vocab);
  if (weights.has("output.weight")) {
    draft_tokens_ = weights.token_ids("d2t", hp_.vocab);
    head_ = weights.linear("output", hp_.hidden, head_rows());
  }
}

Tensor HiddenDrafter::embed(Ops& ops, const TextModel& target, std::span<const int32_t> tokens) const {
  return has_embeddings() ? ops.embed(tokens, token_embd_) : target.embed(ops, tokens);
}

Tensor HiddenDrafter::head(Ops& ops, const TextModel& target, Tensor states) const {
  return has_head() ? ops.linear(states, head_) : target.head(ops, states);
}

void HiddenDrafter::differ(const char* what, int32_t drafter_has, int32_t target_has) {
  throw ModelError("the drafter does not belong to this model: its " + std::string(what) + " is " +
                   std::to_string(drafter_has) + ", the model's " + std::to_string(target_has));
}

void HiddenDrafter::require_vocabulary_and_layers(const TextModel& target, int32_t layers) const {
  const Hyperparameters& theirs = target.hyperparameters();
  if (hp_.vocab != theirs.vocab) differ("vocabulary", hp_.vocab, theirs.vocab);
  for (const int32_t layer : target_layers_)
    if (layer >= layers)
      throw ModelError("the drafter does not belong to this model: it wants the input of layer " +
                       std::to_string(layer) + " of " + std::to_string(theirs.layers));
}

}  // namespace v100
