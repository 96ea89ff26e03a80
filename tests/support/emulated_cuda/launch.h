// Launches of emulated kernels: what the driver library sees of the executor.
#pragma once

#include <string>

#include "executor.h"

namespace emulated_cuda {

struct Launch {
  const Kernel* kernel;
  const Unit* unit;
  const void* parameter;
  Index grid, block;
  unsigned shared_bytes;
};

// Runs all blocks. The text of what went wrong, empty for success.
std::string run(const Launch& launch);

// Where an address lies that a kernel may not touch. Of the driver library, which knows the allocations.
std::string describe_address(const void* address);

}  // namespace emulated_cuda
