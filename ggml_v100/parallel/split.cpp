// Error-diffused cutting, and the cuts that models need.
#include "parallel/split.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace v100 {

Splitter::Splitter(std::vector<double> shares) : shares_(std::move(shares)) {
  if (shares_.empty() || shares_.size() > static_cast<size_t>(kMostRanks))
    throw InvalidArgument("a split over " + std::to_string(shares_.size()) + " ranks, expected 1 to " +
                          std::to_string(kMostRanks));
  double sum = 0;
  for (const double share : shares_) {
    if (!(share >= 0) || !std::isfinite(share))
      throw InvalidArgument("the share of a rank is " + std::to_string(share) + ", expected 0 or more");
    sum += share;
  }
  if (!(sum > 0) || !std::isfinite(sum)) throw InvalidArgument("the shares of all ranks are zero");
  for (double& share : shares_) share /= sum;
  for (std::vector<double>& owed : owed_) owed.assign(shares_.size(), 0.0);
}

bool Splitter::has_equal_shares() const {
  return std::all_of(shares_.begin(), shares_.end(), [&](double share) { return share == shares_[0]; });
}

std::vector<RowRange> Splitter::cut(SplitKind kind, int32_t units, double unit_bytes) {
  std::vector<double>& owed = owed_[static_cast<size_t>(kind)];
  for (size_t r = 0; r < shares_.size(); ++r) owed[r] += shares_[r] * units * unit_bytes;
  // Whole units at once, then one by one to whoever lacks most; of equals, to the first.
  std::vector<int32_t> given(shares_.size(), 0);
  int32_t left = units;
  const auto give = [&](size_t rank, int32_t count) {
    given[rank] += count;
    owed[rank] -= count * unit_bytes;
    left -= count;
  };
  for (size_t r = 0; r < shares_.size(); ++r)
    if (owed[r] > 0) give(r, std::min(left, static_cast<int32_t>(owed[r] / unit_bytes)));
  while (left > 0) {
    size_t neediest = shares_.size();
    for (size_t r = 0; r < shares_.size(); ++r) {
      // The margin keeps sums that differ by rounding only from deciding.
      const double margin = 1e-9 * unit_bytes;
      if (shares_[r] > 0 && (neediest == shares_.size() || owed[r] > owed[neediest] + margin)) neediest = r;
    }
    give(neediest, 1);
  }
  std::vector<RowRange> ranges;
  int32_t begin = 0;
  for (const int32_t count : given) {
    ranges.push_back({begin, begin + count});
    begin += count;
  }
  return ranges;
}

int32_t items_per_unit(int32_t items, int32_t columns_per_item, int32_t block) {
  const int32_t unit = block / std::gcd(columns_per_item, block);
  return items % unit == 0 ? unit : std::max(items, 1);
}

std::vector<RowRange> cut_items(Splitter& splitter, SplitKind kind, int32_t items, int32_t per_unit,
                                double item_bytes) {
  std::vector<RowRange> ranges = splitter.cut(kind, (items + per_unit - 1) / per_unit, item_bytes * per_unit);
  for (RowRange& range : ranges)
    range = {std::min(range.begin * per_unit, items), std::min(range.end * per_unit, items)};
  return ranges;
}

namespace {

// Even numbers of query heads with kv heads kept twice, where that is allowed (see the header).
std::vector<HeadShare> split_evenly(int32_t ranks, int32_t heads, int32_t kv_heads, int32_t head_columns,
                                    int32_t block) {
  if (ranks >= kv_heads || kv_heads % ranks == 0 || heads % ranks != 0) return {};
  const int32_t each = heads / ranks, group = heads / kv_heads;
  if (each * head_columns % block != 0) return {};
  std::vector<HeadShare> shares;
  for (int32_t r = 0; r < ranks; ++r) {
    const RowRange mine{r * each, (r + 1) * each};
    shares.push_back({mine, {mine.begin / group, (mine.end - 1) / group + 1}, group});
    if (shares.back().kv_heads.size() > (kv_heads + ranks - 1) / ranks) return {};
  }
  return shares;
}

}  // namespace

std::vector<HeadShare> split_heads(Splitter& splitter, int32_t heads, int32_t kv_heads, int32_t head_columns,
                                   int32_t block, double group_bytes) {
  if (splitter.has_equal_shares()) {
    std::vector<HeadShare> even = split_evenly(splitter.ranks(), heads, kv_heads, head_columns, block);
    if (!even.empty()) return even;
  }
  const int32_t group = heads / kv_heads;
  std::vector<HeadShare> shares;
  for (const RowRange range : cut_items(splitter, SplitKind::attention, kv_heads,
                                        items_per_unit(kv_heads, group * head_columns, block), group_bytes))
    shares.push_back({{range.begin * group, range.end * group}, range, group});
  return shares;
}

std::vector<RowRange> value_heads_of(RowRange keys, int32_t key_heads, int32_t value_heads) {
  std::vector<RowRange> ranges;
  if (keys.size() == 0) return ranges;
  if (keys.size() == key_heads) return {{0, value_heads}};
  for (int32_t first = 0; first < value_heads; first += key_heads)
    ranges.push_back({first + keys.begin, first + keys.end});
  return ranges;
}

std::vector<RowRange> scaled(std::span<const RowRange> ranges, int32_t width, int32_t offset) {
  std::vector<RowRange> result;
  for (const RowRange range : ranges) result.push_back({offset + range.begin * width, offset + range.end * width});
  return result;
}

int32_t total(std::span<const RowRange> ranges) {
  int32_t sum = 0;
  for (const RowRange range : ranges) sum += range.size();
  return sum;
}

std::vector<RowRange> joined(std::span<const RowRange> ranges) {
  std::vector<RowRange> result;
  for (const RowRange range : ranges) {
    if (range.size() == 0) continue;
    if (!result.empty() && result.back().end == range.begin)
      result.back().end = range.end;
    else
      result.push_back(range);
  }
  return result;
}

std::vector<RowRange> split_layers(std::span<const double> shares, int32_t layers) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<RowRange> ranges;
  double before = 0;
  int32_t begin = 0;
  for (const double share : shares) {
    before += share;
    const auto end = static_cast<int32_t>(std::lround(before / sum * layers));
    ranges.push_back({begin, share > 0 ? end : begin});
    begin = ranges.back().end;
  }
  return ranges;
}

}  // namespace v100
