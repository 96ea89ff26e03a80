// A model as the ranks of a placement have it: of each its part, and on one of them the drafter that came with the model.
// The one way from files to weights, whether they are packed or only measured.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gguf/metadata.h"
#include "model/loader.h"
#include "model/model.h"
#include "parallel/placement.h"

namespace v100 {

struct ModelFiles {
  std::shared_ptr<const GgufFile> model;
  std::shared_ptr<const GgufFile> drafter;  // nullptr: none
  bool load_mtp = false;
  bool check_values = false;
};

struct RankModel {
  std::unique_ptr<TextModel> text;
  std::vector<std::shared_ptr<const WeightOrigin>> origins;  // of the model's matrices and embedding tables
  size_t packed_bytes = 0, vector_bytes = 0;                 // the drafter's included
};

// metadata: of the model. backends: of the ranks. Throws ModelError, GgufError, InvalidArgument, OutOfMemory.
std::vector<RankModel> load_ranks(const ModelFiles& files, const Metadata& metadata, const Placement& placement,
                                  const std::vector<const Backend*>& backends, ThreadPool& pool, LoadFor purpose);

}  // namespace v100
