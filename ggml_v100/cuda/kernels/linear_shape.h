// How the streaming kernels are launched (linear.cu). Host and device.
#pragma once

#include "params.h"

namespace v100::cuda {

constexpr int32_t kLinearThreads = 256;  // of a group: 8 warps, the parts of K of its tiles

// Tiles of 32 features that a group of a kernel for so many rows has; gated ones have one of the gate and one of up.
constexpr int32_t linear_tiles(int32_t most_rows) { return most_rows == 8 ? 1 : 2; }

// Groups that a launch needs. `tiles` as in LinearParams: of all jobs, or of the gate.
constexpr int32_t linear_groups(int32_t most_rows, int32_t tiles, bool gated) {
  const int32_t group_tiles = gated ? 1 : linear_tiles(most_rows);
  return (tiles + group_tiles - 1) / group_tiles;
}

// Groups that a block of a kernel may have; unit_bytes: of 32 weights, rounded down. Two where both fit into the registers of a
// multiprocessor, 128 for each thread: 64 rows, and 32 rows of F16, take more. For 8 rows activations are a few percent of what
// is read, and more blocks hide latency better.
constexpr int32_t most_linear_groups(int32_t most_rows, int32_t unit_bytes) {
  return most_rows == 16 || (most_rows == 32 && unit_bytes < 64) ? 2 : 1;
}

// Groups of a launch's blocks. Two read the same activations at about the same time, so half as many come from L2, which is what
// limits where a panel is larger than L1. But a multiprocessor has one such block at a time: with fewer than three groups for
// each, some would have twice the work of others. Items of experts are read by few blocks each; they stay at one.
constexpr int32_t linear_block_groups(int32_t most_rows, int32_t unit_bytes, int32_t groups, bool has_items,
                                      int32_t multiprocessors) {
  return !has_items && groups >= 3 * multiprocessors ? most_linear_groups(most_rows, unit_bytes) : 1;
}

// One row (linear_row.cu): as many blocks as two per multiprocessor, but all with the same number of tiles, or one less.
constexpr int32_t kRowBlocks = 2;
constexpr int32_t linear_row_blocks(int32_t tiles, int32_t multiprocessors) {
  const int32_t most = kRowBlocks * multiprocessors, of_each = (tiles + most - 1) / most;
  return of_each == 0 ? 0 : (tiles + of_each - 1) / of_each;
}

}  // namespace v100::cuda
