// How the streaming kernels are launched (linear.cu). Host and device.
#pragma once

#include "params.h"

namespace v100::cuda {

constexpr int32_t kLinearThreads = 256;

// Tiles of 32 features that a block of a kernel for so many rows has; gated ones have one of the gate and one of up.
constexpr int32_t linear_tiles(int32_t most_rows) { return most_rows == 8 ? 1 : 2; }

// One row (linear_row.cu): as many blocks as two per multiprocessor, but all with the same number of tiles, or one less.
constexpr int32_t kRowBlocks = 2;
constexpr int32_t linear_row_blocks(int32_t tiles, int32_t multiprocessors) {
  const int32_t most = kRowBlocks * multiprocessors, of_each = (tiles + most - 1) / most;
  return of_each == 0 ? 0 : (tiles + of_each - 1) / of_each;
}

}  // namespace v100::cuda
