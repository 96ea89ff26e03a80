// Random blocks and activations, including the extremes that saturating instructions get wrong.
#include <cmath>

#include "harness.h"

namespace v100::test {

std::vector<int32_t> half_fields(QuantType type) {
  switch (type) {
    case QuantType::Q4_1:
    case QuantType::Q5_1:
    case QuantType::Q4_K:
    case QuantType::Q5_K:
      return {0, 2};
    case QuantType::Q2_K:
      return {80, 82};
    case QuantType::Q3_K:
      return {108};
    case QuantType::Q6_K:
      return {208};
    case QuantType::TQ1_0:
      return {52};
    case QuantType::TQ2_0:
      return {64};
    case QuantType::MXFP4:
    case QuantType::NVFP4:
    case QuantType::IQ1_M:  // in pieces
    case QuantType::F64:
      return {};
    default:
      return {0};
  }
}

namespace {

uint16_t random_half(Random& random, Scales scales) {
  const auto sign = static_cast<uint16_t>(random() & 0x8000u);
  switch (scales) {
    case Scales::subnormal:
      return static_cast<uint16_t>(sign | (random() & 0x3FFu));
    case Scales::large:
      return static_cast<uint16_t>(sign | f16_from_f32(30000.0f + static_cast<float>(random() % 30000)));
    case Scales::zero:
      return sign;
    default:
      return f16_from_f32(0.02f * normal(random));
  }
}

}  // namespace

std::vector<std::byte> random_rows(QuantType type, int32_t features, int32_t rows, Random& random, Scales scales,
                                   Codes codes) {
  const QuantTraits& t = traits(type);
  const int64_t blocks = int64_t{features} / t.block_values * rows;
  std::vector<std::byte> bytes(static_cast<size_t>(blocks * t.block_bytes));
  for (int64_t block = 0; block < blocks; ++block) {
    std::byte* at = bytes.data() + block * t.block_bytes;
    if (type == QuantType::F32) {
      const float value = normal(random);
      std::memcpy(at, &value, 4);
      continue;
    }
    if (type == QuantType::F64) {
      const double value = static_cast<double>(normal(random)) * (1 + 1e-12);
      std::memcpy(at, &value, 8);
      continue;
    }
    if (type == QuantType::F16 || type == QuantType::BF16) {
      const float value = normal(random);
      const uint16_t half = type == QuantType::F16 ? f16_from_f32(value) : bf16_from_f32(value);
      std::memcpy(at, &half, 2);
      continue;
    }
    // Lowest and highest: all code bits 0 or 1; for signed 8-bit codes -128 and 127.
    const std::byte lowest{static_cast<uint8_t>(type == QuantType::Q8_0 ? 0x80 : 0)};
    const std::byte highest{static_cast<uint8_t>(type == QuantType::Q8_0 ? 0x7F : 0xFF)};
    for (int32_t i = 0; i < t.block_bytes; ++i)
      at[i] = codes == Codes::random   ? static_cast<std::byte>(random() & 255u)
              : codes == Codes::lowest ? lowest
                                       : highest;
    if (type == QuantType::MXFP4) at[0] = static_cast<std::byte>(118 + random() % 6);
    if (type == QuantType::NVFP4 && scales == Scales::ordinary)  // else anything
      for (int32_t i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(0x30 + random() % 24);
    if (type == QuantType::IQ1_M) {  // the scale's bits are the top nibbles of four words
      const uint16_t half = random_half(random, scales);
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t rest = std::to_integer<int32_t>(at[49 + 2 * i]) & 15;
        at[49 + 2 * i] = static_cast<std::byte>(rest | (half >> (4 * i) & 15) << 4);
      }
    }
    for (const int32_t offset : half_fields(type)) {
      const uint16_t half = random_half(random, scales);
      std::memcpy(at + offset, &half, 2);
    }
  }
  return bytes;
}

std::vector<float> random_inputs(int32_t rows, int32_t features, Random& random, Inputs kind) {
  std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(features));
  for (size_t i = 0; i < values.size(); ++i) {
    switch (kind) {
      case Inputs::ordinary:
        values[i] = normal(random);
        break;
      case Inputs::constant:
        values[i] = (i / 32) % 2 == 0 ? 3.0f : -3.0f;
        break;  // every activation code +-127
      case Inputs::alternating:
        values[i] = i % 2 == 0 ? 1.0f : -1.0f;
        break;
      case Inputs::sparse:
        values[i] = i / 32 % 3 == 0 ? 0.0f : i % 32 == 5 ? normal(random) : 0.0f;
        break;
      case Inputs::tiny:
        values[i] = normal(random) * std::ldexp(1.0f, -100 - static_cast<int>(i / 32 % 49));
        break;
      case Inputs::huge:
        values[i] = normal(random) * std::ldexp(1.0f, 90 + static_cast<int>(i / 32 % 30));
        break;
    }
  }
  return values;
}

}  // namespace v100::test
