#include "cuda/device.h"

#include <array>

#include "base/error.h"

namespace v100::cuda {

namespace {

int32_t attribute(const Driver& driver, CUdevice device, DeviceAttribute which) {
  int value = 0;
  driver.check(driver.api().cuDeviceGetAttribute(&value, static_cast<int>(which), device),
               "asking for a device's attribute");
  return value;
}

DeviceInfo describe(const Driver& driver, int32_t ordinal, int32_t count) {
  const DriverApi& api = driver.api();
  const std::string name = "CUDA" + std::to_string(ordinal);
  DeviceInfo info;
  info.ordinal = ordinal;
  CUdevice device = 0;
  driver.check(api.cuDeviceGet(&device, ordinal), "opening " + name);
  std::array<char, 256> text{};
  driver.check(api.cuDeviceGetName(text.data(), static_cast<int>(text.size()) - 1, device),
               "asking for the name of " + name);
  info.name = text.data();
  text.fill(0);
  driver.check(api.cuDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()) - 1, device),
               "asking for the bus of " + name);
  info.pci_bus_id = text.data();
  info.capability_major = attribute(driver, device, DeviceAttribute::capability_major);
  info.capability_minor = attribute(driver, device, DeviceAttribute::capability_minor);
  info.multiprocessors = attribute(driver, device, DeviceAttribute::multiprocessors);
  info.l2_bytes = static_cast<size_t>(attribute(driver, device, DeviceAttribute::l2_bytes));
  info.max_shared_bytes =
      static_cast<size_t>(attribute(driver, device, DeviceAttribute::max_shared_bytes_per_block_optin));
  info.has_ecc = attribute(driver, device, DeviceAttribute::ecc_enabled) != 0;
  driver.check(api.cuDeviceTotalMem(&info.total_bytes, device), "asking for the memory of " + name);
  for (int32_t other = 0; other < count; ++other) {
    if (other == ordinal) continue;
    CUdevice peer = 0;
    driver.check(api.cuDeviceGet(&peer, other), "opening CUDA" + std::to_string(other));
    int can = 0;
    driver.check(api.cuDeviceCanAccessPeer(&can, device, peer), "asking for the peers of " + name);
    if (can != 0) info.peers.push_back(other);
  }
  return info;
}

int32_t device_count(const Driver& driver) {
  int count = 0;
  driver.check(driver.api().cuDeviceGetCount(&count), "counting devices");
  return count;
}

}  // namespace

std::vector<DeviceInfo> list_devices(const Driver& driver) {
  const int32_t count = device_count(driver);
  std::vector<DeviceInfo> devices;
  for (int32_t i = 0; i < count; ++i) devices.push_back(describe(driver, i, count));
  return devices;
}

Device::Device(std::shared_ptr<const Driver> driver, int32_t ordinal) : driver_(std::move(driver)) {
  const int32_t count = device_count(*driver_);
  if (ordinal < 0 || ordinal >= count)
    throw DeviceError("device CUDA" + std::to_string(ordinal) + " is not there; the driver sees " +
                      std::to_string(count));
  info_ = describe(*driver_, ordinal, count);
  if (!info_.is_supported())
    throw DeviceError("CUDA" + std::to_string(ordinal) + " (" + info_.name + ") has compute capability " +
                      info_.capability() + "; 7.0 or newer is needed");
  driver_->check(api().cuDeviceGet(&device_, ordinal), "opening " + info_.device_name());
  check(api().cuDevicePrimaryCtxRetain(&context_, device_), "making a context");
  make_current();
}

Device::~Device() {
  if (context_ != nullptr) (void)api().cuDevicePrimaryCtxRelease(device_);
}

void Device::make_current() const { check(api().cuCtxSetCurrent(context_), "making the context current"); }

size_t Device::free_bytes() const {
  const Guard guard(*this);
  size_t free = 0, total = 0;
  check(api().cuMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

void Device::synchronize() const {
  const Guard guard(*this);
  check(api().cuCtxSynchronize(), "waiting for the device");
}

void Device::check(CUresult result, std::string_view doing) const {
  if (result != kCudaSuccess) driver_->check(result, info_.device_name() + ": " + std::string(doing));
}

Device::Guard::Guard(const Device& device) : device_(device) { (void)device.api().cuCtxPushCurrent(device.context_); }

Device::Guard::~Guard() {
  CUcontext popped = nullptr;
  (void)device_.api().cuCtxPopCurrent(&popped);
}

}  // namespace v100::cuda
