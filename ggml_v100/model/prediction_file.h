// Blocks of multi-token prediction in a file of their own, beside a model's file: both as one file.
#pragma once

#include <memory>

#include "gguf/gguf.h"

namespace v100 {

// `model` with the prediction blocks of `blocks`, in the place of any that it has itself. `blocks` describes the whole model:
// what it says of the number of blocks and of each of them counts, all else is the model's. Throws ModelError where the two
// do not belong together.
std::shared_ptr<const GgufFile> with_prediction_blocks(std::shared_ptr<const GgufFile> model,
                                                       std::shared_ptr<const GgufFile> blocks);

}  // namespace v100
