// The matrices of a launch: which of them a tile of the grid belongs to.
#pragma once

#include "base.cuh"

namespace v100::cuda {

// Params has jobs and job[]; their tiles follow each other.
template <class Params>
__device__ __forceinline__ int job_of(const Params& p, int tile) {
  int job = 0;
  for (int j = 1; j < p.jobs; ++j)
    if (tile >= p.job[j].first_tile) job = j;
  return job;
}

}  // namespace v100::cuda
