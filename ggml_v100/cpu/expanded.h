// Expanded panels: blocks unpacked once in memory (ExpandedBlock), to be multiplied by many rows.
#pragma once

#include "cpu/codebook_codecs.h"

namespace v100::cpu {

namespace {

// Kinds with equal traits share the products of expanded blocks. Sums of products may be held as `largest` allows.
struct CodeTraits {
  int32_t group, largest;
  bool biased, has_minimum;
};
template <PanelKind kind>
constexpr CodeTraits kTraits{panel_format(kind).group, panel_format(kind).largest_code, panel_format(kind).bias != 0,
                             panel_format(kind).has_minimum};

// Expanded blocks as a panel. The template parameter `traits` says which fields are there.
template <CodeTraits traits>
struct ExpandedCodec {
  static void read(const std::byte* blocks, int32_t block, int c, PanelBlock& b) {
    const ExpandedBlock& from = reinterpret_cast<const ExpandedBlock*>(blocks)[block];
    for (int i = 0; i < 32 / traits.group; ++i) {
      b.scale[i] = load_scales(from.scale[i] + c);
      if constexpr (traits.has_minimum) b.minimum[i] = load_scales(from.minimum[i] + c);
    }
    unroll<8>([&](auto g) V100_INLINE_LAMBDA {
      b.codes[g] = load_codes(reinterpret_cast<const std::byte*>(from.codes[g]) + 4 * c);
    });
  }
};

template <PanelKind kind>
void expand(const std::byte* panel, int32_t first_block, int32_t n_blocks, ExpandedBlock* blocks) {
  constexpr CodeTraits traits = kTraits<kind>;
  Codec<kind> codec;
  for (int32_t i = 0; i < n_blocks; ++i)
    for (int c = 0; c < kPanelColumns; c += kCodeColumns) {
      PanelBlock b;
      codec.read(panel, first_block + i, c, b);
      for (int part = 0; part < 32 / traits.group; ++part) {
        store_scales(blocks[i].scale[part] + c, b.scale[part]);
        if constexpr (traits.has_minimum) store_scales(blocks[i].minimum[part] + c, b.minimum[part]);
      }
      unroll<8>([&](auto g) V100_INLINE_LAMBDA { store_codes(blocks[i].codes[g] + 4 * c, b.codes[g]); });
    }
}

}  // namespace

}  // namespace v100::cpu
