// Encoders of IQ1_S and IQ1_M: super-blocks of 256 values; 32 or 16 values share a scale, groups of 8 become one
// codebook row of levels -1, 0, 1, all moved by a shift of 0.125 up or down. Bytes of a block: decode_iq.cpp.
//
// Sorted values take rising levels, so two cuts and the shifts describe every sensible choice: all are tried, and the
// weighted least-squares fit judges. Groups that are no codebook row then snap to a neighbour. Sums are f32.
#include <algorithm>
#include <array>
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
constexpr float kShift = 0.125f;

// The three levels of a part that is shifted up or down.
struct ShiftedLevels {
  float level[3];
  explicit ShiftedLevels(bool down) {
    const float shift = down ? -kShift : kShift;
    for (int digit = 0; digit < 3; ++digit) level[digit] = static_cast<float>(digit - 1) + shift;
  }
};

// Values that share a scale, in kParts equal parts that each have a shift.
template <int kValues, int kParts>
struct SubBlock {
  static constexpr int kGroups = kValues / 8;
  static constexpr int kPartValues = kValues / kParts;

  const float* values;
  float weight[kValues];

  // Result: value = scale * (level of its row's digit, shifted).
  float scale = 0.0f;
  uint32_t down = 0;  // bit p: part p is shifted down
  int rows[kGroups];

  ShiftedLevels levels_of_group(int g) const { return ShiftedLevels((down >> 8 * g / kPartValues & 1u) != 0); }

  float level(int i, const TernaryCodebookSearch& search) const {
    return levels_of_group(i / 8).level[search.digit(rows[i / 8], i % 8)];
  }

  // Sub-blocks whose values are all below the threshold count as zero.
  void encode(float threshold);

 private:
  void split(uint8_t* digits);
};

// Indexes of the values from the lowest up, equal ones in their order.
template <size_t n>
std::array<size_t, n> ascending_order(const float* values) {
  std::array<size_t, n> order;
  for (size_t i = 0; i < n; ++i) {
    size_t at = i;
    for (; at > 0 && values[order[at - 1]] > values[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  return order;
}

// Tries all cuts and shifts. Where no value has weight, levels are the highest and scale is 0.
template <int kValues, int kParts>
void SubBlock<kValues, kParts>::split(uint8_t* digits) {
  constexpr int kCuts = kValues + 1;
  constexpr int kLanes = 4;
  constexpr int kPadded = (kCuts + kLanes - 1) / kLanes * kLanes;
  constexpr int kShiftings = 1 << kParts;
  // Equal values fit any level, and rounding decides. IQ1_M then takes the smaller scale, as a large one coarsens the
  // others of the super-block; IQ1_S does not, for its bytes are settled.
  constexpr float kTie = kParts == 2 ? 1.00001f : 1.0f;

  const auto order = ascending_order<kValues>(values);
  // Sums of each part over the values below a cut; the padding repeats the last cut.
  float below_xw[kParts][kPadded] = {}, below_w[kParts][kPadded] = {};
  for (int j = 0; j < kValues; ++j) {
    const size_t i = order[static_cast<size_t>(j)];
    for (int part = 0; part < kParts; ++part) {
      const bool is_in = static_cast<int>(i) / kPartValues == part;
      below_xw[part][j + 1] = below_xw[part][j] + (is_in ? weight[i] * values[i] : 0.0f);
      below_w[part][j + 1] = below_w[part][j] + (is_in ? weight[i] : 0.0f);
    }
  }

  for (int part = 0; part < kParts; ++part) {
    std::fill(below_xw[part] + kCuts, below_xw[part] + kPadded, below_xw[part][kValues]);
    std::fill(below_w[part] + kCuts, below_w[part] + kPadded, below_w[part][kValues]);
  }
  // Contributions of the values above a cut, which take the highest level, by shift.
  const ShiftedLevels shifted[2] = {ShiftedLevels(false), ShiftedLevels(true)};
  float above_xq[kParts][2][kPadded], above_qq[kParts][2][kPadded];
  for (int part = 0; part < kParts; ++part)
    for (int shift = 0; shift < 2; ++shift)
      for (int cut = 0; cut < kPadded; ++cut) {
        const float q = shifted[shift].level[2];
        above_xq[part][shift][cut] = (below_xw[part][kValues] - below_xw[part][cut]) * q;
        above_qq[part][shift][cut] = (below_w[part][kValues] - below_w[part][cut]) * q * q;
      }

  float best_gain = 0.0f;
  int best_low = 0, best_high = 0;
  for (int low = 0; low < kCuts; ++low) {
    const int start = low / kLanes * kLanes;  // the loops along high cuts are vectors without remainder
    float part_xq[kParts][2][kPadded], part_qq[kParts][2][kPadded];
    for (int part = 0; part < kParts; ++part)
      for (int shift = 0; shift < 2; ++shift) {
        const float* q = shifted[shift].level;
        const float low_xw = below_xw[part][low], low_w = below_w[part][low];
        const float low_xq = low_xw * q[0], low_qq = low_w * q[0] * q[0];
        for (int high = start; high < kPadded; ++high) {
          part_xq[part][shift][high] = low_xq + (below_xw[part][high] - low_xw) * q[1] + above_xq[part][shift][high];
          part_qq[part][shift][high] =
              low_qq + (below_w[part][high] - low_w) * q[1] * q[1] + above_qq[part][shift][high];
        }
      }
    const auto xq = [&](int s, int high) {
      return kParts == 1 ? part_xq[0][s][high] : part_xq[0][s % 2][high] + part_xq[kParts - 1][s / 2][high];
    };
    const auto qq = [&](int s, int high) {
      return kParts == 1 ? part_qq[0][s][high] : part_qq[0][s % 2][high] + part_qq[kParts - 1][s / 2][high];
    };
    int any_better = 0;
    for (int s = 0; s < kShiftings; ++s)
      for (int high = start; high < kPadded; ++high)
        any_better |= xq(s, high) * xq(s, high) > best_gain * qq(s, high) ? 1 : 0;
    if (any_better == 0) continue;
    for (int high = low; high < kCuts; ++high)
      for (int s = 0; s < kShiftings; ++s) {
        const float a = xq(s, high), b = qq(s, high);
        if (!(b > 0.0f && a * a > best_gain * b)) continue;
        if (a * a <= kTie * best_gain * b && std::fabs(a) > 1.1f * std::fabs(scale) * b) continue;
        scale = a / b;
        best_gain = scale * a;
        best_low = low;
        best_high = high;
        down = static_cast<uint32_t>(s);
      }
  }
  for (int j = 0; j < kValues; ++j) digits[order[static_cast<size_t>(j)]] = j < best_low ? 0 : j < best_high ? 1 : 2;
  if (scale < 0.0f) {
    scale = -scale;
    down ^= kShiftings - 1;
    for (int i = 0; i < kValues; ++i) digits[i] = static_cast<uint8_t>(2 - digits[i]);
  }
}

template <int kValues, int kParts>
void SubBlock<kValues, kParts>::encode(float threshold) {
  const TernaryCodebookSearch& search = iq1_search();
  std::fill(std::begin(rows), std::end(rows), 0);
  float largest = 0.0f;
  for (int i = 0; i < kValues; ++i) largest = std::max(largest, std::fabs(values[i]));
  uint8_t digits[kValues];
  if (largest < threshold) return;
  split(digits);

  bool any_snapped = false;
  for (int g = 0; g < kGroups; ++g) {
    int key = 0;
    for (int p = 0; p < 8; ++p) key += digits[8 * g + p] * search.kPlaces[static_cast<size_t>(p)];
    rows[g] = search.row_of(key);
    if (rows[g] >= 0) continue;
    any_snapped = true;
    const ShiftedLevels q = levels_of_group(g);
    TernaryCodebookSearch::Costs costs;
    for (int p = 0; p < 8; ++p)
      for (int digit = 0; digit < 3; ++digit) {
        const float error = scale * q.level[digit] - values[8 * g + p];
        costs[p][digit] = weight[8 * g + p] * error * error;
      }
    rows[g] = search.cheapest_neighbour(key, costs);
  }
  if (!any_snapped) return;
  float xq = 0.0f, qq = 0.0f;
  for (int i = 0; i < kValues; ++i) {
    const float q = level(i, search);
    xq += weight[i] * values[i] * q;
    qq += weight[i] * q * q;
  }
  if (xq > 0.0f && qq > 0.0f) scale = xq / qq;
}

// 3-bit code c of a scale that is about d * (2 * c + 1); 0 for NaN.
uint32_t scale_code(float scale, float inverse_d) {
  const float wanted = 0.5f * (inverse_d * scale - 1.0f);
  return wanted > 0.0f ? static_cast<uint32_t>(nearest_int(std::min(wanted, 7.0f))) : 0;
}

}  // namespace

void encode_iq1_s(const float* values, int64_t n, const float* importance, uint8_t* b) {
  for (; n > 0; n -= kSuper, values += kSuper, importance += kSuper, b += 50) {
    const float variance = 2.0f * sum_of_squares(values, kSuper) / kSuper;
    SubBlock<32, 1> subs[8];
    float largest = 0.0f;
    for (int s = 0; s < 8; ++s) {
      SubBlock<32, 1>& x = subs[s];
      x.values = values + 32 * s;
      importance_weights(x.values, importance + 32 * s, 32, variance, x.weight);
      x.encode(1e-12f);
      largest = std::max(largest, x.scale);
    }
    std::memset(b, 0, 50);
    if (!(largest > 0.0f)) continue;
    const float d = largest / 15.0f;
    const float inverse = 1.0f / d;
    store_half(b, d * 1.125f);
    for (int s = 0; s < 8; ++s) {
      uint32_t high = (scale_code(subs[s].scale, inverse) | subs[s].down << 3) << 12;
      for (int g = 0; g < 4; ++g) {
        b[2 + 4 * s + g] = static_cast<uint8_t>(subs[s].rows[g]);
        high |= static_cast<uint32_t>(subs[s].rows[g] >> 8 << 3 * g);
      }
      store(b + 34 + 2 * s, static_cast<uint16_t>(high));
    }
  }
}

void encode_iq1_m(const float* values, int64_t n, const float* importance, uint8_t* b) {
  const TernaryCodebookSearch& search = iq1_search();
  for (; n > 0; n -= kSuper, values += kSuper, b += 56) {
    const float variance = 2.0f * sum_of_squares(values, kSuper) / kSuper;
    SubBlock<16, 2> subs[16];
    float largest = 0.0f;
    for (int s = 0; s < 16; ++s) {
      SubBlock<16, 2>& x = subs[s];
      x.values = values + 16 * s;
      if (importance != nullptr)
        importance_weights(x.values, importance + 16 * s, 16, variance, x.weight);
      else
        square_weights(x.values, 16, x.weight);
      x.encode(1e-7f);
      largest = std::max(largest, x.scale);
    }
    if (importance != nullptr) importance += kSuper;
    std::memset(b, 0, 56);
    if (!(largest > 0.0f)) continue;

    // With all levels chosen, the super-block's scale is fitted once more.
    float d = largest / 15.0f;
    const float inverse = 1.0f / d;
    uint32_t codes[16];
    float xq = 0.0f, qq = 0.0f;
    for (int s = 0; s < 16; ++s) {
      codes[s] = scale_code(subs[s].scale, inverse);
      for (int i = 0; i < 16; ++i) {
        const float q = static_cast<float>(2 * codes[s] + 1) * subs[s].level(i, search);
        xq += subs[s].weight[i] * subs[s].values[i] * q;
        qq += subs[s].weight[i] * q * q;
      }
    }
    if (qq > 0.0f) d = xq / qq;
    const uint32_t d_bits = f16_from_f32(d * 1.1125f);
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = (d_bits >> 4 * i & 15u) << 12;
    for (int s = 0; s < 16; ++s) {
      words[s / 4] |= codes[s] << 3 * (s % 4);
      for (int g = 0; g < 2; ++g) {
        const auto row = static_cast<uint32_t>(subs[s].rows[g]);
        b[2 * s + g] = static_cast<uint8_t>(row);
        b[32 + s] |= static_cast<uint8_t>((row >> 8 | (subs[s].down >> g & 1u) << 3) << 4 * g);
      }
    }
    for (int i = 0; i < 4; ++i) store(b + 48 + 2 * i, static_cast<uint16_t>(words[i]));
  }
}

}  // namespace v100
