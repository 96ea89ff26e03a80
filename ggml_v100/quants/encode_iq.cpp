// Encoders of IQ2 and IQ3: super-blocks of 256 values; 16 or 32 values share a scale, groups of 8 (IQ2) or 4 (IQ3)
// magnitudes become one codebook row of levels 1, 3, 5, ...; signs are stored apart. Bytes of a block: decode_iq.cpp.
//
// A sub-block tries a ladder of scales. Under each, magnitudes round to levels, groups that are no codebook row snap to
// a neighbour, and the weighted least-squares fit judges the outcome. Sums are f32, in the order of the values.
//
// Bytes are those of ggml's quantisers but for two of their faults: IQ3_S misplaces the bytes of sub-blocks behind one
// of zeros, and quotients above 2^22 become arbitrary levels (here the highest).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "quants/block_bytes.h"
#include "quants/codebook_search.h"
#include "quants/encode_blocks.h"
#include "quants/encode_search.h"
#include "quants/encode_weights.h"

namespace v100 {

namespace {

constexpr int kSuper = 256;  // values of a super-block

// Which groups are rounded once more, under the scale that the ladder has found.
enum class Refit {
  Snapped,          // those that are no codebook row
  AllIfAnySnapped,  // all, if there is such a group or no rung of the ladder was of use
  All,
};

// Values that share a scale, and what they become: about scale * level of the codebook row, with their signs.
template <class Format>
struct SubBlock {
  static constexpr int kValues = Format::kSubValues;
  static constexpr int kRowValues = static_cast<int>(Format::Search::kPlaces.size());
  static constexpr int kGroups = kValues / kRowValues;

  float magnitude[kValues];  // |value|; below zero where a sign was given up
  float weight[kValues];
  float root_weight[kValues];
  uint8_t signs[kValues / 8];  // bit j of byte k: value 8 * k + j is negated
  float scale;                 // >= 0
  int rows[kGroups];

  void load(const float* values, const float* importance, float mean_square);
  void encode();

 private:
  void make_signs_even();
  void fit(float ladder_scale, float first_scale);
  void refit(const bool (&snapped)[kGroups]);  // groups that the ladder's choice had to snap
  int snap(int key, int group, float trial_scale) const;
};

template <class Format>
void SubBlock<Format>::load(const float* values, const float* importance, float mean_square) {
  if (importance != nullptr) {
    importance_weights(values, importance, kValues, Format::kVariance * mean_square, weight);
  } else {
    square_weights(values, kValues, weight);
    for (float& w : weight) w = Format::kUnweightedVariance * mean_square + w;
  }
  std::fill(std::begin(signs), std::end(signs), uint8_t{0});
  for (int i = 0; i < kValues; ++i) {
    magnitude[i] = std::fabs(values[i]);
    root_weight[i] = std::sqrt(weight[i]);
    signs[i / 8] |= static_cast<uint8_t>((values[i] < 0.0f ? 1u : 0u) << i % 8);
  }
}

// Where only 7 of 8 signs are stored, the number of minus signs is even: the value whose sign costs least gives it up.
template <class Format>
void SubBlock<Format>::make_signs_even() {
  for (int k = 0; k < kValues / 8; ++k) {
    if (std::popcount(signs[k]) % 2 == 0) continue;
    const auto cost = [&](int i) { return weight[i] * magnitude[i] * magnitude[i]; };
    int cheapest = 8 * k;
    for (int i = 8 * k + 1; i < 8 * k + 8; ++i)
      if (cost(i) < cost(cheapest)) cheapest = i;
    magnitude[cheapest] = -magnitude[cheapest];
    signs[k] ^= static_cast<uint8_t>(1u << cheapest % 8);
  }
}

template <class Format>
void SubBlock<Format>::encode() {
  if (Format::kEvenSigns) make_signs_even();
  const float largest = *std::max_element(magnitude, magnitude + kValues);
  float ladder_scale = largest, first_scale = largest / (2 * Format::Search::kMaxDigit + 1);
  if (Format::kStartsFromLevelSearch && largest > Format::kNegligible) {
    uint8_t levels[kValues];
    first_scale = search_positive(kValues, 4, magnitude, weight, levels);
    ladder_scale = 3.0f * first_scale;
  }
  std::fill(std::begin(rows), std::end(rows), 0);
  if (!(largest > Format::kNegligible && ladder_scale > 0.0f)) {
    scale = 0.0f;
    std::fill(std::begin(signs), std::end(signs), uint8_t{0});
    return;
  }
  fit(ladder_scale, first_scale);
  if (scale < 0.0f) {
    scale = -scale;
    for (uint8_t& s : signs) s = static_cast<uint8_t>(~s);
  }
}

// Digit (half to even) whose level 2 * digit + 1 meets magnitude * inverse_scale; 0 for NaN.
float nearest_digit(float inverse_scale, float magnitude, float max_digit) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits below one
  const float wanted = 0.5f * (inverse_scale * magnitude - 1.0f);
  const float positive = wanted > 0.0f ? wanted : 0.0f;
  return ((positive < max_digit ? positive : max_digit) + kRounder) - kRounder;
}

template <class Format>
int SubBlock<Format>::snap(int key, int group, float trial_scale) const {
  typename Format::Search::Costs costs;
  for (int p = 0; p < kRowValues; ++p)
    for (int digit = 0; digit < Format::Search::kCostStride; ++digit) {
      const int i = group * kRowValues + p;
      const float error = trial_scale * static_cast<float>(2 * digit + 1) - magnitude[i];
      costs[p][digit] = root_weight[i] * error * error;
    }
  return Format::search().cheapest_neighbour(key, costs);
}

// Sets scale and rows. The ladder's middle rung gives ladder_scale the largest level; first_scale is the scale where no
// rung is of use: all weights zero, or sums that underflow.
template <class Format>
void SubBlock<Format>::fit(float ladder_scale, float first_scale) {
  constexpr int kRungs = Format::kRungs;
  constexpr int kLanes = (kRungs + 3) / 4 * 4;  // arrays are [value][rung] and padded: loops along rungs are vectors
  const auto& search = Format::search();

  float inverse[kLanes];
  for (int r = 0; r < kLanes; ++r)
    inverse[r] = (static_cast<float>(2 * search.kMaxDigit + 1) + static_cast<float>(r - kRungs / 2) * Format::kRung) /
                 ladder_scale;

  float level[kValues][kLanes];
  int rung_rows[kRungs][kGroups];
  bool snapped[kRungs][kGroups];
  for (int g = 0; g < kGroups; ++g) {
    float key[kLanes] = {};
    for (int p = 0; p < kRowValues; ++p) {
      const int i = g * kRowValues + p;
      const auto place = static_cast<float>(search.kPlaces[static_cast<size_t>(p)]);
      for (int r = 0; r < kLanes; ++r) {
        const float digit = nearest_digit(inverse[r], magnitude[i], search.kMaxDigit);
        level[i][r] = 2.0f * digit + 1.0f;
        key[r] += digit * place;
      }
    }
    for (int r = 0; r < kRungs; ++r) {
      int row = search.row_of(static_cast<int>(key[r]));
      snapped[r][g] = row < 0;
      if (row < 0) {
        row = snap(static_cast<int>(key[r]), g, 1.0f / inverse[r]);
        for (int p = 0; p < kRowValues; ++p)
          level[g * kRowValues + p][r] = static_cast<float>(2 * search.digit(row, p) + 1);
      }
      rung_rows[r][g] = row;
    }
  }

  // The best scale is sum_xq / sum_qq; it leaves an error that is smaller by sum_xq^2 / sum_qq than that of scale 0.
  float sum_xq[kLanes] = {}, sum_qq[kLanes] = {};
  for (int i = 0; i < kValues; ++i) {
    const float w = weight[i], wx = weight[i] * magnitude[i];
    for (int r = 0; r < kLanes; ++r) {
      sum_xq[r] += wx * level[i][r];
      sum_qq[r] += w * level[i][r] * level[i][r];
    }
  }
  scale = first_scale;
  float best_gain = 0.0f;
  int best = -1;
  for (int r = 0; r < kRungs; ++r) {
    if (!(sum_qq[r] > 0.0f && sum_xq[r] * sum_xq[r] > best_gain * sum_qq[r])) continue;
    scale = sum_xq[r] / sum_qq[r];
    best_gain = scale * sum_xq[r];
    best = r;
  }
  bool unfitted[kGroups];
  std::fill(std::begin(unfitted), std::end(unfitted), Format::kRefit != Refit::Snapped);
  if (best >= 0) std::copy(rung_rows[best], rung_rows[best] + kGroups, rows);
  refit(best >= 0 ? snapped[best] : unfitted);
}

template <class Format>
void SubBlock<Format>::refit(const bool (&snapped)[kGroups]) {
  const bool any_snapped = std::find(std::begin(snapped), std::end(snapped), true) != std::end(snapped);
  if (!(any_snapped || Format::kRefit == Refit::All) || !(scale > 0.0f)) return;
  const auto& search = Format::search();
  const float inverse = 1.0f / scale;
  float sum_xq = 0.0f, sum_qq = 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    if (snapped[g] || Format::kRefit != Refit::Snapped) {
      int key = 0;
      for (int p = 0; p < kRowValues; ++p)
        key += static_cast<int>(nearest_digit(inverse, magnitude[g * kRowValues + p], search.kMaxDigit)) *
               search.kPlaces[static_cast<size_t>(p)];
      const int row = search.row_of(key);
      rows[g] = row >= 0 ? row : snap(key, g, scale);
    }
    for (int p = 0; p < kRowValues; ++p) {
      const int i = g * kRowValues + p;
      const auto q = static_cast<float>(2 * search.digit(rows[g], p) + 1);
      sum_xq += weight[i] * magnitude[i] * q;
      sum_qq += weight[i] * q * q;
    }
  }
  if (sum_qq > 0.0f) scale = sum_xq / sum_qq;
}

// A scale is stored as a 4-bit code c of d * (2 * c + 1), d being the super-block's scale.
constexpr int kMaxCode = 15;

template <class Format>
void encode_row(const float* values, int64_t n, const float* importance, uint8_t* block) {
  constexpr int kSubs = kSuper / Format::kSubValues;
  SubBlock<Format> subs[kSubs];
  for (; n > 0; n -= kSuper, values += kSuper, block += Format::kBlockBytes) {
    const float mean_square = sum_of_squares(values, kSuper) / kSuper;
    float largest = 0.0f;
    for (int s = 0; s < kSubs; ++s) {
      const int at = s * Format::kSubValues;
      subs[s].load(values + at, importance != nullptr ? importance + at : nullptr, mean_square);
      subs[s].encode();
      largest = std::max(largest, subs[s].scale);
    }
    if (importance != nullptr) importance += kSuper;
    std::memset(block, 0, Format::kBlockBytes);
    if (largest == 0.0f) continue;
    const float d = largest / (2 * kMaxCode + 1);
    const float inverse = 1.0f / d;
    store_half(block, d * Format::kStoredScale);
    for (int s = 0; s < kSubs; ++s)
      Format::store(subs[s], s, static_cast<uint32_t>(nearest_digit(inverse, subs[s].scale, kMaxCode)), block);
  }
}

// 32 values: 4 x 7 signs and the scale's code.
template <class Format>
uint32_t signs_and_code(const SubBlock<Format>& x, uint32_t code) {
  uint32_t word = code << 28;
  for (int k = 0; k < 4; ++k) word |= (x.signs[k] & 127u) << 7 * k;
  return word;
}

void store_nibble(uint8_t* bytes, int index, uint32_t value) {
  bytes[index / 2] |= static_cast<uint8_t>(value << 4 * (index % 2));
}

// kVariance, kUnweightedVariance: how often the super-block's mean square counts in the weight of a value.
// kStoredScale corrects the bias of the scales.

struct Iq2Xxs {
  using Search = TernaryCodebookSearch;
  static const Search& search() { return iq2_xxs_search(); }
  static constexpr int kBlockBytes = 66, kSubValues = 32, kRungs = 13;
  static constexpr float kRung = 0.1f, kVariance = 1.0f, kUnweightedVariance = 0.0f, kStoredScale = 1.0f;
  static constexpr float kNegligible = 1e-15f;
  static constexpr bool kEvenSigns = true, kStartsFromLevelSearch = true;
  static constexpr Refit kRefit = Refit::All;

  static void store(const SubBlock<Iq2Xxs>& x, int s, uint32_t code, uint8_t* block) {
    for (int g = 0; g < 4; ++g) block[2 + 8 * s + g] = static_cast<uint8_t>(x.rows[g]);
    v100::store(block + 6 + 8 * s, signs_and_code(x, code));
  }
};

struct Iq2Xs {
  using Search = TernaryCodebookSearch;
  static const Search& search() { return iq2_xs_search(); }
  static constexpr int kBlockBytes = 74, kSubValues = 16, kRungs = 19;
  static constexpr float kRung = 0.1f, kVariance = 1.0f, kUnweightedVariance = 0.0f, kStoredScale = 1.0f;
  static constexpr float kNegligible = 1e-15f;
  static constexpr bool kEvenSigns = true, kStartsFromLevelSearch = false;
  static constexpr Refit kRefit = Refit::Snapped;

  static void store(const SubBlock<Iq2Xs>& x, int s, uint32_t code, uint8_t* block) {
    for (int g = 0; g < 2; ++g)
      v100::store(block + 2 + 4 * s + 2 * g, static_cast<uint16_t>(x.rows[g] | (x.signs[g] & 127) << 9));
    store_nibble(block + 66, s, code);
  }
};

struct Iq2S {
  using Search = TernaryCodebookSearch;
  static const Search& search() { return iq2_s_search(); }
  static constexpr int kBlockBytes = 82, kSubValues = 16, kRungs = 19;
  static constexpr float kRung = 0.1f, kVariance = 2.0f, kUnweightedVariance = 0.5f, kStoredScale = 0.9875f;
  static constexpr float kNegligible = 1e-8f;
  static constexpr bool kEvenSigns = false, kStartsFromLevelSearch = false;
  static constexpr Refit kRefit = Refit::Snapped;

  static void store(const SubBlock<Iq2S>& x, int s, uint32_t code, uint8_t* block) {
    for (int g = 0; g < 2; ++g) {
      const int k = 2 * s + g;
      block[2 + k] = static_cast<uint8_t>(x.rows[g]);
      block[34 + k] = x.signs[g];
      block[66 + k / 4] |= static_cast<uint8_t>(x.rows[g] >> 8 << 2 * (k % 4));
    }
    store_nibble(block + 74, s, code);
  }
};

struct Iq3Xxs {
  using Search = OctalCodebookSearch;
  static const Search& search() { return iq3_xxs_search(); }
  static constexpr int kBlockBytes = 98, kSubValues = 32, kRungs = 31;
  static constexpr float kRung = 0.2f, kVariance = 2.0f, kUnweightedVariance = 0.0f, kStoredScale = 1.0125f;
  static constexpr float kNegligible = 1e-8f;
  static constexpr bool kEvenSigns = true, kStartsFromLevelSearch = false;
  static constexpr Refit kRefit = Refit::Snapped;

  static void store(const SubBlock<Iq3Xxs>& x, int s, uint32_t code, uint8_t* block) {
    for (int g = 0; g < 8; ++g) block[2 + 8 * s + g] = static_cast<uint8_t>(x.rows[g]);
    v100::store(block + 66 + 4 * s, signs_and_code(x, code));
  }
};

struct Iq3S {
  using Search = OctalCodebookSearch;
  static const Search& search() { return iq3_s_search(); }
  static constexpr int kBlockBytes = 110, kSubValues = 32, kRungs = 19;
  static constexpr float kRung = 0.2f, kVariance = 2.0f, kUnweightedVariance = 0.0f, kStoredScale = 1.033f;
  static constexpr float kNegligible = 0.0f;
  static constexpr bool kEvenSigns = false, kStartsFromLevelSearch = false;
  static constexpr Refit kRefit = Refit::AllIfAnySnapped;

  static void store(const SubBlock<Iq3S>& x, int s, uint32_t code, uint8_t* block) {
    for (int g = 0; g < 8; ++g) {
      block[2 + 8 * s + g] = static_cast<uint8_t>(x.rows[g]);
      block[66 + s] |= static_cast<uint8_t>(x.rows[g] >> 8 << g);
    }
    std::memcpy(block + 74 + 4 * s, x.signs, 4);
    store_nibble(block + 106, s, code);
  }
};

}  // namespace

void encode_iq2_xxs(const float* values, int64_t n, const float* importance, uint8_t* blocks) {
  encode_row<Iq2Xxs>(values, n, importance, blocks);
}

void encode_iq2_xs(const float* values, int64_t n, const float* importance, uint8_t* blocks) {
  encode_row<Iq2Xs>(values, n, importance, blocks);
}

void encode_iq2_s(const float* values, int64_t n, const float* importance, uint8_t* blocks) {
  encode_row<Iq2S>(values, n, importance, blocks);
}

void encode_iq3_xxs(const float* values, int64_t n, const float* importance, uint8_t* blocks) {
  encode_row<Iq3Xxs>(values, n, importance, blocks);
}

void encode_iq3_s(const float* values, int64_t n, const float* importance, uint8_t* blocks) {
  encode_row<Iq3S>(values, n, importance, blocks);
}

}  // namespace v100
