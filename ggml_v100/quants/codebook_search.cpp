#include "quants/codebook_search.h"

#include <algorithm>

namespace v100 {

namespace {

// Rank of each possible value (plus 128) among the values that the codebook uses.
template <size_t rows, size_t values_per_row>
std::array<uint8_t, 256> value_ranks(const Codebook<rows, values_per_row>& book) {
  std::array<uint8_t, 256> ranks{};
  for (const auto& row : book)
    for (const int8_t value : row) ranks[static_cast<size_t>(value + 128)] = 1;
  uint8_t rank = 0;
  for (uint8_t& used : ranks) used = used != 0 ? rank++ : uint8_t{0};
  return ranks;
}

}  // namespace

template <int kRowValues, int kDigits>
template <size_t rows>
CodebookSearch<kRowValues, kDigits>::CodebookSearch(const Codebook<rows, kRowValues>& book, int n_distances)
    : cost_index_(rows), row_of_(kVectors, -1) {
  const auto ranks = value_ranks(book);
  for (size_t row = 0; row < rows; ++row) {
    int key = 0;
    for (size_t p = 0; p < kRowValues; ++p) {
      const int digit = ranks[static_cast<size_t>(book[row][p] + 128)];
      cost_index_[row][p] = static_cast<uint8_t>(static_cast<int>(p) * kCostStride + digit);
      key += digit * kPlaces[p];
    }
    row_of_[static_cast<size_t>(key)] = static_cast<int16_t>(row);
  }
  find_neighbours(n_distances);
}

template <int kRowValues, int kDigits>
void CodebookSearch<kRowValues, kDigits>::find_neighbours(int n_distances) {
  constexpr int kMaxDistance = kRowValues * (kDigits - 1) * (kDigits - 1);
  static_assert(kMaxDistance < 256);
  const size_t n_rows = cost_index_.size();
  std::vector<uint8_t> distance(n_rows);
  std::array<std::vector<uint8_t>, kRowValues> digits;  // [position][row]: the distance loop runs along rows
  for (size_t p = 0; p < kRowValues; ++p) {
    digits[p].resize(n_rows);
    for (size_t row = 0; row < n_rows; ++row) digits[p][row] = cost_index_[row][p] % kCostStride;
  }
  first_.reserve(kVectors + 1);
  for (int key = 0; key < kVectors; ++key) {
    first_.push_back(static_cast<uint32_t>(neighbours_.size()));
    if (row_of(key) >= 0) continue;
    std::fill(distance.begin(), distance.end(), uint8_t{0});
    for (size_t p = 0; p < kRowValues; ++p) {
      const int digit = key / kPlaces[p] % kDigits;
      for (size_t row = 0; row < n_rows; ++row) {
        const int difference = digits[p][row] - digit;
        distance[row] = static_cast<uint8_t>(distance[row] + difference * difference);
      }
    }
    std::array<bool, kMaxDistance + 1> occurs{};
    for (const uint8_t d : distance) occurs[d] = true;
    for (size_t d = 0, n_found = 0; d <= kMaxDistance && n_found < static_cast<size_t>(n_distances); ++d) {
      if (!occurs[d]) continue;
      ++n_found;
      for (size_t row = 0; row < n_rows; ++row)
        if (distance[row] == d) neighbours_.push_back(static_cast<uint16_t>(row));
    }
  }
  first_.push_back(static_cast<uint32_t>(neighbours_.size()));
  neighbours_.shrink_to_fit();
}

template <int kRowValues, int kDigits>
int CodebookSearch<kRowValues, kDigits>::cheapest_neighbour(int key, const Costs& costs) const {
  const uint16_t* candidate = neighbours_.data() + first_[static_cast<size_t>(key)];
  const uint16_t* end = neighbours_.data() + first_[static_cast<size_t>(key) + 1];
  const float* cost = &costs[0][0];
  const auto sum_of = [&](uint16_t row) {
    const RowIndexes& at = cost_index_[row];
    float sum = cost[at[0]];
    for (size_t p = 1; p < kRowValues; ++p) sum += cost[at[p]];
    return sum;
  };
  uint16_t best = *candidate;
  float least = sum_of(best);
  while (++candidate < end) {
    const float sum = sum_of(*candidate);
    if (sum < least) {
      least = sum;
      best = *candidate;
    }
  }
  return best;
}

template class CodebookSearch<8, 3>;
template class CodebookSearch<4, 8>;

const TernaryCodebookSearch& iq1_search() {
  static const TernaryCodebookSearch search(kIq1Codebook, 3);
  return search;
}

const TernaryCodebookSearch& iq2_xxs_search() {
  static const TernaryCodebookSearch search(kIq2XxsCodebook, 2);
  return search;
}

const TernaryCodebookSearch& iq2_xs_search() {
  static const TernaryCodebookSearch search(kIq2XsCodebook, 2);
  return search;
}

const TernaryCodebookSearch& iq2_s_search() {
  static const TernaryCodebookSearch search(kIq2SCodebook, 1);
  return search;
}

const OctalCodebookSearch& iq3_xxs_search() {
  static const OctalCodebookSearch search(kIq3XxsCodebook, 2);
  return search;
}

const OctalCodebookSearch& iq3_s_search() {
  static const OctalCodebookSearch search(kIq3SCodebook, 3);
  return search;
}

}  // namespace v100
