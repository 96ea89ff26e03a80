// One row per architecture: name in general.architecture and the function that loads it.
#include "model/architectures.h"

#include "base/error.h"
#include "model/families.h"

namespace v100 {

namespace {

using Load = std::unique_ptr<TextModel> (*)(const Metadata&, const WeightLoader&);

struct Architecture {
  const char* name;
  Load load;
};

constexpr Architecture kArchitectures[] = {
    {"gemma3", load_gemma3}, {"llama", load_llama},         {"qwen2", load_qwen2},       {"qwen3", load_qwen3},
    {"qwen35", load_qwen35}, {"qwen35moe", load_qwen35moe}, {"qwen3moe", load_qwen3moe}, {"qwen4exp", load_qwen4exp},
};

}  // namespace

std::unique_ptr<TextModel> load_architecture(const Metadata& metadata, const WeightLoader& weights) {
  const std::string name = metadata.require_string("general.architecture");
  if (name == "dflash" || name == "eagle3")
    throw ModelError("the file is a drafter; it speeds up another model (--spec-draft-model) and cannot run alone");
  // Encoders, whose tokens see those after them too; answering causally would be answering wrongly.
  if (!metadata.find_bool(name + ".attention.causal").value_or(true))
    throw ModelError(name + ".attention.causal is false: models whose tokens see later ones are not supported");
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    if (name == architecture.name) return architecture.load(metadata, weights);
    known += (known.empty() ? "" : ", ") + std::string(architecture.name);
  }
  throw ModelError("architecture '" + name + "' is not supported yet; supported: " + known);
}

}  // namespace v100
