// The table of integer dot products of one instruction set. Its file defines, before this is included,
//   dot<Codec, traits>(panel, n_blocks, tile, rows, y, y_stride, accumulate), rows <= kDotRows, or kTileRows for expanded
// blocks.
#pragma once

#include "cpu/expanded.h"

namespace v100::cpu {

namespace {

template <PanelKind kind>
void dot_panel(const std::byte* panel, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
               int64_t y_stride) {
  dot<Codec<kind>, kTraits<kind>, kDotRows>(panel, n_blocks, tile, rows, y, y_stride, false);
}

template <CodeTraits traits>
void dot_expanded(const ExpandedBlock* blocks, int32_t n_blocks, const ActivationBlock* tile, int32_t rows, float* y,
                  int64_t y_stride, bool accumulate) {
  dot<ExpandedCodec<traits>, traits, kTileRows>(reinterpret_cast<const std::byte*>(blocks), n_blocks, tile, rows, y,
                                                y_stride, accumulate);
}

template <PanelKind... kinds>
constexpr void add_expanded(QuantKernels& k) {
  ((k.expand[static_cast<int>(kinds)] = expand<kinds>,
    k.dot_expanded[static_cast<int>(kinds)] = dot_expanded<shared_traits(kTraits<kinds>)>),
   ...);
}

template <PanelKind... kinds>
constexpr void add_direct(QuantKernels& k) {
  ((k.dot[static_cast<int>(kinds)] = dot_panel<kinds>), ...);
  add_expanded<kinds...>(k);
}

constexpr QuantKernels quant_kernels() {
  using enum PanelKind;
  QuantKernels k{};
  k.dot_rows = kDotRows;
  k.tile_rows = kTileRows;
  add_direct<q8_0, q4_0, q4_1, q5_0, q5_1, q2_K, q3_K, q4_K, q5_K, q6_K, iq4_nl, iq4_xs, mxfp4, nvfp4, q1_0, q2_0,
             tq2_0>(k);
  add_expanded<tq1_0, iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s>(k);
  return k;
}

}  // namespace

}  // namespace v100::cpu
