// The f32 kernels of the CPU backend, written once over Lanes (16 f32 numbers). Each instruction set's file includes
// its lanes header first and this file second; all names are private to that file.
//
// What      rms_norm, exp, silu, gelu, rope, softmax and merge of attention pages, rounding of activations, dense
//           products
// Numerics  exactly the contract of ops/ops.h and base/math.h: 16 interleaved partial sums are the 16 lanes
// Bound     rows of a few KiB in L1; dense products see below
#pragma once

#include "base/math.h"  // constants only: its functions must not be emitted here (kernels.h)
#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

// ---------------------------------------------------------------------------------------------------- element-wise

inline Lanes exp_lanes(Lanes x) {
  using namespace exp_constants;
  const Lanes clamped = smaller(larger(x, splat(kLowest)), splat(kHighest));
  const Lanes n = round_even(clamped * splat(kLog2E));
  Lanes r = fma(n, splat(-kLn2High), clamped);
  r = fma(n, splat(-kLn2Low), r);
  Lanes p = splat(kC6);
  p = fma(p, r, splat(kC5));
  p = fma(p, r, splat(kC4));
  p = fma(p, r, splat(kC3));
  p = fma(p, r, splat(kC2));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, kLowest, p * power_of_two(n));
}

inline Lanes silu_lanes(Lanes x) { return x / (splat(1.0f) + exp_lanes(negate(x))); }

inline Lanes gelu_lanes(Lanes x) {
  const Lanes u = splat(0.797884560802865f) * x * fma(splat(0.044715f) * x, x, splat(1.0f));
  return x * (splat(1.0f) - splat(1.0f) / (splat(1.0f) + exp_lanes(u + u)));
}

// body(offset, lanes in use); full vectors first, then one partial.
template <class Body>
[[gnu::always_inline]] inline void for_lanes(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) body(i, 16);
  if (i < n) body(i, static_cast<int>(n - i));
}

inline Lanes load_some(const float* p, int count) { return count == 16 ? load(p) : load_first(p, count); }
inline void store_some(float* p, Lanes a, int count) { count == 16 ? store(p, a) : store_first(p, a, count); }

void add_rows(float* x, const float* a, int64_t n) {
  for_lanes(n, [&](int64_t i, int count)
                   V100_INLINE_LAMBDA { store_some(x + i, load_some(x + i, count) + load_some(a + i, count), count); });
}

void add_scaled_rows(float* x, float factor, const float* a, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(x + i, fma(splat(factor), load_some(a + i, count), load_some(x + i, count)), count);
  });
}

void add_shifted_rows(float* y, const float* a, float shift, const float* x, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes factor = load_some(a + i, count) + splat(shift);
    store_some(y + i, fma(factor, load_some(x + i, count), load_some(y + i, count)), count);
  });
}

void scale_rows(float* x, float factor, int64_t n) {
  for_lanes(n, [&](int64_t i, int count)
                   V100_INLINE_LAMBDA { store_some(x + i, load_some(x + i, count) * splat(factor), count); });
}

void scaled_silu_rows(float* x, float factor, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(x + i, silu_lanes(load_some(x + i, count) * splat(factor)), count);
  });
}

void add_gated_rows(float* y, const float* gate, const float* x, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes share = splat(1.0f) / (splat(1.0f) + exp_lanes(negate(load_some(gate + i, count))));
    store_some(y + i, fma(share, load_some(x + i, count), load_some(y + i, count)), count);
  });
}

float dot_row(const float* x, const float* y, int32_t n) {
  Lanes sums = splat(0.0f);
  for_lanes(n, [&](int64_t i, int count)
                   V100_INLINE_LAMBDA { sums = fma(load_some(x + i, count), load_some(y + i, count), sums); });
  return sum_of(sums);
}

void soft_cap_rows(float* x, float cap, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes u = load_some(x + i, count) / splat(cap);
    const Lanes tanh = splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp_lanes(u + u));
    store_some(x + i, splat(cap) * tanh, count);
  });
}

void rms_norm_row(const float* x, const float* w, float* y, int32_t n, float eps) {
  Lanes sums = splat(0.0f);
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes v = load_some(x + i, count);
    sums = fma(v, v, sums);
  });
  const Lanes scale = splat(inverse_sqrt(sum_of(sums) / static_cast<float>(n) + eps));
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(y + i, (load_some(x + i, count) * scale) * load_some(w + i, count), count);
  });
}

void silu_mul_row(const float* gate, const float* up, float* y, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(y + i, silu_lanes(load_some(gate + i, count)) * load_some(up + i, count), count);
  });
}

void gelu_mul_row(const float* gate, const float* up, float* y, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(y + i, gelu_lanes(load_some(gate + i, count)) * load_some(up + i, count), count);
  });
}

void divide_row(const float* x, float divisor, float* y, int32_t n) {
  for_lanes(n, [&](int64_t i, int count)
                   V100_INLINE_LAMBDA { store_some(y + i, load_some(x + i, count) / splat(divisor), count); });
}

void to_f16_row(const float* x, uint16_t* y, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    if (count == 16) {
      store_f16(y + i, load(x + i));
    } else {
      uint16_t last[16];
      store_f16(last, load_first(x + i, count));
      for (int j = 0; j < count; ++j) y[i + j] = last[j];
    }
  });
}

void rope_halves_head(float* head, const float* cosine, const float* sine, int32_t pairs) {
  for_lanes(pairs, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes a = load_some(head + i, count), b = load_some(head + pairs + i, count);
    const Lanes c = load_some(cosine + i, count), s = load_some(sine + i, count);
    store_some(head + i, fma(a, c, negate(b * s)), count);
    store_some(head + pairs + i, fma(a, s, b * c), count);
  });
}

void rope_interleaved_head(float* head, const float* cosine, const float* sine, int32_t pairs) {
  for_lanes(pairs, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes c = load_some(cosine + i, count), s = load_some(sine + i, count);
    Lanes a, b;
    float rest[32] = {};
    float* pair = count == 16 ? head + 2 * i : rest;
    if (count < 16)
      for (int j = 0; j < 2 * count; ++j) rest[j] = head[2 * i + j];
    load_pairs(pair, a, b);
    store_pairs(pair, fma(a, c, negate(b * s)), fma(a, s, b * c));
    if (count < 16)
      for (int j = 0; j < 2 * count; ++j) head[2 * i + j] = rest[j];
  });
}

// ---------------------------------------------------------------------------------------------------- activations

void quantize_row(const float* x, int32_t n_blocks, PanelKind kind, ActivationBlock* blocks, int32_t stride) {
  const int32_t bias = panel_format(kind).bias;
  const bool halves = panel_format(kind).group == 16;
  for (int32_t block = 0; block < n_blocks; ++block, x += 32, blocks += stride) {
    ActivationBlock& out = *blocks;
    const Lanes a = load(x), b = load(x + 16);
    const float largest = max_of(larger(absolute(a), absolute(b)));
    // A block so small that the quotient overflows counts as zero.
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    if (inverse > 3.4e38f) inverse = 0;
    const Lanes p = round_even(a * splat(inverse)), q = round_even(b * splat(inverse));
    store_i8(out.p, p);
    store_i8(out.p + 16, q);
    // Sums of 16 integers below 128 are exact in f32.
    const auto first = static_cast<int32_t>(sum_of(p)), second = static_cast<int32_t>(sum_of(q));
    const int32_t sums[2] = {halves ? first : first + second, second};
    out.scale = largest / 127.0f;
    for (int i = 0; i < 2; ++i) {
      if (bias == 0)
        out.sum[i] = out.scale * static_cast<float>(sums[i]);
      else
        out.bias_sum[i] = -bias * sums[i];
    }
  }
}

// ---------------------------------------------------------------------------------------------------- attention

void softmax_page_row(float* s, int32_t begin, int32_t end, float scale, float* maximum, float* sum) {
  const int32_t first = begin & ~15;
  const float lowest = -__builtin_inff();
  Lanes largest = splat(lowest);
  for (int32_t j = first; j < end; j += 16) {
    const Lanes scaled = splat(scale) * load(s + j);
    store(s + j, scaled);
    const int low = j < begin ? begin - j : 0, high = end - j < 16 ? end - j : 16;
    largest = larger(low == 0 && high == 16 ? scaled : only(scaled, low, high, lowest), largest);
  }
  const float m = max_of(largest);
  Lanes sums = splat(0.0f);
  for (int32_t j = first; j < end; j += 16) {
    const int low = j < begin ? begin - j : 0, high = end - j < 16 ? end - j : 16;
    Lanes p = exp_lanes(load(s + j) - splat(m));
    if (low != 0 || high != 16) p = only(p, low, high, 0.0f);  // adding zero keeps a sum of positive numbers
    store(s + j, p);
    sums = sums + p;
  }
  *maximum = m;
  *sum = sum_of(sums);
}

void merge_page_row(float* m1, float* l1, float* o1, float m2, float l2, const float* o2, int32_t n) {
  const float m = *m1 > m2 ? *m1 : m2;
  float shifted[16] = {*m1 - m, m2 - m}, weights[16];
  store(weights, exp_lanes(load(shifted)));
  const Lanes a = splat(weights[0]), b = splat(weights[1]);
  float sums[16];
  store(sums, fma(splat(*l1), a, splat(l2) * b));
  *l1 = sums[0];
  *m1 = m;
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    store_some(o1 + i, fma(load_some(o1 + i, count), a, load_some(o2 + i, count) * b), count);
  });
}

void decode_keys_q8_tile(const int8_t* codes, const uint16_t* scales, int32_t rows, float* out) {
  for (int32_t d = 0; d < rows; ++d)
    for (int32_t c = 0; c < 64; c += 16)
      store(out + d * 64 + c, load_i8(codes + d * 64 + c) * load_f16(scales + d / 32 * 64 + c));
}

// Row d of a block of 32 has its codes in the low (d < 16) or high nibbles of byte row d % 16.
void decode_keys_q4_tile(const uint8_t* codes, const uint16_t* scales, int32_t rows, float* out) {
  for (int32_t d = 0; d < rows; ++d)
    for (int32_t c = 0; c < 64; c += 16) {
      const uint8_t* bytes = codes + (d / 32 * 16 + d % 16) * 64 + c;
      store(out + d * 64 + c,
            (load_nibbles(bytes, d % 32 / 16 * 4) - splat(8.0f)) * load_f16(scales + d / 32 * 64 + c));
    }
}

void decode_values_q8_row(const int8_t* codes, const uint16_t* scales, int32_t features, float* out) {
  for (int32_t block = 0; block < features / 32; ++block) {
    const Lanes scale = splat_f16(scales[block]);
    store(out + block * 32, load_i8(codes + block * 32) * scale);
    store(out + block * 32 + 16, load_i8(codes + block * 32 + 16) * scale);
  }
}

void decode_values_q4_row(const uint8_t* codes, const uint16_t* scales, int32_t features, float* out) {
  for (int32_t block = 0; block < features / 32; ++block) {
    const Lanes scale = splat_f16(scales[block]);
    store(out + block * 32, (load_nibbles(codes + block * 16, 0) - splat(8.0f)) * scale);
    store(out + block * 32 + 16, (load_nibbles(codes + block * 16, 4) - splat(8.0f)) * scale);
  }
}

// ---------------------------------------------------------------------------------------------------- dense products
//
// What      y[rows][16 P] = fma over k (w[k][16 P], x[row][k]), w of any ElementType, widened in registers
// Tile      R rows x P panels of sums in registers; w is loaded once per k, x broadcast from memory
// Why       P * R independent sums hide the latency of the fused multiply-add: one row takes 4 panels at once
// Bound     few rows: reading w. Many rows: fused multiply-adds (R per load of w)

// Elements: `panel` is their view of 16 P columns. read(k, p) gives the row k of panel p; start(k) is called for every
// multiple of kBlock rows first.
template <class T, Lanes (*widen)(const T*)>
struct FloatElements {
  const T* w;
  int64_t stride;

  static constexpr int32_t kBlock = INT32_MAX;
  explicit FloatElements(const DenseProduct& d) : w(static_cast<const T*>(d.w)), stride(d.w_stride) {}
  FloatElements panel(int32_t first) const { return {w + 16 * first, stride}; }
  template <int P>
  void start(int32_t) {}
  Lanes read(int32_t k, int p) const { return widen(w + k * stride + 16 * p); }

 private:
  FloatElements(const T* w, int64_t stride) : w(w), stride(stride) {}
};
using F32Elements = FloatElements<float, load>;
using F16Elements = FloatElements<uint16_t, load_f16>;
using Bf16Elements = FloatElements<uint16_t, load_bf16>;

// Rows of codes of 8 or 4 bits. 4 bits: row k of a block of 32 rows (keys) or column of a block of 32 columns (values)
// is the low half of byte row (column) k % 16, or the high half.
inline Lanes key_codes_q8(const uint8_t* w, int32_t k) { return load_i8(reinterpret_cast<const int8_t*>(w) + k * 64); }
inline Lanes key_codes_q4(const uint8_t* w, int32_t k) {
  return load_nibbles(w + (k / 32 * 16 + k % 16) * 64, k % 32 / 16 * 4) - splat(8.0f);
}

template <Lanes (*codes)(const uint8_t*, int32_t)>
struct KeyElements {
  const uint8_t* w;
  const uint16_t* scales;
  Lanes scale[4];

  static constexpr int32_t kBlock = 32;
  explicit KeyElements(const DenseProduct& d) : w(static_cast<const uint8_t*>(d.w)), scales(d.scales) {}
  KeyElements panel(int32_t first) const {
    KeyElements other = *this;
    other.w += 16 * first;
    other.scales += 16 * first;
    return other;
  }
  template <int P>
  void start(int32_t k) {
    unroll<P>([&](auto p) V100_INLINE_LAMBDA { scale[p] = load_f16(scales + k / 32 * 64 + 16 * p); });
  }
  Lanes read(int32_t k, int p) const { return codes(w + 16 * p, k) * scale[p]; }
};

inline Lanes value_codes_q8(const uint8_t* row, int32_t panel) {
  return load_i8(reinterpret_cast<const int8_t*>(row) + 16 * panel);
}
inline Lanes value_codes_q4(const uint8_t* row, int32_t panel) {
  return load_nibbles(row + panel / 2 * 16, panel % 2 * 4) - splat(8.0f);
}

template <Lanes (*codes)(const uint8_t*, int32_t)>
struct ValueElements {
  const uint8_t* w;
  const uint16_t* scales;
  int64_t stride, blocks;  // bytes of codes and number of scales of a row
  int32_t first = 0;

  static constexpr int32_t kBlock = INT32_MAX;
  explicit ValueElements(const DenseProduct& d)
      : w(static_cast<const uint8_t*>(d.w)), scales(d.scales), stride(d.w_stride), blocks(d.panels / 2) {}
  ValueElements panel(int32_t panel) const {
    ValueElements other = *this;
    other.first = panel;
    return other;
  }
  template <int P>
  void start(int32_t) {}
  Lanes read(int32_t k, int p) const {
    return codes(w + k * stride, first + p) * splat_f16(scales[k * blocks + (first + p) / 2]);
  }
};

template <class Elements, int P, int R>
void dense_tile(Elements w, const float* __restrict x, int64_t x_stride, float* __restrict y, int64_t y_stride,
                int32_t n_k, bool accumulate) {
  Lanes sums[R][P];
  unroll<R>([&](auto r) V100_INLINE_LAMBDA {
    unroll<P>([&](auto p)
                  V100_INLINE_LAMBDA { sums[r][p] = accumulate ? load(y + r * y_stride + 16 * p) : splat(0.0f); });
  });
  for (int32_t block = 0; block < n_k;) {
    w.template start<P>(block);
    const int32_t end = n_k - block > Elements::kBlock ? block + Elements::kBlock : n_k;
    for (int32_t k = block; k < end; ++k) {
      Lanes weights[P];
      unroll<P>([&](auto p) V100_INLINE_LAMBDA { weights[p] = w.read(k, p); });
      unroll<R>([&](auto r) V100_INLINE_LAMBDA {
        const Lanes value = splat(x[r * x_stride + k]);
        unroll<P>([&](auto p) V100_INLINE_LAMBDA { sums[r][p] = fma(weights[p], value, sums[r][p]); });
      });
    }
    block = end;
  }
  unroll<R>([&](auto r) V100_INLINE_LAMBDA {
    unroll<P>([&](auto p) V100_INLINE_LAMBDA { store(y + r * y_stride + 16 * p, sums[r][p]); });
  });
}

template <class Elements, int R>
void dense_rows(const DenseProduct& d, int32_t first_row) {
  const Elements w(d);
  const float* x = d.x + first_row * d.x_stride;
  float* y = d.y + first_row * d.y_stride;
  int32_t panel = 0;
  if constexpr (4 * R <= kDenseSums)
    for (; panel + 4 <= d.panels; panel += 4)
      dense_tile<Elements, 4, R>(w.panel(panel), x, d.x_stride, y + 16 * panel, d.y_stride, d.n_k, d.accumulate);
  if constexpr (2 * R <= kDenseSums)
    for (; panel + 2 <= d.panels; panel += 2)
      dense_tile<Elements, 2, R>(w.panel(panel), x, d.x_stride, y + 16 * panel, d.y_stride, d.n_k, d.accumulate);
  for (; panel < d.panels; ++panel)
    dense_tile<Elements, 1, R>(w.panel(panel), x, d.x_stride, y + 16 * panel, d.y_stride, d.n_k, d.accumulate);
}

template <class Elements>
void dense_product(const DenseProduct& d) {
  int32_t tiles = (d.rows + kDenseRows - 1) / kDenseRows;
  for (int32_t row = 0; row < d.rows; --tiles) {
    const int32_t rows = (d.rows - row + tiles - 1) / tiles;  // tiles of nearly equal height
    switch (rows) {
      case 1:
        dense_rows<Elements, 1>(d, row);
        break;
      case 2:
        dense_rows<Elements, 2>(d, row);
        break;
      case 3:
        dense_rows<Elements, 3>(d, row);
        break;
      case 4:
        dense_rows<Elements, 4>(d, row);
        break;
      case 5:
        if constexpr (kDenseRows >= 5) dense_rows<Elements, 5>(d, row);
        break;
      case 6:
        if constexpr (kDenseRows >= 6) dense_rows<Elements, 6>(d, row);
        break;
      default:
        break;
    }
    row += rows;
  }
}

// The table without the products of quantised panels, which each instruction set adds.
constexpr Kernels float_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.dense_rows = kDenseRows;
  k.quantize = quantize_row;
  k.dense_dot[static_cast<int>(ElementType::f32)] = dense_product<F32Elements>;
  k.dense_dot[static_cast<int>(ElementType::f16)] = dense_product<F16Elements>;
  k.dense_dot[static_cast<int>(ElementType::bf16)] = dense_product<Bf16Elements>;
  k.dense_dot[static_cast<int>(ElementType::q8_0_keys)] = dense_product<KeyElements<key_codes_q8>>;
  k.dense_dot[static_cast<int>(ElementType::q4_0_keys)] = dense_product<KeyElements<key_codes_q4>>;
  k.dense_dot[static_cast<int>(ElementType::q8_0_values)] = dense_product<ValueElements<value_codes_q8>>;
  k.dense_dot[static_cast<int>(ElementType::q4_0_values)] = dense_product<ValueElements<value_codes_q4>>;
  k.add = add_rows;
  k.add_scaled = add_scaled_rows;
  k.add_shifted = add_shifted_rows;
  k.scale = scale_rows;
  k.scaled_silu = scaled_silu_rows;
  k.add_gated = add_gated_rows;
  k.dot = dot_row;
  k.soft_cap = soft_cap_rows;
  k.rms_norm = rms_norm_row;
  k.silu_mul = silu_mul_row;
  k.gelu_mul = gelu_mul_row;
  k.rope_halves = rope_halves_head;
  k.rope_interleaved = rope_interleaved_head;
  k.to_f16 = to_f16_row;
  k.softmax_page = softmax_page_row;
  k.merge_page = merge_page_row;
  k.divide = divide_row;
  k.decode_keys_q8 = decode_keys_q8_tile;
  k.decode_keys_q4 = decode_keys_q4_tile;
  k.decode_values_q8 = decode_values_q8_row;
  k.decode_values_q4 = decode_values_q4_row;
  return k;
}

}  // namespace

}  // namespace v100::cpu
