// The table of file types.
#include "quants/file_types.h"

#include <array>

namespace v100 {

namespace {

struct FileType {
  int32_t id;
  std::string_view label;
  std::optional<QuantType> guessed_from;  // the type whose majority suggests this mixture
};

using enum QuantType;

constexpr FileType kFileTypes[] = {
    {0, "all F32", F32},
    {1, "F16", F16},
    {2, "Q4_0", Q4_0},
    {3, "Q4_1", Q4_1},
    {7, "Q8_0", Q8_0},
    {8, "Q5_0", Q5_0},
    {9, "Q5_1", Q5_1},
    {10, "Q2_K - Medium", Q2_K},
    {11, "Q3_K - Small", std::nullopt},
    {12, "Q3_K - Medium", Q3_K},
    {13, "Q3_K - Large", std::nullopt},
    {14, "Q4_K - Small", std::nullopt},
    {15, "Q4_K - Medium", Q4_K},
    {16, "Q5_K - Small", std::nullopt},
    {17, "Q5_K - Medium", Q5_K},
    {18, "Q6_K", Q6_K},
    {19, "IQ2_XXS - 2.0625 bpw", IQ2_XXS},
    {20, "IQ2_XS - 2.3125 bpw", IQ2_XS},
    {21, "Q2_K - Small", std::nullopt},
    {22, "IQ3_XS - 3.3 bpw", std::nullopt},
    {23, "IQ3_XXS - 3.0625 bpw", IQ3_XXS},
    {24, "IQ1_S - 1.5625 bpw", IQ1_S},
    {25, "IQ4_NL - 4.5 bpw", IQ4_NL},
    {26, "IQ3_S - 3.4375 bpw", IQ3_S},
    {27, "IQ3_S mix - 3.66 bpw", std::nullopt},
    {28, "IQ2_S - 2.5 bpw", IQ2_S},
    {29, "IQ2_M - 2.7 bpw", std::nullopt},
    {30, "IQ4_XS - 4.25 bpw", IQ4_XS},
    {31, "IQ1_M - 1.75 bpw", IQ1_M},
    {32, "BF16", BF16},
    {36, "TQ1_0 - 1.69 bpw ternary", TQ1_0},
    {37, "TQ2_0 - 2.06 bpw ternary", TQ2_0},
    {38, "MXFP4 MoE", MXFP4},
    {39, "NVFP4", NVFP4},
    {40, "Q1_0", Q1_0},
    {41, "Q2_0", Q2_0},
};

}  // namespace

std::string_view file_type_label(int64_t file_type) {
  for (const FileType& known : kFileTypes)
    if (known.id == file_type) return known.label;
  return "unknown, may not work";
}

int32_t guess_file_type(std::span<const QuantType> tensor_types) {
  std::array<int64_t, kQuantTypeCount> counts{};
  int64_t most = 0;
  QuantType frequent = F32;
  for (const QuantType type : tensor_types) {
    const int64_t count = ++counts.at(static_cast<size_t>(type));
    if (count <= most) continue;
    most = count;
    frequent = type;
  }
  for (const FileType& known : kFileTypes)
    if (known.guessed_from == frequent) return known.id;
  return 0;
}

std::string describe_file_type(std::optional<int64_t> file_type, std::span<const QuantType> tensor_types) {
  if (file_type) return std::string(file_type_label(*file_type));
  return "(guessed) " + std::string(file_type_label(guess_file_type(tensor_types)));
}

}  // namespace v100
