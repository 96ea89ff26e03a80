// The f32 kernels in AVX-512 and the table of all kernels of that instruction set; see kernels.h.
#include "cpu/lanes_avx512.h"
//
#include "cpu/float_kernels.h"
#include "cpu/recurrent_kernels.h"

namespace v100::cpu {

namespace {

constexpr Kernels all_kernels() {
  Kernels k = float_kernels("avx512");
  add_recurrent_kernels(k);
  k.quant = &kAvx512QuantKernels;
  return k;
}

}  // namespace

constinit const Kernels kAvx512Kernels = all_kernels();

}  // namespace v100::cpu
