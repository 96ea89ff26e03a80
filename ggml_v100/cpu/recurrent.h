// Recurrent layers on the CPU: sharing out of sequences, heads and channels. Rows of one sequence follow each other.
#pragma once

#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "ops/arena.h"
#include "ops/ops.h"

namespace v100::cpu {

// y [rows, channels] of Ops::causal_conv_silu.
void run_causal_conv(Tensor x, const ConvWeight& w, const Rows& rows, const StateRecords& history, Tensor y,
                     const Kernels& kernels, ThreadPool& pool);

// y [rows, value_size] of Ops::delta_net. Scratch is taken from the arena and given back.
void run_delta_net(Tensor qkv, Tensor beta, Tensor alpha, const DeltaNet& w, float eps, const Rows& rows,
                   const StateRecords& memory, Tensor y, const Kernels& kernels, Arena& arena, ThreadPool& pool);

}  // namespace v100::cpu
