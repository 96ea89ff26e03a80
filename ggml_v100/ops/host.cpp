// Host memory as the memory of a device.
#include "ops/host.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensor/buffer.h"

namespace v100 {

void HostOps::read(Tensor x, std::span<float> destination) { std::copy_n(x.data, x.size(), destination.data()); }

std::shared_ptr<std::byte[]> HostOps::allocate(size_t bytes) {
  const auto buffer = std::make_shared<Buffer>(bytes);
  return {buffer, buffer->data()};
}

void HostOps::copy_bytes(const std::byte* from, std::byte* to, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

std::shared_ptr<const float[]> HostBackend::place(std::span<const float> values) const {
  std::shared_ptr<float[]> copy(new float[values.size()]);
  std::copy(values.begin(), values.end(), copy.get());
  return copy;
}

}  // namespace v100
