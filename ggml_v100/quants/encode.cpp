// Finds the encoder of a tensor type, and keeps faulty importance from spoiling blocks.
#include "quants/encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "quants/decode.h"
#include "quants/encode_blocks.h"

namespace v100 {

namespace {

constexpr std::array<RowEncoder*, kQuantTypeCount> kEncoders = [] {
  std::array<RowEncoder*, kQuantTypeCount> table{};
  const auto set = [&table](QuantType type, RowEncoder* encoder) { table[static_cast<size_t>(type)] = encoder; };
  using enum QuantType;
  set(F32, encode_f32);
  set(F16, encode_f16);
  set(BF16, encode_bf16);
  set(F64, encode_f64);
  set(Q4_0, encode_q4_0);
  set(Q4_1, encode_q4_1);
  set(Q5_0, encode_q5_0);
  set(Q5_1, encode_q5_1);
  set(Q8_0, encode_q8_0);
  set(IQ4_NL, encode_iq4_nl);
  set(MXFP4, encode_mxfp4);
  set(NVFP4, encode_nvfp4);
  set(Q1_0, encode_q1_0);
  set(Q2_0, encode_q2_0);
  set(Q2_K, encode_q2_k);
  set(Q3_K, encode_q3_k);
  set(Q4_K, encode_q4_k);
  set(Q5_K, encode_q5_k);
  set(Q6_K, encode_q6_k);
  set(TQ1_0, encode_tq1_0);
  set(TQ2_0, encode_tq2_0);
  set(IQ4_XS, encode_iq4_xs);
  set(IQ1_S, encode_iq1_s);
  set(IQ1_M, encode_iq1_m);
  set(IQ2_XXS, encode_iq2_xxs);
  set(IQ2_XS, encode_iq2_xs);
  set(IQ2_S, encode_iq2_s);
  set(IQ3_XXS, encode_iq3_xxs);
  set(IQ3_S, encode_iq3_s);
  return table;
}();

// Weights below the limit keep every sum of an encoder finite. No early exit: the loop is vectorised.
bool is_usable(const float* importance, int64_t n) {
  constexpr float kLimit = 0x1p64f;
  int32_t bad = 0, positive = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float w = importance[i];
    bad |= !((w >= 0) & (w < kLimit));
    positive |= w > 0;
  }
  return bad == 0 && positive != 0;
}

// Weights that vanish wherever a block holds anything turn its scale into 0 / 0. Such a block is encoded once more as if
// there were no importance. Values that no scale can reach stay as they are, to be found.
void mend_blocks(const QuantTraits& t, RowEncoder* encoder, const float* row, int64_t n_columns,
                 const float* no_importance, uint8_t* blocks) {
  constexpr float kLargestHalf = 65504;
  for (int64_t i = 0; i < n_columns; i += t.block_values, blocks += t.block_bytes) {
    const float* values = row + i;
    if (all_finite(t.type, reinterpret_cast<const std::byte*>(blocks), t.block_values)) continue;
    if (std::all_of(values, values + t.block_values, [](float v) { return std::fabs(v) <= kLargestHalf; }))
      encoder(values, t.block_values, no_importance, blocks);
  }
}

}  // namespace

bool encoding_needs_importance(QuantType type) {
  using enum QuantType;
  return type == IQ1_S || type == IQ2_XXS || type == IQ2_XS;
}

void encode_rows(QuantType type, const float* rows, int64_t n_rows, int64_t n_columns, const float* importance,
                 std::byte* blocks) {
  const QuantTraits& t = traits(type);
  RowEncoder* const encoder = kEncoders[static_cast<size_t>(type)];
  if (encoder == nullptr) throw InvalidArgument("nothing is encoded to " + std::string(t.name));
  if (n_rows < 0 || n_columns < 0 || n_columns % t.block_values != 0)
    throw InvalidArgument(std::string(t.name) + ": " + std::to_string(n_rows) + " rows of " +
                          std::to_string(n_columns) + " values, expected a multiple of " +
                          std::to_string(t.block_values));
  if (importance == nullptr && encoding_needs_importance(type))
    throw InvalidArgument(std::string(t.name) + " cannot be encoded without importance weights (an importance matrix)");

  // Types that cannot do without weights get equal ones where they would get none.
  std::vector<float> equal_weights;
  if (encoding_needs_importance(type)) equal_weights.assign(static_cast<size_t>(n_columns), 1.0f);
  const float* const no_importance = equal_weights.empty() ? nullptr : equal_weights.data();
  const bool is_weighted = importance != nullptr && is_usable(importance, n_columns);

  const int64_t n_bytes = row_bytes(t, n_columns);
  auto* out = reinterpret_cast<uint8_t*>(blocks);
  for (const float* row = rows; n_rows-- > 0; row += n_columns, out += n_bytes) {
    encoder(row, n_columns, is_weighted ? importance : no_importance, out);
    if (is_weighted && !all_finite(type, reinterpret_cast<const std::byte*>(out), n_columns))
      mend_blocks(t, encoder, row, n_columns, no_importance, out);
  }
}

}  // namespace v100
