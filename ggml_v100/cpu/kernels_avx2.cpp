// The f32 kernels in AVX2 and the table of all kernels of that instruction set; see kernels.h.
#include "cpu/lanes_avx2.h"
//
#include "cpu/float_kernels.h"
#include "cpu/recurrent_kernels.h"

namespace v100::cpu {

namespace {

constexpr Kernels all_kernels() {
  Kernels k = float_kernels("avx2");
  add_recurrent_kernels(k);
  k.quant = &kAvx2QuantKernels;
  return k;
}

}  // namespace

constinit const Kernels kAvx2Kernels = all_kernels();

}  // namespace v100::cpu
