// The encoders' side of the codebooks: which rows stand in for a vector that is not a row.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "quants/codebooks.h"

namespace v100 {

// A codebook seen as vectors of digits 0..kDigits-1 (the rank of a row's values). A vector has a key, a number below
// kVectors. A vector that is a row has that row; any other has neighbours, the rows nearest to it.
template <int kRowValues, int kDigits>
class CodebookSearch {
 public:
  static constexpr auto kPlaces = [] {  // key = sum of digit[p] * kPlaces[p]
    std::array<int, kRowValues> places{};
    for (int p = 0, place = 1; p < kRowValues; ++p, place *= kDigits) places[static_cast<size_t>(p)] = place;
    return places;
  }();
  static constexpr int kVectors = kPlaces[kRowValues - 1] * kDigits;
  static constexpr int kMaxDigit = kDigits - 1;
  static constexpr int kCostStride = (kDigits + 3) / 4 * 4;
  using Costs = float[kRowValues][kCostStride];  // [position][digit]; columns from kDigits on are padding

  // Neighbours are the rows at the n_distances smallest distinct distances (sums of squared digit differences).
  template <size_t rows>
  CodebookSearch(const Codebook<rows, kRowValues>& book, int n_distances);

  // -1 where the vector is not a row.
  int row_of(int key) const { return row_of_[static_cast<size_t>(key)]; }

  int digit(int row, int position) const { return cost_index_[static_cast<size_t>(row)][position] % kCostStride; }

  // The neighbour with the smallest sum of costs, added from the first position on; the nearest of equals, then the
  // lowest row. Defined for vectors that are not rows.
  int cheapest_neighbour(int key, const Costs& costs) const;

 private:
  using RowIndexes = std::array<uint8_t, kRowValues>;

  void find_neighbours(int n_distances);

  std::vector<RowIndexes> cost_index_;  // per row: where each of its digits lies in Costs
  std::vector<int16_t> row_of_;         // [kVectors]
  std::vector<uint32_t> first_;         // [kVectors + 1] into neighbours_
  std::vector<uint16_t> neighbours_;
};

using TernaryCodebookSearch = CodebookSearch<8, 3>;  // IQ1, IQ2
using OctalCodebookSearch = CodebookSearch<4, 8>;    // IQ3

// Each is made on first use (by one thread, the others wait) and kept: all together 1.7 MB.
const TernaryCodebookSearch& iq1_search();
const TernaryCodebookSearch& iq2_xxs_search();
const TernaryCodebookSearch& iq2_xs_search();
const TernaryCodebookSearch& iq2_s_search();
const OctalCodebookSearch& iq3_xxs_search();
const OctalCodebookSearch& iq3_s_search();

}  // namespace v100
