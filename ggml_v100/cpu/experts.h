// The slots of a routing by expert, so that an expert's weights are streamed once for all of its rows.
#pragma once

#include <span>
#include <vector>

#include "ops/ops.h"

namespace v100::cpu {

class ExpertSlots {
 public:
  ExpertSlots(const Routing& routing, int32_t experts)
      : first_(static_cast<size_t>(experts) + 1), slots_(static_cast<size_t>(routing.slots())) {
    const std::span<const int32_t> expert(routing.expert, slots_.size());
    for (const int32_t e : expert) ++first_[static_cast<size_t>(e) + 1];
    for (size_t e = 1; e < first_.size(); ++e) first_[e] += first_[e - 1];
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    for (size_t slot = 0; slot < expert.size(); ++slot)
      slots_[next[static_cast<size_t>(expert[slot])]++] = static_cast<int32_t>(slot);
  }

  // Ascending.
  std::span<const int32_t> of(size_t expert) const {
    return {slots_.data() + first_[expert], first_[expert + 1] - first_[expert]};
  }

 private:
  std::vector<size_t> first_;  // [experts + 1] where an expert's slots begin
  std::vector<int32_t> slots_;
};

}  // namespace v100::cpu
