// The searches of encode_search.h over vectors: each lane holds one sub-block, so that its sums keep their order.
// Included by one file per instruction set, which must not emit any function that other files could share (the linker
// might keep the copy that older processors cannot run): plain operators, builtins and private names only.
//
// Layout    values are transposed first: values.at[i] holds value i of kLanes sub-blocks
// Numerics  no contraction, sums from left to right per lane: the bytes do not depend on kLanes
// Bound     arithmetic: about 20 operations per value and candidate (asymmetric, 21 or 37 candidates), 10 (symmetric, 19)
#pragma once

#include "quants/decode_blocks.h"  // constants only
#include "quants/encode_search.h"

namespace v100 {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kMaxValues = 32;  // of a sub-block

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));  // numbers, or masks of comparisons: 0 and -1

#define V100_INLINE [[gnu::always_inline]] inline
#define V100_INLINE_LAMBDA __attribute__((always_inline))

V100_INLINE Floats splat(float a) { return a - Floats{}; }
V100_INLINE Ints splat(int32_t a) { return a - Ints{}; }
V100_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
V100_INLINE Ints select(Ints mask, Ints a, Ints b) { return mask ? a : b; }
V100_INLINE Ints clamp(Ints a, int32_t low, int32_t high) {
  a = a > splat(low) ? a : splat(low);
  return a < splat(high) ? a : splat(high);
}
V100_INLINE Floats absolute(Floats a) { return (Floats)((Ints)a & splat(0x7FFFFFFF)); }
V100_INLINE Floats to_float(Ints a) { return __builtin_convertvector(a, Floats); }
// nearest_int of each lane.
V100_INLINE Ints nearest(Floats a) { return ((Ints)(a + splat(12582912.0f)) & splat(0x7FFFFF)) - splat(0x400000); }
V100_INLINE bool any(Ints mask) {
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= mask[lane];
  return bits != 0;
}

// Value i of each lane's sub-block. Lanes beyond the last sub-block repeat it.
struct Transposed {
  Floats at[kMaxValues];

  V100_INLINE Transposed(const float* values, int n, int count) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float* own = values + (lane < count ? lane : count - 1) * n;
      for (int i = 0; i < n; ++i) at[i][lane] = own[i];
    }
  }
};

// Calls body(values, weights, first, count) for every kLanes sub-blocks.
template <class Body>
V100_INLINE void for_lanes(const SubBlocks& blocks, Body&& body) {
  for (int first = 0; first < blocks.count; first += kLanes) {
    const int count = blocks.count - first < kLanes ? blocks.count - first : kLanes;
    const Transposed values(blocks.values + first * blocks.n, blocks.n, count);
    const Transposed weights(blocks.weights + first * blocks.n, blocks.n, count);
    body(values.at, weights.at, first, count);
  }
}

V100_INLINE void put(Floats from, int count, float* to) {
  for (int lane = 0; lane < count; ++lane) to[lane] = from[lane];
}

V100_INLINE void put_levels(const Ints* from, int n, int count, uint8_t* to) {
  for (int lane = 0; lane < count; ++lane)
    for (int i = 0; i < n; ++i) to[lane * n + i] = static_cast<uint8_t>(from[i][lane]);
}

// The value of largest magnitude of each lane, the first among equals.
struct Extreme {
  Floats value = {}, magnitude = {};

  V100_INLINE Extreme(const Floats* values, int n) {
    for (int i = 0; i < n; ++i) {
      const Floats a = absolute(values[i]);
      const Ints larger = a > magnitude;
      value = select(larger, values[i], value);
      magnitude = select(larger, a, magnitude);
    }
  }
};

// For a candidate's levels l: products = sum w x l, squares = sum w l l. Its best scale is products / squares, and the
// error then is least where products^2 / squares is largest.
struct Fit {
  Floats products = {}, squares = {};
};

// Keeps the best of the candidates it is shown.
struct BestFit {
  Floats inverse, scale, score;  // score = products^2 / squares, as scale * products

  V100_INLINE BestFit(Floats first_inverse, Fit fit) : inverse(first_inverse) {
    scale = select(fit.squares == splat(0.0f), splat(0.0f), fit.products / fit.squares);
    score = scale * fit.products;
  }

  V100_INLINE void offer(Floats candidate, Fit fit) {
    const Ints better = (fit.squares > splat(0.0f)) & (fit.products * fit.products > score * fit.squares);
    const Floats new_scale = fit.products / fit.squares;
    inverse = select(better, candidate, inverse);
    scale = select(better, new_scale, scale);
    score = select(better, new_scale * fit.products, score);
  }
};

constexpr float kNegligible = 1e-15f;  // sub-blocks whose values are all smaller count as zero

void symmetric(const SubBlocks& blocks, int max_level, float* scales, uint8_t* levels) {
  const int n = blocks.n;
  for_lanes(blocks, [&](const Floats* x, const Floats* w, int first, int count) V100_INLINE_LAMBDA {
    const Extreme largest(x, n);
    const auto level = [&](Floats inverse, int i)
                           V100_INLINE_LAMBDA { return clamp(nearest(inverse * x[i]), -max_level, max_level - 1); };
    const auto fit = [&](Floats inverse) V100_INLINE_LAMBDA {
      Fit sums;
      for (int i = 0; i < n; ++i) {
        const Floats l = to_float(level(inverse, i));
        sums.products += w[i] * x[i] * l;
        sums.squares += w[i] * l * l;
      }
      return sums;
    };

    const Floats plain = splat(-static_cast<float>(max_level)) / largest.value;
    BestFit best(plain, fit(plain));
    for (int k = -9; k <= 9; ++k) {
      if (k == 0) continue;
      const Floats inverse = splat(-(static_cast<float>(max_level) + 0.1f * static_cast<float>(k))) / largest.value;
      best.offer(inverse, fit(inverse));
    }

    const Ints zero = largest.magnitude < splat(kNegligible);
    Ints found[kMaxValues];
    for (int i = 0; i < n; ++i) found[i] = ~zero & (level(best.inverse, i) + splat(max_level));
    put(select(zero, splat(0.0f), best.scale), count, scales + first);
    put_levels(found, n, count, levels + first * n);
  });
}

template <bool saturate, bool absolute_error>
void asymmetric_search(const SubBlocks& blocks, int max_level, const AsymmetricSteps& steps, float* scales, float* mins,
                       uint8_t* levels) {
  const int n = blocks.n;
  const Floats top = splat(static_cast<float>(max_level));
  for_lanes(blocks, [&](const Floats* x, const Floats* w, int first, int count) V100_INLINE_LAMBDA {
    Floats low = x[0], high = x[0], sum_w = {}, sum_x = {};
    for (int i = 0; i < n; ++i) {
      low = select(x[i] < low, x[i], low);
      high = select(x[i] > high, x[i], high);
      sum_w += w[i];
      sum_x += w[i] * x[i];
    }
    low = select(low > splat(0.0f), splat(0.0f), low);
    const Ints flat = saturate ? high <= low : high == low;

    const auto level = [&](Floats inverse, Floats zero_point, int i) V100_INLINE_LAMBDA {
      const Floats quotient = inverse * (x[i] - zero_point);
      const Ints l = clamp(nearest(quotient), 0, max_level);
      if (!saturate) return l;
      return (quotient > splat(0.0f)) & (quotient < top ? l : splat(max_level));
    };
    const auto error_of = [&](Floats scale, Floats min, const Floats* l) V100_INLINE_LAMBDA {
      Floats error = {};
      for (int i = 0; i < n; ++i) {
        const Floats difference = scale * l[i] + min - x[i];
        error += w[i] * (absolute_error ? absolute(difference) : difference * difference);
      }
      return error;
    };

    Floats l[kMaxValues];
    Floats best_inverse = top / (high - low), best_low = low, best_scale = splat(1.0f) / best_inverse;
    for (int i = 0; i < n; ++i) l[i] = to_float(level(best_inverse, low, i));
    Floats best_error = error_of(best_scale, low, l);
    for (int k = 0; k <= steps.last; ++k) {
      const float inverse_range = steps.first + steps.step * static_cast<float>(k) + static_cast<float>(max_level);
      const Floats inverse = splat(inverse_range) / (high - low);
      Floats sum_l = {}, sum_l2 = {}, sum_lx = {};
      for (int i = 0; i < n; ++i) {
        l[i] = to_float(level(inverse, low, i));
        const Floats wl = w[i] * l[i];
        sum_l += wl;
        sum_l2 += wl * l[i];
        sum_lx += wl * x[i];
      }
      // Weighted least squares for scale and min; a min above 0 cannot be stored.
      const Floats determinant = sum_w * sum_l2 - sum_l * sum_l;
      const Floats free_min = (sum_l2 * sum_x - sum_l * sum_lx) / determinant;
      const Ints above = free_min > splat(0.0f);
      const Floats scale = select(above, sum_lx / sum_l2, (sum_w * sum_lx - sum_x * sum_l) / determinant);
      const Floats min = select(above, splat(0.0f), free_min);
      const Floats error = error_of(scale, min, l);
      const Ints better = (determinant > splat(0.0f)) & (error < best_error);
      best_error = select(better, error, best_error);
      best_scale = select(better, scale, best_scale);
      best_inverse = select(better, inverse, best_inverse);
      best_low = select(better, low, best_low);
      low = select(better, min, low);
    }

    Ints found[kMaxValues];
    for (int i = 0; i < n; ++i) found[i] = ~flat & level(best_inverse, best_low, i);
    put(select(flat, splat(0.0f), best_scale), count, scales + first);
    put(-low, count, mins + first);
    put_levels(found, n, count, levels + first * n);
  });
}

void asymmetric(const SubBlocks& blocks, int max_level, const AsymmetricSteps& steps, float* scales, float* mins,
                uint8_t* levels) {
  if (steps.absolute_error) {
    asymmetric_search<false, true>(blocks, max_level, steps, scales, mins, levels);
  } else if (steps.saturate) {
    asymmetric_search<true, false>(blocks, max_level, steps, scales, mins, levels);
  } else {
    asymmetric_search<false, false>(blocks, max_level, steps, scales, mins, levels);
  }
}

void three_bit(const SubBlocks& blocks, float* scales, uint8_t* levels) {
  constexpr int kMaxLevel = 4;
  constexpr int kSweeps = 5;
  const int n = blocks.n;
  for_lanes(blocks, [&](const Floats* x, const Floats* w, int first, int count) V100_INLINE_LAMBDA {
    const Extreme largest(x, n);
    const Floats inverse = splat(-static_cast<float>(kMaxLevel)) / largest.value;
    const auto nearest_level = [&](Floats a)
                                   V100_INLINE_LAMBDA { return clamp(nearest(a), -kMaxLevel, kMaxLevel - 1); };
    Ints l[kMaxValues];
    Fit fit;
    for (int i = 0; i < n; ++i) {
      l[i] = nearest_level(inverse * x[i]);
      fit.products += w[i] * x[i] * to_float(l[i]);
      fit.squares += w[i] * to_float(l[i]) * to_float(l[i]);
    }
    // A lane whose levels have settled goes through further sweeps unchanged.
    bool changed = true;
    for (int sweep = 0; sweep < kSweeps && changed; ++sweep) {
      Ints moved = {};
      for (int i = 0; i < n; ++i) {
        const Floats old = to_float(l[i]);
        Floats products = fit.products - w[i] * x[i] * old,
               squares = fit.squares - w[i] * old * old;  // without value i
        Ints better = products > splat(0.0f);
        const Ints candidate = nearest_level(x[i] * squares / products);
        products += w[i] * x[i] * to_float(candidate);
        squares += w[i] * to_float(candidate) * to_float(candidate);
        better &= (candidate != l[i]) & (squares > splat(0.0f)) &
                  (products * products * fit.squares > fit.products * fit.products * squares);
        l[i] = select(better, candidate, l[i]);
        fit.products = select(better, products, fit.products);
        fit.squares = select(better, squares, fit.squares);
        moved |= better;
      }
      changed = any(moved);
    }

    const Ints zero = largest.magnitude < splat(kNegligible);
    for (int i = 0; i < n; ++i) l[i] = ~zero & (l[i] + splat(kMaxLevel));
    put(select(zero | (fit.squares == splat(0.0f)), splat(0.0f), fit.products / fit.squares), count, scales + first);
    put_levels(l, n, count, levels + first * n);
  });
}

void non_linear(const SubBlocks& blocks, float* scales) {
  constexpr auto& kLevels = kNonLinearLevels;
  const int n = blocks.n;
  for_lanes(blocks, [&](const Floats* x, const Floats* w, int first, int count) V100_INLINE_LAMBDA {
    const Extreme largest(x, n);
    const auto fit = [&](Floats inverse) V100_INLINE_LAMBDA {
      Fit sums;
      for (int i = 0; i < n; ++i) {
        const Floats quotient = inverse * x[i];
        Ints level = splat(int32_t{kLevels[0]});
        for (int j = 1; j < 16; ++j) {  // a quotient in the middle between two levels goes to the upper one
          const float middle = 0.5f * static_cast<float>(kLevels[j - 1] + kLevels[j]);
          level += ~(quotient < splat(middle)) & splat(kLevels[j] - kLevels[j - 1]);
        }
        const Floats l = to_float(level);
        sums.products += w[i] * l * x[i];
        sums.squares += w[i] * l * l;
      }
      return sums;
    };

    const Floats plain = splat(1.0f) / (-largest.value / splat(static_cast<float>(kLevels[0])));
    BestFit best(plain, fit(plain));
    for (int k = -7; k <= 7; ++k) {
      const Floats inverse = splat(static_cast<float>(k + kLevels[0])) / largest.value;
      best.offer(inverse, fit(inverse));
    }
    put(select(largest.magnitude < splat(kNegligible), splat(0.0f), best.scale), count, scales + first);
  });
}

constexpr EncodeSearches kSearches{symmetric, asymmetric, three_bit, non_linear};

}  // namespace

}  // namespace v100
