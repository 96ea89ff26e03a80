// What a model and an engine take of each device, found from the file's header alone: nothing is packed or allocated.
//
// Weights, pages and states are exact: they are what loading would make. The memory of a forward pass is an estimate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/loaded_model.h"

namespace v100 {

struct RankNeeds {
  std::string device;
  size_t weights = 0;  // matrices and vectors
  size_t kv = 0;       // pages
  size_t states = 0;   // recurrent ones
  size_t compute = 0;  // of the largest ubatch, estimated

  size_t total() const { return weights + kv + states + compute; }
};

class MemoryNeeds {
 public:
  // params: of the model; their placement is not used. Throws GgufError, ModelError.
  explicit MemoryNeeds(const ModelParams& params);

  const Metadata& metadata() const { return metadata_; }
  const Hyperparameters& hyperparameters() const { return hyperparameters_; }
  // Of each rank that the placement makes. Of `engine` the sizes and types are used. Throws what loading the model and
  // making the engine would throw: ModelError, InvalidArgument.
  std::vector<RankNeeds> of(const PlacementParams& placement, const EngineParams& engine);

 private:
  const Backend& backend(const std::string& device);

  ModelParams params_;
  std::shared_ptr<const GgufFile> file_, drafter_;
  Metadata metadata_;
  Hyperparameters hyperparameters_;
  std::map<std::string, std::unique_ptr<Backend>> backends_;  // by device
};

}  // namespace v100
