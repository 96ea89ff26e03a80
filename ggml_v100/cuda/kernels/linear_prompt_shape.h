// How the product of a prompt is cut into blocks (linear_prompt.cu). Host and device.
#pragma once

#include "params.h"

namespace v100::cuda {

struct PromptTile {
  int32_t rows, columns, threads;  // columns: output features, of gate and up together
  int32_t blocks_per_sm;
};
constexpr PromptTile kWideTile = {128, 256, 256, 1}, kNarrowTile = {64, 128, 128, 3};

// The grid of a launch. `tiles` as in LinearParams: 32 features each, of all jobs, or of the gate.
constexpr int32_t prompt_blocks(PromptTile tile, int32_t rows, int32_t tiles, bool gated) {
  const int32_t block_tiles = tile.columns / (gated ? 64 : 32);
  return (rows + tile.rows - 1) / tile.rows * ((tiles + block_tiles - 1) / block_tiles);
}

// Whether wide tiles are faster. An SM has one at a time, for a whole wave; a narrow one is a quarter of the work and loads and
// decodes twice as much for it, which costs about a quarter of its speed.
constexpr bool prompt_is_wide(int32_t rows, int32_t tiles, bool gated, int32_t multiprocessors) {
  const auto waves = [&](PromptTile tile) {
    return (prompt_blocks(tile, rows, tiles, gated) + multiprocessors - 1) / multiprocessors;
  };
  return 3 * waves(kWideTile) <= waves(kNarrowTile);
}

}  // namespace v100::cuda
