// The indexer of sparse attention on the CPU: keys of blocks, and the blocks that score best (ops/ops.h).
#pragma once

#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "ops/arena.h"
#include "ops/ops.h"

namespace v100::cpu {

void append_index(Tensor keys, const VectorWeight& w, float eps, const RopeTable& angles, const Rows& rows,
                  const KvLayer& index, const Kernels& kernels);

// Fills count [rows] and blocks [rows, most]. Scratch is taken from the arena and given back.
void choose_blocks(Tensor q, const Rows& rows, const KvLayer& index, int32_t heads, int32_t most, int32_t* count,
                   int32_t* blocks, const Kernels& kernels, Arena& arena, ThreadPool& pool);

}  // namespace v100::cpu
