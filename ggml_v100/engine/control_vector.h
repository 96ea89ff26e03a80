// Control vectors (representation engineering, Zou et al. 2023): directions that are added to the residual stream.
//
// GGUF files with tensors `direction.<N>` [hidden], added after layer N (from 0; layer 0 has none). Of any type that
// decodes; several files add up.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/loaded_model.h"

namespace v100 {

struct ControlVectorFile {
  std::string path;
  float scale = 1.0f;
};

class ControlVector {
 public:
  // first, last: layers to which directions are added, both included; 0: from layer 1, or to the last one. Throws
  // GgufError; ModelError for files that do not fit the model, or a model without one residual stream; InvalidArgument
  // for a range the model does not have and a scale that is not finite.
  ControlVector(const LoadedModel& model, const std::vector<ControlVectorFile>& files, int32_t first, int32_t last);

  // One for each layer, [hidden] or empty.
  const std::vector<std::vector<float>>& directions() const { return directions_; }
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<std::vector<float>> directions_;
  uint64_t fingerprint_ = 0;
};

}  // namespace v100
