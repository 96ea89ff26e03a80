// Counts blocks of quantised types whose scales, or values of float types, are not finite.
#include <algorithm>

#include "quants/block_bytes.h"
#include "quants/decode.h"

namespace v100 {

namespace {

bool is_finite_f16(uint32_t bits) { return (bits & 0x7C00u) != 0x7C00u; }
bool is_finite_f32(uint32_t bits) { return (bits & 0x7F800000u) != 0x7F800000u; }
bool is_finite_f64(uint64_t bits) { return (bits >> 52 & 0x7FFu) != 0x7FFu; }

// Blocks that do not pass; a loop without early exit keeps the common, all-good case simple to vectorise.
template <class Check>
int64_t count_bad(const uint8_t* blocks, int64_t n_blocks, int64_t block_bytes, Check is_good) {
  int64_t bad = 0;
  for (const uint8_t* b = blocks; n_blocks-- > 0; b += block_bytes) bad += !is_good(b);
  return bad;
}

// Values whose exponent bits are all set. Counted in the values' own width, a stretch at a time: such a loop becomes vector
// instructions.
template <class Bits, Bits kExponent>
int64_t count_bad_floats(const uint8_t* values, int64_t n) {
  constexpr int64_t kStretch = 32768;  // its count fits in 16 bits
  int64_t bad = 0;
  for (; n > 0; n -= kStretch, values += kStretch * static_cast<int64_t>(sizeof(Bits))) {
    Bits in_stretch = 0;
    for (int64_t i = 0, end = std::min(n, kStretch); i < end; ++i)
      in_stretch = static_cast<Bits>(
          in_stretch + ((load<Bits>(values + i * static_cast<int64_t>(sizeof(Bits))) & kExponent) == kExponent));
    bad += in_stretch;
  }
  return bad;
}

// Byte offset in a block of its f16 scale, and of a second f16 (min, or sum) where the format has one.
struct HalfOffsets {
  QuantType type;
  int first, second;
};

using enum QuantType;

constexpr int kNone = -1;

constexpr HalfOffsets kHalfOffsets[] = {
    {Q4_0, 0, kNone},   {Q5_0, 0, kNone},   {Q8_0, 0, kNone},    {Q1_0, 0, kNone},    {Q2_0, 0, kNone},
    {IQ4_NL, 0, kNone}, {IQ4_XS, 0, kNone}, {IQ1_S, 0, kNone},   {IQ2_XXS, 0, kNone}, {IQ2_XS, 0, kNone},
    {IQ2_S, 0, kNone},  {IQ3_S, 0, kNone},  {IQ3_XXS, 0, kNone}, {Q4_1, 0, 2},        {Q5_1, 0, 2},
    {Q8_1, 0, 2},       {Q4_K, 0, 2},       {Q5_K, 0, 2},        {Q2_K, 80, 82},      {Q3_K, 108, kNone},
    {Q6_K, 208, kNone}, {TQ1_0, 52, kNone}, {TQ2_0, 64, kNone},
};

}  // namespace

int64_t count_non_finite(QuantType type, const std::byte* data, int64_t n_values) {
  const QuantTraits& t = traits(type);
  const auto* blocks = reinterpret_cast<const uint8_t*>(data);
  const int64_t n_blocks = n_values / t.block_values;
  const auto count = [&](auto is_good) { return count_bad(blocks, n_blocks, t.block_bytes, is_good); };
  switch (type) {
    case QuantType::F32:
      return count_bad_floats<uint32_t, 0x7F800000u>(blocks, n_values);
    case QuantType::F16:
      return count_bad_floats<uint16_t, 0x7C00>(blocks, n_values);
    case QuantType::BF16:
      return count_bad_floats<uint16_t, 0x7F80>(blocks, n_values);
    case QuantType::Q8_K:  // its scale is an f32 at the start of the block
      return count([](const uint8_t* b) { return is_finite_f32(load<uint32_t>(b)); });
    case QuantType::F64:
      return count([](const uint8_t* b) { return is_finite_f64(load<uint64_t>(b)); });
    case QuantType::IQ1_M:
      return count([](const uint8_t* b) { return is_finite_f16(iq1_m_scale_bits(b + 48)); });
    case QuantType::MXFP4:  // exponent 255 is NaN
      return count([](const uint8_t* b) { return b[0] != 255; });
    default:
      break;
  }
  for (const HalfOffsets& at : kHalfOffsets) {
    if (at.type != type) continue;
    if (at.second == kNone) return count([&](const uint8_t* b) { return is_finite_f16(load<uint16_t>(b + at.first)); });
    return count([&](const uint8_t* b) {
      return is_finite_f16(load<uint16_t>(b + at.first)) && is_finite_f16(load<uint16_t>(b + at.second));
    });
  }
  return 0;  // integers, and NVFP4, whose scales are always finite
}

bool all_finite(QuantType type, const std::byte* data, int64_t n_values) {
  return count_non_finite(type, data, n_values) == 0;
}

}  // namespace v100
