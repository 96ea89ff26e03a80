#include "cuda/memory.h"

#include <utility>

#include "base/error.h"

namespace v100::cuda {

namespace {
std::string mebibytes(size_t bytes) { return std::to_string((bytes + (size_t{1} << 20) - 1) >> 20) + " MiB"; }
}  // namespace

DeviceMemory::DeviceMemory(const Device& device, size_t bytes) : device_(&device), bytes_(bytes) {
  if (bytes == 0) return;
  const Device::Guard guard(device);
  const CUresult result = device.api().cuMemAlloc(&address_, bytes);
  if (result == kCudaOutOfMemory)
    throw OutOfMemory(device.info().device_name() + ": " + mebibytes(bytes) + " of device memory asked for, " +
                      mebibytes(device.free_bytes()) + " are free");
  device.check(result, "allocating " + mebibytes(bytes));
}

DeviceMemory::~DeviceMemory() {
  if (address_ == 0) return;
  const Device::Guard guard(*device_);
  (void)device_->api().cuMemFree(address_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), address_(std::exchange(other.address_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedMemory::PinnedMemory(const Device& device, size_t bytes) : device_(&device), bytes_(bytes) {
  if (bytes == 0) return;
  const Device::Guard guard(device);
  void* address = nullptr;
  const CUresult result = device.api().cuMemHostAlloc(&address, bytes, 0);
  if (result == kCudaOutOfMemory)
    throw OutOfMemory(mebibytes(bytes) + " of pinned host memory asked for " + device.info().device_name() +
                      " are not there");
  device.check(result, "pinning " + mebibytes(bytes));
  data_ = static_cast<std::byte*>(address);
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  const Device::Guard guard(*device_);
  (void)device_->api().cuMemFreeHost(data_);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace v100::cuda
