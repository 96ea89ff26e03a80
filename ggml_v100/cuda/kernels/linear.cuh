// What the kernels of linear layers for few and for many rows share: which weight a tile belongs to and how an output is made
// of its sum.
#pragma once

#include "base.cuh"

namespace v100::cuda {

// The job of a tile of the launch. Params has jobs and job[]; their tiles follow each other.
template <class Params>
__device__ __forceinline__ int job_of(const Params& p, int tile) {
  int job = 0;
  for (int j = 1; j < p.jobs; ++j)
    if (tile >= p.job[j].first_tile) job = j;
  return job;
}

// scale * W x + bias of one output, `bias` where the job has any; rounded after each step, as the reference does.
__device__ __forceinline__ float output_of(const LinearJob& job, float scale, float sum, float row_scale, float bias) {
  const float y = __fmul_rn(sum * row_scale, scale);
  return job.bias != nullptr ? __fadd_rn(y, bias) : y;
}

}  // namespace v100::cuda
