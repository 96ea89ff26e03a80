// The plain implementation of every operation: scalar, obvious, single-threaded where threads would not be plain. The oracle of all others.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace v100 {

std::unique_ptr<Backend> create_reference_backend();

}  // namespace v100
