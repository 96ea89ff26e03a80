// The k largest of each row with their indices, in passes: candidates for sampling.
//
// Shapes    TopKParams; grid (n / 2048 rounded up, rows). A block sorts 2048 keys in shared memory and keeps the first `kept`;
//           passes repeat over what is kept until one block has all.
// Layout    A key is 64 bits: the value's bits in an order that integers compare, then the index with all bits flipped. So
//           larger keys have larger values and, of equal ones, lower indices, and any sorting gives the same result.
// Bound     first pass: 4 bytes per logit from DRAM or L2, 66 steps of a bitonic sort: about 12 us per wave of 160 blocks.
// Budget    top_k              512 threads, <= 40 registers, 16384 B shared
// Numerics  exact. NaN counts as -infinity, -0 as 0.
#include "base.cuh"

namespace v100::cuda {

constexpr int kThreads = 512;
constexpr int kChunk = 2048;

__device__ __forceinline__ uint64_t key_of(float value, int index) {
  if (value != value) value = __uint_as_float(0xff800000u);  // -infinity
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t ordered = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(index);
}
__device__ __forceinline__ float value_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered >> 31 != 0 ? ordered & 0x7fffffffu : ~ordered);
}

extern "C" __global__ void __launch_bounds__(kThreads) top_k(TopKParams p) {
  __shared__ uint64_t keys[kChunk];
  const int chunk = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.y;
  for (int i = thread; i < kChunk; i += kThreads) {
    const int at = chunk * kChunk + i;
    keys[i] = at >= p.n             ? 0  // below all that are there
              : p.logits != nullptr ? key_of(p.logits[row * p.n + at], at)
                                    : p.keys[row * p.n + at];
  }
  __syncthreads();  // the keys written above are sorted below

  // Bitonic, the largest first: runs of `run` keys fall and rise in turns.
#pragma unroll 1
  for (int run = 2; run <= kChunk; run *= 2)
#pragma unroll 1
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int pair = thread; pair < kChunk / 2; pair += kThreads) {
        const int low = pair / apart * 2 * apart + pair % apart, high = low + apart;
        const uint64_t a = keys[low], b = keys[high];
        if (((low & run) == 0) == (a < b)) keys[low] = b, keys[high] = a;
      }
      __syncthreads();  // pairs of the next step are others
    }

  for (int i = thread; i < p.kept; i += kThreads) {
    const uint64_t key = keys[i];
    if (p.kept_keys != nullptr) p.kept_keys[(row * gridDim.x + chunk) * p.kept + i] = key;
    if (p.values != nullptr) {
      p.values[row * p.kept + i] = value_of(key);
      p.indices[row * p.kept + i] = static_cast<int32_t>(~static_cast<uint32_t>(key));
    }
  }
}

}  // namespace v100::cuda
