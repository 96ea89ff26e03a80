// Searches for the scale (and minimum) of a sub-block that make the weighted squared error of its levels small.
//
// Their results are part of the formats' byte-exact contract: every sum is f32, from left to right. They are fast
// because many sub-blocks are searched at a time, one per vector lane; encode_search_lanes.h has the code.
#pragma once

#include <bit>
#include <cstdint>

namespace v100 {

// count consecutive sub-blocks of n <= 32 values each.
struct SubBlocks {
  const float* values;
  const float* weights;  // one per value, >= 0
  int n;
  int count;
};

// Candidates of the asymmetric search: (first + step * k + max_level) / range levels per unit, k = 0..last.
struct AsymmetricSteps {
  float first, step;
  int last;
  bool absolute_error;  // minimise sum w |e| instead of sum w e^2
  bool saturate;        // levels of quotients that overflow are 0 or max_level, not arbitrary
};

// Results have one scale (and min) per sub-block; levels are in the order of the values.
struct EncodeSearches {
  // value = scale * (level - max_level), 0 <= level < 2 max_level.
  void (*symmetric)(const SubBlocks&, int max_level, float* scales, uint8_t* levels);
  // value = scale * level - min, 0 <= level <= max_level, min >= 0.
  void (*asymmetric)(const SubBlocks&, int max_level, const AsymmetricSteps&, float* scales, float* mins,
                     uint8_t* levels);
  // value = scale * (level - 4), 0 <= level < 8: one candidate, then each level in turn is moved while that helps.
  void (*three_bit)(const SubBlocks&, float* scales, uint8_t* levels);
  // value = scale * kNonLinearLevels[level].
  void (*non_linear)(const SubBlocks&, float* scales);
};

extern const EncodeSearches kGenericSearches;
#if defined(__x86_64__)
extern const EncodeSearches kAvx2Searches, kAvx512Searches;
#endif

// Those of the widest vectors that this processor has. All give the same bytes.
const EncodeSearches& encode_searches();

// value = scale * level, 0 <= level <= max_level; returns the scale. values >= 0 (IQ2_XXS: any), n <= 32.
// A level is kept in a byte: a negative one counts as 256 + level from its second use on.
float search_positive(int n, int max_level, const float* values, const float* weights, uint8_t* levels);

// Round half to even, by the carry of an addition: |value| <= 4194303, others give some integer of 23 bits.
inline int32_t nearest_int(float value) { return (std::bit_cast<int32_t>(value + 12582912.0f) & 0x7FFFFF) - 0x400000; }

}  // namespace v100
