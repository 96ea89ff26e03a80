// Memory of a device, and host memory that its copy engines reach without a detour. Owned; freed with the object.
#pragma once

#include <cstddef>

#include "cuda/device.h"

namespace v100::cuda {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Uninitialised, aligned to 256 bytes; zero bytes is legal. Throws OutOfMemory with what was asked for and what is free.
  DeviceMemory(const Device& device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  CUdeviceptr address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  const Device* device_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  // Zero bytes is legal. Throws OutOfMemory.
  PinnedMemory(const Device& device, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace v100::cuda
