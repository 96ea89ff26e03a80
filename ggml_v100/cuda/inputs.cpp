#include "cuda/inputs.h"

namespace v100::cuda {

namespace {
constexpr size_t kAlignment = 256;
}

Inputs::Inputs(const Device& device, size_t bytes)
    : region_(device, bytes),
      mirrors_{Mirror{PinnedMemory(device, bytes), Event(device)}, Mirror{PinnedMemory(device, bytes), Event(device)}} {
}

std::optional<Inputs::Place> Inputs::take(size_t bytes) {
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded > region_.bytes() - taken_) return std::nullopt;
  const Place place{mirrors_[turn_].memory.data() + taken_, region_.address() + taken_};
  taken_ += rounded;
  return place;
}

void Inputs::send(const Stream& stream) {
  if (sent_ == taken_) return;
  Mirror& mirror = mirrors_[turn_];
  stream.copy_to_device(region_.address() + sent_, mirror.memory.data() + sent_, taken_ - sent_);
  mirror.copied.record(stream);
  mirror.is_copied = false;
  sent_ = taken_;
}

void Inputs::restart() {
  if (taken_ == 0) return;
  taken_ = sent_ = 0;
  turn_ = 1 - turn_;
  Mirror& next = mirrors_[turn_];
  if (!next.is_copied) next.copied.synchronize();
  next.is_copied = true;
}

}  // namespace v100::cuda
