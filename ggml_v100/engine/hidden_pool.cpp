// Takes in hidden states one after the other; only the mean computes anything.
#include "engine/hidden_pool.h"

#include "base/error.h"

namespace v100 {

HiddenPool::HiddenPool(PoolingType type, int32_t hidden) : type_(type), hidden_(hidden) {
  if (hidden < 1)
    throw InvalidArgument("hidden states have " + std::to_string(hidden) + " features, expected 1 or more");
}

bool HiddenPool::wants(int32_t index, bool ends) const {
  switch (type_) {
    case PoolingType::cls:
      return index == 0;
    case PoolingType::last:
    case PoolingType::rank:
      return ends;
    default:
      return true;
  }
}

void HiddenPool::add(std::span<const float> state) {
  if (type_ != PoolingType::mean) {
    states_.insert(states_.end(), state.begin(), state.end());
    return;
  }
  sums_.resize(state.size());
  for (size_t i = 0; i < state.size(); ++i) sums_[i] += static_cast<double>(state[i]);
}

void HiddenPool::advance(int32_t n_tokens, bool ends) {
  n_tokens_ += n_tokens;
  is_complete_ = ends;
}

void HiddenPool::reset() noexcept {
  n_tokens_ = 0;
  is_complete_ = false;
  sums_.clear();
  states_.clear();
}

std::vector<float> HiddenPool::values() const {
  if (type_ != PoolingType::mean) return states_;
  std::vector<float> means;
  means.reserve(sums_.size());
  for (const double sum : sums_) means.push_back(static_cast<float>(sum / n_tokens_));
  return means;
}

}  // namespace v100
