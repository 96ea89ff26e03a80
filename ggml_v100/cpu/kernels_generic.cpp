// Kernels in plain C++ for any processor.
#include "cpu/lanes_generic.h"
//
#include "cpu/coded_dot.h"
#include "cpu/float_kernels.h"
#include "cpu/quant_dot_generic.h"

namespace v100::cpu {

namespace {

constexpr Kernels all_kernels() {
  Kernels k = float_kernels("generic");
  k.tile_rows = kTileRows;
  add_coded_kernels(k);
  k.quant_dot[static_cast<int>(PanelKind::q8_0)] = dot_tile<Q8_0>;
  k.quant_dot[static_cast<int>(PanelKind::q4_0)] = dot_tile<Q4_0>;
  k.quant_dot[static_cast<int>(PanelKind::q4_1)] = dot_tile<Q4_1>;
  k.quant_dot[static_cast<int>(PanelKind::q5_0)] = dot_tile<Q5_0>;
  k.quant_dot[static_cast<int>(PanelKind::q5_1)] = dot_tile<Q5_1>;
  k.quant_dot[static_cast<int>(PanelKind::q4_K)] = dot_tile<Q4_K>;
  k.quant_dot[static_cast<int>(PanelKind::q6_K)] = dot_tile<Q6_K>;
  return k;
}

}  // namespace

constinit const Kernels kGenericKernels = all_kernels();

}  // namespace v100::cpu
