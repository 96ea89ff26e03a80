// Linear layers on packed weights: rounding of the input, splitting of the work, tails and biases.
#pragma once

#include <span>

#include "base/thread_pool.h"
#include "cpu/kernels.h"
#include "cpu/packed_weight.h"
#include "ops/arena.h"

namespace v100::cpu {

// One product y = W x (+ bias), or y = act(W x + bias) * (W_up x + bias_up) with `up`. Both weights have one shape.
struct LinearJob {
  const Linear* layer = nullptr;
  const Linear* up = nullptr;
  Activation activation = Activation::silu;
  Tensor y{};
};

// All jobs read the same x, which is rounded once per kind of panel. Scratch is taken from the arena and given back.
void run_linear_jobs(Tensor x, std::span<const LinearJob> jobs, const Kernels& kernels, Arena& arena, ThreadPool& pool);

}  // namespace v100::cpu
