// Logic of three operands as one instruction. The compiler makes two of (word & mask) | bits when mask and bits are both
// constants, since an instruction has room for one; written so, it keeps the other in a register.
#pragma once

#include "base.cuh"

namespace v100::cuda {

// (word & mask) | bits. SM50.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t and_or(uint32_t word, uint32_t bits) {
#ifdef V100_EMULATED
  return (word & kMask) | bits;
#else
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "n"(kMask), "r"(bits));
  return result;
#endif
}

}  // namespace v100::cuda
