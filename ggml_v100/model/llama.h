// `llama`: Llama 2/3, SmolLM, TinyLlama, Mistral (dense).
#pragma once

#include <memory>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

std::unique_ptr<TextModel> load_llama(Hyperparameters hp, const WeightLoader& weights);

}  // namespace v100
