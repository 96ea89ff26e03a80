// A device and the kernels loaded on it so far: what a backend and all operations made of it share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "cuda/module.h"

namespace v100::cuda {

class Launches {
 public:
  // Throws DeviceError: no driver, no such device, or a program without kernels.
  explicit Launches(int32_t ordinal);

  const Device& device() const { return device_; }
  // Loads the unit when it is first asked for. The kernel stays as long as this object. shared_bytes: the most dynamic shared
  // memory it is launched with, the same at every call. Throws DeviceError.
  const Kernel& kernel(std::string_view unit, std::string_view name, uint32_t shared_bytes = 0) const;
  // Whether the archive has the unit.
  bool has_unit(std::string_view unit) const { return archive_->has_unit(unit); }

 private:
  struct Unit {
    std::unique_ptr<Module> module;
    std::map<std::string, Kernel, std::less<>> kernels;
  };

  std::shared_ptr<const KernelArchive> archive_;
  Device device_;
  mutable std::mutex mutex_;  // engines of a model load kernels from their own threads
  mutable std::map<std::string, Unit, std::less<>> units_;
};

}  // namespace v100::cuda
