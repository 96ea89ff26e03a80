// Kernels for AVX2 with FMA and F16C. Compiled with the flags of that instruction set; see kernels.h.
#include "cpu/lanes_avx2.h"
//
#include "cpu/coded_dot.h"
#include "cpu/float_kernels.h"
#include "cpu/quant_dot_avx2.h"

namespace v100::cpu {

namespace {

constexpr Kernels all_kernels() {
  Kernels k = float_kernels("avx2");
  k.tile_rows = kTileRows;
  add_coded_kernels(k);
  k.quant_dot[static_cast<int>(PanelKind::q8_0)] = quant_dot<Q8_0>;
  k.quant_dot[static_cast<int>(PanelKind::q4_0)] = quant_dot<Q4_0>;
  k.quant_dot[static_cast<int>(PanelKind::q4_1)] = quant_dot<Q4_1>;
  k.quant_dot[static_cast<int>(PanelKind::q5_0)] = quant_dot<Q5_0>;
  k.quant_dot[static_cast<int>(PanelKind::q5_1)] = quant_dot<Q5_1>;
  k.quant_dot[static_cast<int>(PanelKind::q4_K)] = quant_dot<Q4_K>;
  k.quant_dot[static_cast<int>(PanelKind::q6_K)] = quant_dot<Q6_K>;
  return k;
}

}  // namespace

constinit const Kernels kAvx2Kernels = all_kernels();

}  // namespace v100::cpu
