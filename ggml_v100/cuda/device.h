// The CUDA devices of this machine, and one of them with its context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"

namespace v100::cuda {

struct DeviceInfo {
  int32_t ordinal = 0;  // CUDA0 is 0
  std::string name;     // "Tesla V100-SXM2-16GB"
  std::string pci_bus_id;
  int32_t capability_major = 0, capability_minor = 0;
  int32_t multiprocessors = 0;
  size_t total_bytes = 0;
  size_t l2_bytes = 0;
  size_t max_shared_bytes = 0;  // of a block, with the opt-in
  bool has_ecc = false;
  std::vector<int32_t> peers;  // ordinals of the devices whose memory it can reach

  std::string device_name() const { return "CUDA" + std::to_string(ordinal); }
  std::string capability() const { return std::to_string(capability_major) + "." + std::to_string(capability_minor); }
  bool is_supported() const { return capability_major >= 7; }
};

// All devices in the driver's order, unsupported ones too. Throws DeviceError.
std::vector<DeviceInfo> list_devices(const Driver& driver);

// A device with its primary context, which stays until this object ends. Calls of the classes of this room act on the
// device that is current in their thread: make_current first.
class Device {
 public:
  // Throws DeviceError for an ordinal that is not there, a card below compute capability 7.0 or a failing context.
  Device(std::shared_ptr<const Driver> driver, int32_t ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return *driver_; }
  const DriverApi& api() const { return driver_->api(); }
  const DeviceInfo& info() const { return info_; }
  CUcontext context() const { return context_; }
  // For the calling thread.
  void make_current() const;
  size_t free_bytes() const;
  // Waits for all work of the device.
  void synchronize() const;
  // As Driver::check, with the device's name in front.
  void check(CUresult result, std::string_view doing) const;

  // Makes the context current for as long as the guard lives: for releasing from any thread.
  class Guard {
   public:
    explicit Guard(const Device& device);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const Device& device_;
  };

 private:
  std::shared_ptr<const Driver> driver_;
  DeviceInfo info_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

}  // namespace v100::cuda
