// The architectures' loaders, one file each. All throw ModelError naming the key or tensor that does not fit.
#pragma once

#include <memory>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

std::unique_ptr<TextModel> load_gemma3(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_llama(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen2(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen3(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen3moe(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen35(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen35moe(const Metadata& metadata, const WeightLoader& weights);
std::unique_ptr<TextModel> load_qwen4exp(const Metadata& metadata, const WeightLoader& weights);

}  // namespace v100
