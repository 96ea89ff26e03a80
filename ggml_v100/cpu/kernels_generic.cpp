// The f32 kernels in plain C++ and the table of all kernels of that instruction set; see kernels.h.
#include "cpu/lanes_generic.h"
//
#include "cpu/float_kernels.h"
#include "cpu/recurrent_kernels.h"

namespace v100::cpu {

namespace {

constexpr Kernels all_kernels() {
  Kernels k = float_kernels("generic");
  add_recurrent_kernels(k);
  k.quant = &kGenericQuantKernels;
  return k;
}

}  // namespace

constinit const Kernels kGenericKernels = all_kernels();

}  // namespace v100::cpu
