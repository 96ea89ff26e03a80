// The choice of experts: one row of Ops::route, for all backends whose memory is the host's.
#pragma once

#include <cstdint>
#include <span>

namespace v100 {

// logits: one per expert. expert and weight: one per choice, at most as many as there are experts. NaN logits are chosen
// last.
void route_row(std::span<const float> logits, std::span<int32_t> expert, std::span<float> weight);

}  // namespace v100
