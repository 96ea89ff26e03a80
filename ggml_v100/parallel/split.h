// What each rank of a split model gets: pure arithmetic on shapes, the same wherever it is computed.
//
// Things are cut in units (heads, blocks of columns, experts) that lie together: a rank gets one range of units, perhaps an
// empty one. The shares asked for are rarely whole numbers of units. What rounding gave a rank too much or too little is
// carried over to the next cut of the same kind, so that the sum over all layers comes out as asked (to a unit), where
// rounding each layer alike would add up to gigabytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/range.h"

namespace v100 {

inline constexpr int32_t kMostRanks = 8;

// Kinds of work between two meeting points of the ranks: each is balanced by itself.
enum class SplitKind { attention, recurrence, feed_forward, experts, vocabulary };
inline constexpr int32_t kSplitKinds = 5;

class Splitter {
 public:
  // shares: what each rank is to get, in any unit. Throws InvalidArgument for none, too many, negative or infinite ones,
  // and when all are zero.
  explicit Splitter(std::vector<double> shares);

  int32_t ranks() const { return static_cast<int32_t>(shares_.size()); }
  bool has_equal_shares() const;

  // [0, units) in one range per rank, ascending. unit_bytes: what a unit weighs against those of other cuts of its kind.
  std::vector<RowRange> cut(SplitKind kind, int32_t units, double unit_bytes);

 private:
  std::vector<double> shares_;  // sum 1
  std::vector<double>
      owed_[static_cast<size_t>(kSplitKinds)];  // bytes that each rank should have got beside what it did
};

// Items (heads, groups) that must stay together so that a cut of a weight's columns falls between its blocks: the least
// number whose columns are whole blocks, or all of them where none divides evenly.
int32_t items_per_unit(int32_t items, int32_t columns_per_item, int32_t block);

// One range per rank of `items` that are cut in units of items_per_unit(); the last unit may be shorter.
std::vector<RowRange> cut_items(Splitter& splitter, SplitKind kind, int32_t items, int32_t per_unit, double item_bytes);

// A rank's query heads and the kv heads they read. Local query head h reads local kv head (h + skew) / group.
struct HeadShare {
  RowRange heads;
  RowRange kv_heads;
  int32_t group = 1;  // query heads of a kv head

  int32_t skew() const { return heads.begin - kv_heads.begin * group; }
};

// Attention of `heads` query heads over `kv_heads`, head_columns columns of the output weight each, in blocks of `block`.
//
// Ranks get whole groups. Where equal shares make groups come out uneven but query heads even (24 heads on 4 kv heads, 3
// ranks: 8 each), the query heads are cut evenly and a kv head that two ranks read is kept by both, provided that no rank
// then keeps more kv heads than the largest share of whole groups has.
std::vector<HeadShare> split_heads(Splitter& splitter, int32_t heads, int32_t kv_heads, int32_t head_columns,
                                   int32_t block, double group_bytes);

// Value head j * key_heads + g of a delta net belongs to key head g: the value heads of key heads `keys`, in ranges.
std::vector<RowRange> value_heads_of(RowRange keys, int32_t key_heads, int32_t value_heads);

// The ranges, their unit widened to `width` rows or columns each and moved by `offset`.
std::vector<RowRange> scaled(std::span<const RowRange> ranges, int32_t width, int32_t offset = 0);
int32_t total(std::span<const RowRange> ranges);
// The same rows in as few ranges as may be.
std::vector<RowRange> joined(std::span<const RowRange> ranges);

// Contiguous layers of each rank, by share.
std::vector<RowRange> split_layers(std::span<const double> shares, int32_t layers);

}  // namespace v100
