// The slots of a routing by expert, so that an expert's weights are streamed once for all of its rows.
#pragma once

#include <span>
#include <vector>

#include "ops/ops.h"

namespace v100::cpu {

class ExpertSlots {
 public:
  // Slot s reads row s / slots_per_row.
  ExpertSlots(const Routing& routing, size_t experts, int32_t slots_per_row)
      : first_(experts + 1), slots_(static_cast<size_t>(routing.slots())), rows_(slots_.size()) {
    const std::span<const int32_t> expert(routing.expert, slots_.size());
    for (const int32_t e : expert) ++first_[static_cast<size_t>(e) + 1];
    for (size_t e = 1; e < first_.size(); ++e) first_[e] += first_[e - 1];
    std::vector<int32_t> next(first_.begin(), first_.end() - 1);
    for (size_t slot = 0; slot < expert.size(); ++slot) {
      const auto i = static_cast<size_t>(next[static_cast<size_t>(expert[slot])]++);
      slots_[i] = static_cast<int32_t>(slot);
      rows_[i] = slots_[i] / slots_per_row;
    }
  }

  // Slots of the first expert, ascending, then of the second, ...
  std::span<const int32_t> slots() const { return slots_; }
  std::span<const int32_t> rows() const { return rows_; }  // that they read
  // Where in these the slots of an expert lie.
  RowRange of(size_t expert) const { return {first_[expert], first_[expert + 1]}; }

 private:
  std::vector<int32_t> first_;  // [experts + 1] where an expert's slots begin
  std::vector<int32_t> slots_, rows_;
};

}  // namespace v100::cpu
