// Products of coded panels (types without an integer path), written once over Lanes and Codes of lanes_*.h.
//
// What      y[row][16 P] = fma over k (w[k][16 P], x[row][k]), w = scale * q (- minimum) worked out in registers
// Layout    panel.h; a turn of 64 bytes gives four f32 vectors of 16 columns
// Tile      P = 2 panels x R = 1..4 rows: two or more independent sums; more rows decode 256 values of a panel to L1
//           first (coded_decode) and use the dense product
// Numerics  the operations of quants/decode in their order: scale * q, then minus minimum, each rounded
// Bound     one row: five or six vector instructions per 16 weights (2 shifts, convert, multiply, subtract, fma)
#pragma once

#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

constexpr int kCodedRows = 4;

// [i]: values 16 i .. 16 i + 15 of a block.
struct BlockScales {
  Lanes scale[2], minimum[2];
};

template <int g>
inline Codes nibbles_of(const std::byte* p) {
  const Codes packed = load_codes(p + g % 4 * 64);
  return masked(g < 4 ? packed : shift_right(packed, 4), 15);
}
// Bit g of a plane, moved to `bit`.
template <int g, int bit>
inline Codes plane_bit(const std::byte* p) {
  const Codes plane = load_codes(p);
  return masked(g > bit ? shift_right(plane, g - bit) : shift_left(plane, bit - g), 1 << bit);
}
template <int g>
inline Codes crumbs_of(const std::byte* p) {
  return masked(shift_right(load_codes(p + g / 4 * 64), g % 4 * 2), 3);
}

alignas(16) constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline const uint16_t* halves(const std::byte* p) { return reinterpret_cast<const uint16_t*>(p); }
inline const int8_t* bytes(const std::byte* p) { return reinterpret_cast<const int8_t*>(p); }

struct CodedQ2K {
  static constexpr bool kMinimum = true;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 1344;
    const Lanes d = load_f16(halves(cell)), dmin = load_f16(halves(cell + 32));
    for (int i = 0; i < 2; ++i) {
      const auto* packed = reinterpret_cast<const uint8_t*>(cell + 64 + (2 * (block & 7) + i) * 16);
      s.scale[i] = d * load_nibbles(packed, 0);
      s.minimum[i] = dmin * load_nibbles(packed, 4);
    }
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    return crumbs_of<g>(panel + static_cast<int64_t>(block >> 3) * 1344 + 320 + (block & 7) * 128);
  }
};

struct CodedQ3K {
  static constexpr bool kMinimum = false;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 1856;
    const Lanes d = load_f16(halves(cell));
    for (int i = 0; i < 2; ++i) s.scale[i] = d * load_i8(bytes(cell + 64 + (2 * (block & 7) + i) * 16));
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    const std::byte* at = panel + static_cast<int64_t>(block >> 3) * 1856 + 320 + (block & 7) * 192;
    return minus(either(crumbs_of<g>(at + 64), plane_bit<g, 2>(at)), 4);
  }
};

struct CodedQ5K {
  static constexpr bool kMinimum = true;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 2880;
    const int32_t j = block & 7;
    s.scale[0] = s.scale[1] = load_f16(halves(cell)) * load_i8(bytes(cell + 64 + j * 16));
    s.minimum[0] = s.minimum[1] = load_f16(halves(cell + 32)) * load_i8(bytes(cell + 192 + j * 16));
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    const std::byte* at = panel + static_cast<int64_t>(block >> 3) * 2880 + 320 + (block & 7) * 320;
    return either(nibbles_of<g>(at + 64), plane_bit<g, 4>(at));
  }
};

struct CodedIq4Nl {
  static constexpr bool kMinimum = false;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    s.scale[0] = s.scale[1] = load_f16(halves(panel + static_cast<int64_t>(block >> 1) * 576 + (block & 1) * 32));
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    return lookup(nibbles_of<g>(panel + static_cast<int64_t>(block >> 1) * 576 + 64 + (block & 1) * 256), kNonLinear);
  }
};

struct CodedIq4Xs {
  static constexpr bool kMinimum = false;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    const std::byte* cell = panel + static_cast<int64_t>(block >> 3) * 2240;
    s.scale[0] = s.scale[1] = load_f16(halves(cell)) * load_i8(bytes(cell + 64 + (block & 7) * 16));
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    return lookup(nibbles_of<g>(panel + static_cast<int64_t>(block >> 3) * 2240 + 192 + (block & 7) * 256), kNonLinear);
  }
};

struct CodedMxfp4 {
  static constexpr bool kMinimum = false;
  static void scales(const std::byte* panel, int32_t block, BlockScales& s) {
    s.scale[0] = s.scale[1] = load_bf16(halves(panel + static_cast<int64_t>(block >> 1) * 576 + (block & 1) * 32));
  }
  template <int g>
  static Codes codes(const std::byte* panel, int32_t block) {
    return lookup(nibbles_of<g>(panel + static_cast<int64_t>(block >> 1) * 576 + 64 + (block & 1) * 256), kDoubledE2m1);
  }
};

// Value t of group g.
template <class Codec, int g, int t>
[[gnu::always_inline]] inline Lanes coded_value(const Codes& codes, const BlockScales& s) {
  const Lanes product = s.scale[g / 4] * turn_to_f32<t>(codes);
  if constexpr (Codec::kMinimum)
    return product - s.minimum[g / 4];
  else
    return product;
}

template <class Codec, int P, int R>
void coded_tile(const std::byte* panel, int64_t panel_bytes, int32_t n_blocks, const float* __restrict x,
                int64_t x_stride, float* __restrict y, int64_t y_stride) {
  Lanes sums[R][P];
  unroll<R>([&](auto r)
                V100_INLINE_LAMBDA { unroll<P>([&](auto p) V100_INLINE_LAMBDA { sums[r][p] = splat(0.0f); }); });
  for (int32_t block = 0; block < n_blocks; ++block, x += 32) {
    BlockScales scales[P];
    unroll<P>([&](auto p) V100_INLINE_LAMBDA { Codec::scales(panel + p * panel_bytes, block, scales[p]); });
    unroll<8>([&](auto g) V100_INLINE_LAMBDA {
      Codes codes[P];
      unroll<P>([&](auto p)
                    V100_INLINE_LAMBDA { codes[p] = Codec::template codes<g>(panel + p * panel_bytes, block); });
      unroll<4>([&](auto t) V100_INLINE_LAMBDA {
        Lanes w[P];
        unroll<P>([&](auto p) V100_INLINE_LAMBDA { w[p] = coded_value<Codec, g, t>(codes[p], scales[p]); });
        unroll<R>([&](auto r) V100_INLINE_LAMBDA {
          const Lanes value = splat(x[r * x_stride + 4 * g + t]);
          unroll<P>([&](auto p) V100_INLINE_LAMBDA { sums[r][p] = fma(w[p], value, sums[r][p]); });
        });
      });
    });
  }
  unroll<R>([&](auto r) V100_INLINE_LAMBDA {
    unroll<P>([&](auto p) V100_INLINE_LAMBDA { store(y + r * y_stride + 16 * p, sums[r][p]); });
  });
}

// Each tile is a long unrolled function, so only the useful sizes are built: pairs of panels by 4, 2 or 1 rows, and one
// row of the odd last panel. Any cut gives the same bits.
template <class Codec>
void coded_dot(const std::byte* panel, int64_t panel_bytes, int32_t panels, int32_t n_blocks, const float* x,
               int64_t x_stride, int32_t rows, float* y, int64_t y_stride) {
  int32_t done = 0;
  for (; rows > 0; x += done * x_stride, y += done * y_stride, rows -= done) {
    if (panels < 2) {
      coded_tile<Codec, 1, 1>(panel, panel_bytes, n_blocks, x, x_stride, y, y_stride);
      done = 1;
    } else if (rows >= 4) {
      coded_tile<Codec, 2, 4>(panel, panel_bytes, n_blocks, x, x_stride, y, y_stride);
      done = 4;
    } else if (rows >= 2) {
      coded_tile<Codec, 2, 2>(panel, panel_bytes, n_blocks, x, x_stride, y, y_stride);
      done = 2;
    } else {
      coded_tile<Codec, 2, 1>(panel, panel_bytes, n_blocks, x, x_stride, y, y_stride);
      done = 1;
    }
  }
}

template <class Codec>
void coded_decode(const std::byte* panel, int32_t first_block, int32_t n_blocks, float* values) {
  for (int32_t block = first_block; block < first_block + n_blocks; ++block, values += 32 * 16) {
    BlockScales scales;
    Codec::scales(panel, block, scales);
    unroll<8>([&](auto g) V100_INLINE_LAMBDA {
      const Codes codes = Codec::template codes<g>(panel, block);
      unroll<4>([&](auto t)
                    V100_INLINE_LAMBDA { store(values + (4 * g + t) * 16, coded_value<Codec, g, t>(codes, scales)); });
    });
  }
}

// Tiles: whether products of few rows are built, or only the decoding (for an instruction set without registers to spare).
template <class Codec, bool Tiles>
constexpr void add_coded(CodedKernels& k, CodedKind kind) {
  if constexpr (Tiles) k.dot[static_cast<int>(kind)] = coded_dot<Codec>;
  k.decode[static_cast<int>(kind)] = coded_decode<Codec>;
}

template <bool Tiles>
constexpr CodedKernels coded_kernels() {
  CodedKernels k{};
  k.rows = Tiles ? kCodedRows : 0;
  add_coded<CodedQ2K, Tiles>(k, CodedKind::q2_K);
  add_coded<CodedQ3K, Tiles>(k, CodedKind::q3_K);
  add_coded<CodedQ5K, Tiles>(k, CodedKind::q5_K);
  add_coded<CodedIq4Nl, Tiles>(k, CodedKind::iq4_nl);
  add_coded<CodedIq4Xs, Tiles>(k, CodedKind::iq4_xs);
  add_coded<CodedMxfp4, Tiles>(k, CodedKind::mxfp4);
  return k;
}

}  // namespace

}  // namespace v100::cpu
