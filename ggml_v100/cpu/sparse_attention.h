// Attention over chosen blocks of tokens on the CPU (ops/ops.h, sparse_attention).
#pragma once

#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "ops/arena.h"
#include "ops/ops.h"

namespace v100::cpu {

// q [rows, heads * head_dim_k] -> y [rows, heads * head_dim_v]. Scratch is taken from the arena and given back.
void run_sparse_attention(Tensor q, const Rows& rows, const BlockChoice& choice, const KvLayer& layer, int32_t heads,
                          float scale, Tensor y, const Kernels& kernels, Arena& arena, ThreadPool& pool);

}  // namespace v100::cpu
