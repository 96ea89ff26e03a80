// Barriers of warps that are at different places of the code, where __syncthreads must not be used. SM70.
#pragma once

#include "base.cuh"

namespace v100::cuda {

#ifdef V100_EMULATED
__device__ __forceinline__ void whole_block_barrier() { __syncthreads(); }
template <int kWarps>
__device__ __forceinline__ void first_warps_barrier() {
  emulated_cuda::first_threads_barrier(kWarps * kWarp);
}
#else
__device__ __forceinline__ void whole_block_barrier() { asm volatile("barrier.sync 0;" ::: "memory"); }
// Of the first warps of a block: the others are not waited for.
template <int kWarps>
__device__ __forceinline__ void first_warps_barrier() {
#ifdef V100_RACECHECK
  whole_block_barrier();
#else
  asm volatile("barrier.sync 1, %0;" ::"n"(kWarps * kWarp) : "memory");
#endif
}
#endif

// Where the other warps are meanwhile. Racecheck seems to count barriers, and where some warps have one more it takes accesses
// for a race that whole-block barriers keep apart. For it, and for nothing else, V100_RACECHECK has all warps wait.
__device__ __forceinline__ void other_warps_pass() {
#ifdef V100_RACECHECK
  whole_block_barrier();
#endif
}

}  // namespace v100::cuda
