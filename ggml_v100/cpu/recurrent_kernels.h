// The kernels of recurrent layers, written once over Lanes; included after float_kernels.h.
//
// What      causal convolution with silu; the gated delta rule for some value features (columns) of one head
// Numerics  exactly the contract of ops/ops.h; a column is a lane, so its sums run in the stated order
// Tile      P panels of 16 columns of a head's memory, [P][head_dim][16], stay in L1 for all tokens
// Bound     per token and 16 elements of the memory 4 instructions of the fused pipes (decay, update, two products), one
//           load and one store: one pass brings the memory up to the token before and multiplies it with this token
#pragma once

#include "cpu/kernels.h"
#include "cpu/unroll.h"

namespace v100::cpu {

namespace {

// ---------------------------------------------------------------------------------------------------- convolution

void conv_silu_row(const ConvTaps& taps, int32_t channel, int32_t n, float* y) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const int64_t c = channel + i;
    Lanes sum = splat(0.0f);
    for (int32_t t = 0; t < taps.count; ++t)
      sum = fma(load_some(taps.w + t * taps.w_stride + c, count), load_some(taps.tokens[t] + c, count), sum);
    store_some(y + c, silu_lanes(sum), count);
  });
}

void sigmoid_mul_row(float* x, const float* gate, int64_t n) {
  for_lanes(n, [&](int64_t i, int count) V100_INLINE_LAMBDA {
    const Lanes sigmoid = splat(1.0f) / (splat(1.0f) + exp_lanes(negate(load_some(gate + i, count))));
    store_some(x + i, load_some(x + i, count) * sigmoid, count);
  });
}

// ---------------------------------------------------------------------------------------------------- delta rule

inline Lanes dot_16_lanes(const float* x, const float* y, int32_t n) {
  Lanes sums = splat(0.0f);
  for (int32_t i = 0; i < n; i += 16) sums = fma(load(x + i), load(y + i), sums);
  return sums;
}

float normalise_head(const float* q, const float* k, int32_t n, float eps, float* qn, float* kn) {
  const Lanes q_scale = splat(inverse_sqrt(sum_of(dot_16_lanes(q, q, n)) + eps));
  const Lanes k_scale = splat(inverse_sqrt(sum_of(dot_16_lanes(k, k, n)) + eps));
  const Lanes r = splat(inverse_sqrt(static_cast<float>(n)));
  for (int32_t i = 0; i < n; i += 16) {
    store(qn + i, (load(q + i) * q_scale) * r);
    store(kn + i, load(k + i) * k_scale);
  }
  return sum_of(dot_16_lanes(kn, qn, n));
}

// The products of the memory with a token's key (p) and query (t): partial sums of even and odd key features.
template <int P>
struct DeltaProducts {
  Lanes p[2][P], t[2][P];
};

// read(i, c): row i of panel c of the memory as it is when the token comes; keep(i, c, row) gets it back. All panels are
// read first: they lie apart by a multiple of 4 KiB, where a load behind a store is taken for dependent on it.
template <int P, class Read, class Keep>
[[gnu::always_inline]] inline DeltaProducts<P> multiply_memory(const float* k, const float* q, int32_t n, Read&& read,
                                                               Keep&& keep) {
  DeltaProducts<P> sums;
  unroll<2 * P>([&](auto i) V100_INLINE_LAMBDA { sums.p[i % 2][i / 2] = sums.t[i % 2][i / 2] = splat(0.0f); });
  for (int32_t i = 0; i < n; i += 2)
    unroll<2>([&](auto odd) V100_INLINE_LAMBDA {
      const Lanes key = splat(k[i + odd]), query = splat(q[i + odd]);
      Lanes m[P];
      unroll<P>([&](auto c) V100_INLINE_LAMBDA { m[c] = read(i + odd, c); });
      unroll<P>([&](auto c) V100_INLINE_LAMBDA {
        keep(i + odd, c, m[c]);
        sums.p[odd][c] = fma(m[c], key, sums.p[odd][c]);
        sums.t[odd][c] = fma(m[c], query, sums.t[odd][c]);
      });
    });
  return sums;
}

// The token's output, and d: what it writes to the memory.
template <int P>
[[gnu::always_inline]] inline void answer_token(const DeltaColumns& a, int32_t token, const DeltaProducts<P>& sums,
                                                Lanes* d) {
  const DeltaFactors& f = a.factors[token * a.factor_stride];
  unroll<P>([&](auto c) V100_INLINE_LAMBDA {
    const Lanes p = sums.p[0][c] + sums.p[1][c], t = sums.t[0][c] + sums.t[1][c];
    d[c] = splat(f.beta) * fma(splat(-f.decay), p, load(a.v + token * a.v_stride + 16 * c));
    store(a.y + token * a.y_stride + 16 * c, fma(splat(f.kq), d[c], splat(f.decay) * t));
  });
}

template <int P>
void delta_columns(const DeltaColumns& a) {
  const int32_t n = a.head_dim;
  const float* memory = a.from;
  if (memory == nullptr) {
    for (int32_t i = 0; i < n * P; ++i) store(a.to + 16 * i, splat(0.0f));
    memory = a.to;
  }
  const auto row = [&](int32_t i, auto c) V100_INLINE_LAMBDA { return load(memory + (c * n + i) * 16); };
  Lanes d[P];
  answer_token<P>(a, 0, multiply_memory<P>(a.k, a.q, n, row, [](int32_t, auto, const Lanes&) V100_INLINE_LAMBDA {}), d);
  // The same after the token before.
  const float* k = a.k;
  Lanes decay = splat(a.factors[0].decay);
  const auto updated_row = [&](int32_t i, auto c)
                               V100_INLINE_LAMBDA { return fma(splat(k[i]), d[c], decay * row(i, c)); };
  for (int32_t token = 1; token < a.tokens; ++token) {
    const float *key = a.k + token * a.key_stride, *query = a.q + token * a.key_stride;
    const DeltaProducts<P> sums = multiply_memory<P>(key, query, n, updated_row,
                                                     [&](int32_t i, auto c, const Lanes& m)
                                                         V100_INLINE_LAMBDA { store(a.to + (c * n + i) * 16, m); });
    answer_token<P>(a, token, sums, d);
    memory = a.to;
    k = key;
    decay = splat(a.factors[token * a.factor_stride].decay);
  }
  if (a.past_caches && memory != a.to) {
    for (int32_t i = 0; i < n; ++i)
      unroll<P>([&](auto c) V100_INLINE_LAMBDA { store_past_caches(a.to + (c * n + i) * 16, updated_row(i, c)); });
    finish_past_caches();
  } else {
    for (int32_t i = 0; i < n; ++i)
      unroll<P>([&](auto c) V100_INLINE_LAMBDA { store(a.to + (c * n + i) * 16, updated_row(i, c)); });
  }
}

void delta_rule(const DeltaColumns& a) {
  if constexpr (kDeltaPanels > 1)
    if (a.panels == kDeltaPanels) return delta_columns<kDeltaPanels>(a);
  delta_columns<1>(a);
}

constexpr void add_recurrent_kernels(Kernels& k) {
  k.conv_silu = conv_silu_row;
  k.sigmoid_mul = sigmoid_mul_row;
  k.normalise_head = normalise_head;
  k.delta_panels = kDeltaPanels;
  k.delta_rule = delta_rule;
}

}  // namespace

}  // namespace v100::cpu
