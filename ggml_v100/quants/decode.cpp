// Finds the decoder of a tensor type.
#include "quants/decode.h"

#include <array>
#include <string>

#include "base/error.h"
#include "quants/decode_blocks.h"

namespace v100 {

namespace {

constexpr std::array<BlockDecoder*, kQuantTypeCount> kDecoders = [] {
  std::array<BlockDecoder*, kQuantTypeCount> table{};
  const auto set = [&table](QuantType type, BlockDecoder* decoder) { table[static_cast<size_t>(type)] = decoder; };
  using enum QuantType;
  set(F32, decode_f32);
  set(F16, decode_f16);
  set(BF16, decode_bf16);
  set(F64, decode_f64);
  set(Q4_0, decode_q4_0);
  set(Q4_1, decode_q4_1);
  set(Q5_0, decode_q5_0);
  set(Q5_1, decode_q5_1);
  set(Q8_0, decode_q8_0);
  set(Q8_1, decode_q8_1);
  set(IQ4_NL, decode_iq4_nl);
  set(MXFP4, decode_mxfp4);
  set(NVFP4, decode_nvfp4);
  set(Q1_0, decode_q1_0);
  set(Q2_0, decode_q2_0);
  set(Q2_K, decode_q2_k);
  set(Q3_K, decode_q3_k);
  set(Q4_K, decode_q4_k);
  set(Q5_K, decode_q5_k);
  set(Q6_K, decode_q6_k);
  set(Q8_K, decode_q8_k);
  set(TQ1_0, decode_tq1_0);
  set(TQ2_0, decode_tq2_0);
  set(IQ1_S, decode_iq1_s);
  set(IQ1_M, decode_iq1_m);
  set(IQ2_XXS, decode_iq2_xxs);
  set(IQ2_XS, decode_iq2_xs);
  set(IQ2_S, decode_iq2_s);
  set(IQ3_XXS, decode_iq3_xxs);
  set(IQ3_S, decode_iq3_s);
  set(IQ4_XS, decode_iq4_xs);
  return table;
}();

}  // namespace

void decode(QuantType type, const std::byte* blocks, float* values, int64_t n_values) {
  const QuantTraits& t = traits(type);
  BlockDecoder* const decoder = kDecoders[static_cast<size_t>(type)];
  if (decoder == nullptr) throw InvalidArgument(std::string(t.name) + " holds integers and does not decode to f32");
  if (n_values < 0 || n_values % t.block_values != 0)
    throw InvalidArgument(std::string(t.name) + ": " + std::to_string(n_values) + " values, expected a multiple of " +
                          std::to_string(t.block_values));
  if (n_values > 0) decoder(reinterpret_cast<const uint8_t*>(blocks), values, n_values / t.block_values);
}

}  // namespace v100
