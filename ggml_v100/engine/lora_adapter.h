// A LoRA adapter file, made ready for one loaded model. Immutable; engines share it.
//
// GGUF with general.type "adapter" and adapter.type "lora": for each adapted tensor of the model `<name>.lora_a` [in, R] and
// `<name>.lora_b` [R, out] (sizes in the file's order, with the experts behind them for a stack), R the rank of the
// adaptation. For embeddings A [R, vocab] is looked up like them; the output is not adapted by it, also where the model
// uses one matrix for both, since adapters are trained that way. Any type that decodes will do.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loaded_model.h"
#include "ops/adapted.h"

namespace v100 {

class LoraAdapter {
 public:
  // Throws GgufError; ModelError for a file that is no adapter of this model, naming the key or tensor; OutOfMemory.
  // n_threads: for packing; 0 = all cores.
  LoraAdapter(std::shared_ptr<const LoadedModel> model, const std::string& path, int32_t n_threads);

  const LoadedModel& model() const { return *model_; }
  const LowRankParts& parts(int32_t rank) const { return parts_[static_cast<size_t>(rank)]; }
  // What the file says to show and to put before prompts; empty where it says nothing.
  const std::string& task_name() const { return task_name_; }
  const std::string& prompt_prefix() const { return prompt_prefix_; }
  // Tells adapters apart: saved sequences of another one are refused by it.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  void load(const std::shared_ptr<const GgufFile>& file, int32_t n_threads);

  std::shared_ptr<const LoadedModel> model_;
  std::vector<LowRankParts> parts_;  // of each rank
  std::string task_name_, prompt_prefix_;
  uint64_t fingerprint_ = 0;
};

// A scale for each adapter of an engine, none of them all zeros: empty instead. How adapters are written wherever
// sequences are compared. Throws InvalidArgument for another count (none at all is allowed) or a scale that is not finite.
std::vector<float> normalised_scales(std::span<const float> scales, size_t n_adapters);

}  // namespace v100
