// Encoders of IQ2 and IQ3: super-blocks of 256 values; sub-blocks of 16 or 32 share a scale, groups of 8 or 4 magnitudes
// become one codebook row of levels 1, 3, 5, ... Signs are stored apart.
// A sub-block tries a ladder of scales. For each, magnitudes round to levels, groups that are no codebook row snap to a
// neighbour, and the scale is judged by the weighted least-squares fit. All sums are f32 in the order of the values.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quants/codebook_search.h"
#include "quants/encode_blocks.h"
#include "quants/encode_bytes.h"

namespace v100 {

namespace {

constexpr int kBlockValues = 256;

// Values that share a scale.
template <int kValues>
struct SubBlock {
  float magnitude[kValues];  // |value|; below zero where the sign was flipped to make the number of minus signs even
  float weight[kValues];
  float root_weight[kValues];
  uint8_t signs[kValues / 8];  // bit j of byte g: value 8 * g + j is negated

  float largest() const { return *std::max_element(magnitude, magnitude + kValues); }

  // Splits values into signs and magnitudes; takes the root of the weights, which are set before.
  void load_values(const float* values) {
    for (int g = 0; g < kValues / 8; ++g) {
      uint32_t minus = 0;
      for (int j = 0; j < 8; ++j) minus |= (values[8 * g + j] < 0.0f ? 1u : 0u) << j;
      signs[g] = static_cast<uint8_t>(minus);
    }
    for (int i = 0; i < kValues; ++i) {
      magnitude[i] = std::fabs(values[i]);
      root_weight[i] = std::sqrt(weight[i]);
    }
  }

  // Only 7 of 8 signs are stored: where the number of minus signs is odd, the cheapest value's sign is given up.
  void make_signs_even() {
    for (int g = 0; g < kValues / 8; ++g) {
      if (std::popcount(signs[g]) % 2 == 0) continue;
      int cheapest = 0;
      float least = 0.0f;
      for (int j = 0; j < 8; ++j) {
        const float m = magnitude[8 * g + j];
        const float cost = weight[8 * g + j] * m * m;
        if (j == 0 || cost < least) {
          least = cost;
          cheapest = j;
        }
      }
      magnitude[8 * g + cheapest] = -magnitude[8 * g + cheapest];
      signs[g] ^= static_cast<uint8_t>(1u << cheapest);
    }
  }
};

// A sub-block's result: values are about scale * level of their codebook rows, with the sub-block's signs.
template <int kGroups>
struct Fit {
  float scale = 0.0f;
  int rows[kGroups] = {};
};

enum class Refit { kSnappedGroups, kAllGroups, kAllGroupsIfSnapped };

template <class Search>
constexpr int kRowValues = static_cast<int>(Search::kPlaces.size());
template <class Search>
constexpr int kDigits = Search::kVectors / Search::kPlaces.back();

// Nearest digit (half to even) whose level 2 * digit + 1 times the scale meets the magnitude; 0 for NaN.
inline float nearest_digit(float inverse_scale, float magnitude, float top) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits below one
  const float wanted = 0.5f * (inverse_scale * magnitude - 1.0f);
  const float positive = wanted > 0.0f ? wanted : 0.0f;
  return ((positive < top ? positive : top) + kRounder) - kRounder;
}

template <class Search>
int snap(const Search& search, int key, float scale, const float* magnitude, const float* root_weight) {
  typename Search::Costs costs;
  for (int p = 0; p < kRowValues<Search>; ++p)
    for (int digit = 0; digit < Search::kCostStride; ++digit) {
      const float error = scale * static_cast<float>(2 * digit + 1) - magnitude[p];
      costs[p][digit] = root_weight[p] * error * error;
    }
  return search.cheapest_neighbour(key, costs);
}

// inverse_scales: the ladder. The arrays of a trial are laid out [value][trial], so that loops run along trials.
template <class Search, int kValues, size_t kTrials>
Fit<kValues / kRowValues<Search>> fit(const Search& search, const SubBlock<kValues>& x,
                                     const std::array<float, kTrials>& inverse_scales, float first_scale, Refit refit) {
  constexpr int kGroupValues = kRowValues<Search>;
  constexpr int kGroups = kValues / kGroupValues;
  constexpr float kTop = static_cast<float>(kDigits<Search> - 1);
  constexpr size_t kLanes = (kTrials + 3) / 4 * 4;

  alignas(16) float inverse[kLanes];
  for (size_t t = 0; t < kLanes; ++t) inverse[t] = inverse_scales[std::min(t, kTrials - 1)];

  alignas(16) float level[kValues][kLanes];
  int rows[kGroups][kTrials];
  bool snapped[kGroups][kTrials];
  for (int g = 0; g < kGroups; ++g) {
    alignas(16) float key[kLanes] = {};
    for (int p = 0; p < kGroupValues; ++p) {
      const float magnitude = x.magnitude[g * kGroupValues + p];
      const auto place = static_cast<float>(Search::kPlaces[static_cast<size_t>(p)]);
      float* levels = level[g * kGroupValues + p];
      for (size_t t = 0; t < kLanes; ++t) {
        const float digit = nearest_digit(inverse[t], magnitude, kTop);
        levels[t] = 2.0f * digit + 1.0f;
        key[t] += digit * place;
      }
    }
    for (size_t t = 0; t < kTrials; ++t) {
      const int vector = static_cast<int>(key[t]);
      rows[g][t] = search.row_of(vector);
      snapped[g][t] = rows[g][t] < 0;
      if (!snapped[g][t]) continue;
      rows[g][t] = snap(search, vector, 1.0f / inverse[t], x.magnitude + g * kGroupValues,
                        x.root_weight + g * kGroupValues);
      for (int p = 0; p < kGroupValues; ++p)
        level[g * kGroupValues + p][t] = static_cast<float>(2 * search.digit(rows[g][t], p) + 1);
    }
  }

  // Least squares: the best scale is sum_xq / sum_qq and leaves an error smaller by sum_xq^2 / sum_qq.
  alignas(16) float sum_xq[kLanes] = {}, sum_qq[kLanes] = {};
  for (int i = 0; i < kValues; ++i) {
    const float w = x.weight[i], wx = x.weight[i] * x.magnitude[i];
    for (size_t t = 0; t < kLanes; ++t) {
      sum_xq[t] += wx * level[i][t];
      sum_qq[t] += w * level[i][t] * level[i][t];
    }
  }
  Fit<kGroups> best;
  best.scale = first_scale;
  float best_gain = 0.0f;
  size_t best_trial = kTrials;  // stays where all weights are zero or their sums underflow
  for (size_t t = 0; t < kTrials; ++t) {
    if (!(sum_qq[t] > 0.0f && sum_xq[t] * sum_xq[t] > best_gain * sum_qq[t])) continue;
    best.scale = sum_xq[t] / sum_qq[t];
    best_gain = best.scale * sum_xq[t];
    best_trial = t;
  }

  // Once more with the scale found.
  bool refits[kGroups];
  bool any_refit = false;
  for (int g = 0; g < kGroups; ++g) {
    refits[g] = refit != Refit::kSnappedGroups;
    if (best_trial < kTrials) {
      best.rows[g] = rows[g][best_trial];
      refits[g] = snapped[g][best_trial];
    }
    any_refit |= refits[g];
  }
  if ((!any_refit && refit != Refit::kAllGroups) || !(best.scale > 0.0f)) return best;
  const float inverse_scale = 1.0f / best.scale;
  float xq = 0.0f, qq = 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    const float* magnitude = x.magnitude + g * kGroupValues;
    const float* weight = x.weight + g * kGroupValues;
    if (refits[g] || refit != Refit::kSnappedGroups) {
      int key = 0;
      for (int p = 0; p < kGroupValues; ++p)
        key += static_cast<int>(nearest_digit(inverse_scale, magnitude[p], kTop)) *
               Search::kPlaces[static_cast<size_t>(p)];
      best.rows[g] = search.row_of(key);
      if (best.rows[g] < 0)
        best.rows[g] = snap(search, key, best.scale, magnitude, x.root_weight + g * kGroupValues);
    }
    for (int p = 0; p < kGroupValues; ++p) {
      const auto q = static_cast<float>(2 * search.digit(best.rows[g], p) + 1);
      xq += weight[p] * magnitude[p] * q;
      qq += weight[p] * q * q;
    }
  }
  if (qq > 0.0f) best.scale = xq / qq;
  return best;
}

// (top + step * k) / largest for k = -n/2 .. n/2, top being the largest level.
template <size_t n>
std::array<float, n> ladder(float top, float step, float largest) {
  std::array<float, n> inverse_scales;
  for (size_t i = 0; i < n; ++i) {
    const auto k = static_cast<float>(static_cast<int>(i) - static_cast<int>(n / 2));
    inverse_scales[i] = (top + k * step) / largest;
  }
  return inverse_scales;
}

template <int kValues, int kGroups>
void make_scale_positive(Fit<kGroups>& fit, SubBlock<kValues>& x) {
  if (!(fit.scale < 0.0f)) return;
  fit.scale = -fit.scale;
  for (uint8_t& signs : x.signs) signs = static_cast<uint8_t>(~signs);
}

float mean_square(const float* values) {
  float sum = 0.0f;
  for (int i = 0; i < kBlockValues; ++i) sum += values[i] * values[i];
  return sum / kBlockValues;
}

// weight = importance * sqrt(variance + value^2)
template <int kValues>
void weigh(SubBlock<kValues>& x, const float* values, const float* importance, float variance) {
  for (int i = 0; i < kValues; ++i) x.weight[i] = importance[i] * std::sqrt(variance + values[i] * values[i]);
}

// Without importance: weight = variance + value^2.
template <int kValues>
void weigh(SubBlock<kValues>& x, const float* values, float variance) {
  for (int i = 0; i < kValues; ++i) x.weight[i] = variance + values[i] * values[i];
}

// Sub-block scales as 4-bit codes c of d * (2 * c + 1). Returns d, 0 if all are 0.
template <size_t n>
float encode_scales(const std::array<float, n>& scales, std::array<uint8_t, n>& codes) {
  const float largest = *std::max_element(scales.begin(), scales.end());
  if (!(largest > 0.0f)) return 0.0f;
  const float d = largest / 31.0f;
  const float inverse = 1.0f / d;
  for (size_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(nearest_digit(inverse, scales[i], 15.0f));
  return d;
}

// Positive search `QP`.
float fit_positive(int n, int nmax, const float* x, const float* w, uint8_t* levels) {
  const float mx = std::max(0.0f, *std::max_element(x, x + n));
  std::fill_n(levels, n, uint8_t{0});
  if (mx < 1e-15f) return 0.0f;
  const auto ni = [](float v) { return static_cast<int>((v + 12582912.0f) - 12582912.0f); };
  const float fmax = static_cast<float>(nmax);
  float t = fmax / mx;
  float err = 0;
  for (int i = 0; i < n; ++i) {
    levels[i] = static_cast<uint8_t>(ni(t * x[i]));
    const float diff = x[i] - 1 / t * levels[i];
    err += w[i] * diff * diff;
  }
  for (int k = -4; k <= 4; ++k) {
    if (k == 0) continue;
    const float tt = (0.1f * static_cast<float>(k) + fmax) / mx;
    const float s = 1 / tt;
    float e = 0;
    for (int i = 0; i < n; ++i) {
      const int l = std::min(nmax, ni(tt * x[i]));
      const float diff = x[i] - s * static_cast<float>(l);
      e += w[i] * diff * diff;
    }
    if (e < err) {
      err = e;
      t = tt;
    }
  }
  float A = 0, B = 0;
  for (int i = 0; i < n; ++i) {
    const int l = std::min(nmax, ni(t * x[i]));
    levels[i] = static_cast<uint8_t>(l);
    A += w[i] * x[i] * static_cast<float>(l);
    B += w[i] * static_cast<float>(l) * static_cast<float>(l);
  }
  for (int sweep = 0; sweep < 5; ++sweep) {
    bool changed = false;
    for (int i = 0; i < n; ++i) {
      float a = A - w[i] * x[i] * levels[i];
      float b = B - w[i] * levels[i] * levels[i];
      if (!(a > 0 && b > 0)) continue;
      const int l = std::min(nmax, ni(x[i] * b / a));
      if (l == levels[i]) continue;
      const auto fl = static_cast<float>(l);
      a += w[i] * x[i] * fl;
      b += w[i] * fl * fl;
      if (a * a * B > A * A * b) {
        levels[i] = static_cast<uint8_t>(l);
        A = a;
        B = b;
        changed = true;
      }
    }
    if (!changed) break;
  }
  return A / B;
}

}  // namespace

void encode_iq2_xxs(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kBlockValues, values += kBlockValues, importance += kBlockValues, b += 66) {
    std::memset(b, 0, 66);
    const float variance = mean_square(values);
    std::array<float, 8> scales{};
    std::array<uint8_t, 8> codes{};
    for (int s = 0; s < 8; ++s) {
      SubBlock<32> x;
      weigh(x, values + 32 * s, importance + 32 * s, variance);
      x.load_values(values + 32 * s);
      x.make_signs_even();
      if (x.largest() < 1e-15f) continue;
      uint8_t levels[32];
      const float start = 3.0f * fit_positive(32, 4, x.magnitude, x.weight, levels);
      if (!(start > 0.0f)) continue;
      auto f = fit(iq2_xxs_search(), x, ladder<13>(5.0f, 0.1f, start), start / 3, Refit::kAllGroups);
      make_scale_positive(f, x);
      scales[static_cast<size_t>(s)] = f.scale;
      uint32_t signs = 0;
      for (int g = 0; g < 4; ++g) {
        b[2 + 8 * s + g] = static_cast<uint8_t>(f.rows[g]);
        signs |= (x.signs[g] & 127u) << 7 * g;
      }
      store<uint32_t>(b + 2 + 8 * s + 4, signs);
    }
    const float d = encode_scales(scales, codes);
    if (d == 0.0f) { std::memset(b, 0, 66); continue; }
    store_half(b, d);
    for (int s = 0; s < 8; ++s) b[2 + 8 * s + 7] |= static_cast<uint8_t>(codes[static_cast<size_t>(s)] << 4);
  }
}

void encode_iq2_xs(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kBlockValues, values += kBlockValues, importance += kBlockValues, b += 74) {
    std::memset(b, 0, 74);
    const float variance = mean_square(values);
    std::array<float, 16> scales{};
    std::array<uint8_t, 16> codes{};
    for (int s = 0; s < 16; ++s) {
      SubBlock<16> x;
      weigh(x, values + 16 * s, importance + 16 * s, variance);
      x.load_values(values + 16 * s);
      x.make_signs_even();
      const float largest = x.largest();
      if (largest < 1e-15f) continue;
      auto f = fit(iq2_xs_search(), x, ladder<19>(5.0f, 0.1f, largest), largest / 5, Refit::kSnappedGroups);
      make_scale_positive(f, x);
      scales[static_cast<size_t>(s)] = f.scale;
      for (int g = 0; g < 2; ++g)
        store<uint16_t>(b + 2 + 4 * s + 2 * g, static_cast<uint16_t>(f.rows[g] | (x.signs[g] & 127) << 9));
    }
    const float d = encode_scales(scales, codes);
    if (d == 0.0f) { std::memset(b, 0, 74); continue; }
    store_half(b, d);
    for (size_t s = 0; s < 16; ++s) b[66 + s / 2] |= static_cast<uint8_t>(codes[s] << 4 * (s % 2));
  }
}

void encode_iq2_s(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kBlockValues, values += kBlockValues, b += 82) {
    std::memset(b, 0, 82);
    const float variance = 2.0f * mean_square(values);
    std::array<float, 16> scales{};
    std::array<uint8_t, 16> codes{};
    for (int s = 0; s < 16; ++s) {
      SubBlock<16> x;
      if (importance != nullptr)
        weigh(x, values + 16 * s, importance + 16 * s, variance);
      else
        weigh(x, values + 16 * s, 0.25f * variance);
      x.load_values(values + 16 * s);
      const float largest = x.largest();
      if (largest < 1e-8f) continue;
      auto f = fit(iq2_s_search(), x, ladder<19>(5.0f, 0.1f, largest), largest / 5, Refit::kSnappedGroups);
      make_scale_positive(f, x);
      scales[static_cast<size_t>(s)] = f.scale;
      for (int g = 0; g < 2; ++g) {
        const int k = 2 * s + g;
        b[2 + k] = static_cast<uint8_t>(f.rows[g]);
        b[34 + k] = x.signs[g];
        b[66 + k / 4] |= static_cast<uint8_t>(f.rows[g] >> 8 << 2 * (k % 4));
      }
    }
    if (importance != nullptr) importance += kBlockValues;
    const float d = encode_scales(scales, codes);
    if (d == 0.0f) { std::memset(b, 0, 82); continue; }
    store_half(b, d * 0.9875f);
    for (size_t s = 0; s < 16; ++s) b[74 + s / 2] |= static_cast<uint8_t>(codes[s] << 4 * (s % 2));
  }
}

void encode_iq3_xxs(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kBlockValues, values += kBlockValues, b += 98) {
    std::memset(b, 0, 98);
    const float variance = 2.0f * mean_square(values);
    std::array<float, 8> scales{};
    std::array<uint8_t, 8> codes{};
    for (int s = 0; s < 8; ++s) {
      SubBlock<32> x;
      if (importance != nullptr)
        weigh(x, values + 32 * s, importance + 32 * s, variance);
      else
        weigh(x, values + 32 * s, 0.0f);
      x.load_values(values + 32 * s);
      x.make_signs_even();
      const float largest = x.largest();
      if (largest < 1e-8f) continue;
      auto f = fit(iq3_xxs_search(), x, ladder<31>(15.0f, 0.2f, largest), largest / 15, Refit::kSnappedGroups);
      make_scale_positive(f, x);
      scales[static_cast<size_t>(s)] = f.scale;
      for (int g = 0; g < 8; ++g) b[2 + 8 * s + g] = static_cast<uint8_t>(f.rows[g]);
      uint32_t signs = 0;
      for (int g = 0; g < 4; ++g) signs |= (x.signs[g] & 127u) << 7 * g;
      store<uint32_t>(b + 66 + 4 * s, signs);
    }
    if (importance != nullptr) importance += kBlockValues;
    const float d = encode_scales(scales, codes);
    if (d == 0.0f) { std::memset(b, 0, 98); continue; }
    store_half(b, d * 1.0125f);
    for (size_t s = 0; s < 8; ++s) b[66 + 4 * s + 3] |= static_cast<uint8_t>(codes[s] << 4);
  }
}

void encode_iq3_s(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kBlockValues, values += kBlockValues, b += 110) {
    std::memset(b, 0, 110);
    const float variance = 2.0f * mean_square(values);
    std::array<float, 8> scales{};
    std::array<uint8_t, 8> codes{};
    for (int s = 0; s < 8; ++s) {
      SubBlock<32> x;
      if (importance != nullptr)
        weigh(x, values + 32 * s, importance + 32 * s, variance);
      else
        weigh(x, values + 32 * s, 0.0f);
      x.load_values(values + 32 * s);
      const float largest = x.largest();
      if (!(largest > 0.0f)) continue;
      auto f = fit(iq3_s_search(), x, ladder<19>(15.0f, 0.2f, largest), largest / 15, Refit::kAllGroupsIfSnapped);
      make_scale_positive(f, x);
      scales[static_cast<size_t>(s)] = f.scale;
      for (int g = 0; g < 8; ++g) {
        b[2 + 8 * s + g] = static_cast<uint8_t>(f.rows[g]);
        b[66 + s] |= static_cast<uint8_t>(f.rows[g] >> 8 << g);
      }
      std::memcpy(b + 74 + 4 * s, x.signs, 4);
    }
    if (importance != nullptr) importance += kBlockValues;
    const float d = encode_scales(scales, codes);
    if (d == 0.0f) { std::memset(b, 0, 110); continue; }
    store_half(b, d * 1.033f);
    for (size_t s = 0; s < 8; ++s) b[106 + s / 2] |= static_cast<uint8_t>(codes[s] << 4 * (s % 2));
  }
}

}  // namespace v100
