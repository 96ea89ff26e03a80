// The table of architectures this build can run.
#pragma once

#include <memory>

#include "model/loader.h"
#include "model/model.h"

namespace v100 {

// Throws ModelError for an architecture that is not in the table, listing those that are.
std::unique_ptr<TextModel> load_architecture(const Metadata& metadata, const WeightLoader& weights);

}  // namespace v100
