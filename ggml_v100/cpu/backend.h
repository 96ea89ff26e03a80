// The CPU backend: packed weights and vector kernels per instruction set, chosen at run time.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// "generic" always; "avx2", "avx512" (F, BW, DQ, VL, VNNI) where this machine has them. Best last.
std::vector<std::string> available_cpu_instruction_sets();

// Throws InvalidArgument for a name that is not available here.
std::unique_ptr<Backend> create_cpu_backend(std::string_view instruction_set);

}  // namespace v100
