// Rows of the codebooks from their codes. The check sums catch a wrong table at compile time.
#include "quants/codebooks.h"

#include "quants/codebook_codes.h"

namespace v100 {

namespace {

// True when the codes ascend and have the given sum, exclusive or, and last element.
template <size_t rows>
constexpr bool has_check_sums(const uint16_t (&codes)[rows], uint64_t sum, uint32_t xor_sum, uint16_t last) {
  uint64_t found_sum = 0;
  uint32_t found_xor = 0;
  for (size_t i = 0; i < rows; ++i) {
    if (i > 0 && codes[i] <= codes[i - 1]) return false;
    found_sum += codes[i];
    found_xor ^= codes[i];
  }
  return found_sum == sum && found_xor == xor_sum && codes[rows - 1] == last;
}

static_assert(has_check_sums(kIq2XxsCodes, 3697703, 973, 43268));
static_assert(has_check_sums(kIq2XsCodes, 8004683, 317, 43690));
static_assert(has_check_sums(kIq2SCodes, 16519059, 40703, 43690));
static_assert(has_check_sums(kIq3XxsCodes, 391138, 628, 3992));
static_assert(has_check_sums(kIq3SCodes, 777331, 3087, 4032));
static_assert(has_check_sums(kIq1Codes, 44428132, 31226, 43690));

template <size_t values_per_row, size_t rows, size_t n_levels>
constexpr Codebook<rows, values_per_row> expand(const uint16_t (&codes)[rows],
                                                const std::array<int8_t, n_levels>& levels) {
  constexpr uint32_t bits = values_per_row == 8 ? 2 : 3;
  Codebook<rows, values_per_row> book{};
  for (size_t row = 0; row < rows; ++row)
    for (size_t p = 0; p < values_per_row; ++p) book[row][p] = levels[codes[row] >> bits * p & ((1u << bits) - 1)];
  return book;
}

constexpr std::array<int8_t, 3> kIq2Levels = {8, 25, 43};
constexpr std::array<int8_t, 8> kIq3XxsLevels = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr std::array<int8_t, 8> kIq3SLevels = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr std::array<int8_t, 3> kIq1Levels = {-1, 0, 1};

}  // namespace

// `extern const` in the header gives these external linkage; constexpr keeps them out of start-up code.
constexpr Codebook<256, 8> kIq2XxsCodebook = expand<8>(kIq2XxsCodes, kIq2Levels);
constexpr Codebook<512, 8> kIq2XsCodebook = expand<8>(kIq2XsCodes, kIq2Levels);
constexpr Codebook<1024, 8> kIq2SCodebook = expand<8>(kIq2SCodes, kIq2Levels);
constexpr Codebook<256, 4> kIq3XxsCodebook = expand<4>(kIq3XxsCodes, kIq3XxsLevels);
constexpr Codebook<512, 4> kIq3SCodebook = expand<4>(kIq3SCodes, kIq3SLevels);
constexpr Codebook<2048, 8> kIq1Codebook = expand<8>(kIq1Codes, kIq1Levels);

}  // namespace v100
