// The table of tensor types.
#include "quants/types.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

using enum QuantType;

constexpr QuantTraits kTypes[] = {
    {F32, "f32", 1, 4, false},
    {F16, "f16", 1, 2, false},
    {Q4_0, "q4_0", 32, 18, true},
    {Q4_1, "q4_1", 32, 20, true},
    {Q5_0, "q5_0", 32, 22, true},
    {Q5_1, "q5_1", 32, 24, true},
    {Q8_0, "q8_0", 32, 34, true},
    {Q8_1, "q8_1", 32, 36, true},
    {Q2_K, "q2_K", 256, 84, true},
    {Q3_K, "q3_K", 256, 110, true},
    {Q4_K, "q4_K", 256, 144, true},
    {Q5_K, "q5_K", 256, 176, true},
    {Q6_K, "q6_K", 256, 210, true},
    {Q8_K, "q8_K", 256, 292, true},
    {IQ2_XXS, "iq2_xxs", 256, 66, true},
    {IQ2_XS, "iq2_xs", 256, 74, true},
    {IQ3_XXS, "iq3_xxs", 256, 98, true},
    {IQ1_S, "iq1_s", 256, 50, true},
    {IQ4_NL, "iq4_nl", 32, 18, true},
    {IQ3_S, "iq3_s", 256, 110, true},
    {IQ2_S, "iq2_s", 256, 82, true},
    {IQ4_XS, "iq4_xs", 256, 136, true},
    {I8, "i8", 1, 1, false},
    {I16, "i16", 1, 2, false},
    {I32, "i32", 1, 4, false},
    {I64, "i64", 1, 8, false},
    {F64, "f64", 1, 8, false},
    {IQ1_M, "iq1_m", 256, 56, true},
    {BF16, "bf16", 1, 2, false},
    {TQ1_0, "tq1_0", 256, 54, true},
    {TQ2_0, "tq2_0", 256, 66, true},
    {MXFP4, "mxfp4", 32, 17, true},
    {NVFP4, "nvfp4", 64, 36, true},
    {Q1_0, "q1_0", 128, 18, true},
    {Q2_0, "q2_0", 64, 18, true},
};

constexpr std::array<const QuantTraits*, kQuantTypeCount> kById = [] {
  std::array<const QuantTraits*, kQuantTypeCount> by_id{};
  for (const QuantTraits& t : kTypes) by_id[static_cast<size_t>(t.type)] = &t;
  return by_id;
}();

constexpr char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

const QuantTraits* find_traits(int32_t type_id) {
  return type_id < 0 || type_id >= kQuantTypeCount ? nullptr : kById[static_cast<size_t>(type_id)];
}

const QuantTraits& traits(QuantType type) {
  const auto id = static_cast<int32_t>(type);
  if (const QuantTraits* found = find_traits(id)) return *found;
  throw InvalidArgument("tensor type id " + std::to_string(id) + " does not exist");
}

std::optional<QuantType> quant_type_from_name(std::string_view name) {
  for (const QuantTraits& t : kTypes)
    if (std::ranges::equal(t.name, name, {}, lower, lower)) return t.type;
  return std::nullopt;
}

}  // namespace v100
