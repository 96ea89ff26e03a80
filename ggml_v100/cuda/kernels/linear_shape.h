// How the streaming kernels are launched (linear.cu). Host and device.
#pragma once

#include "params.h"

namespace v100::cuda {

constexpr int32_t kLinearThreads = 256;

// Tiles of 32 features that a block of a kernel for so many rows has; gated ones have one of the gate and one of up.
constexpr int32_t linear_tiles(int32_t most_rows) { return most_rows == 8 ? 1 : 2; }

}  // namespace v100::cuda
