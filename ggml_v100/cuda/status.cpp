#include "cuda/status.h"

#include "base/error.h"
#include "cuda/kernel_archive.h"

namespace v100::cuda {

namespace {

Status::Entry entry_of(const std::shared_ptr<const Driver>& driver, DeviceInfo info) {
  Status::Entry entry{std::move(info), 0, {}};
  try {
    const Device device(driver, entry.info.ordinal);
    entry.free_bytes = device.free_bytes();
  } catch (const Error& error) {
    entry.problem = error.what();
  }
  return entry;
}

}  // namespace

std::string kernels_text() {
  try {
    const auto archive = KernelArchive::of_this_process();
    return archive == nullptr ? "built without CUDA kernels" : archive->compiler();
  } catch (const Error& error) {
    return error.what();
  }
}

Status status() {
  Status status;
  status.kernels = kernels_text();
  try {
    const std::shared_ptr<const Driver> driver = Driver::load();
    status.driver = driver->version_text();
    status.has_driver = true;
    for (DeviceInfo& info : list_devices(*driver)) status.devices.push_back(entry_of(driver, std::move(info)));
  } catch (const Error& error) {
    status.driver = error.what();
  }
  return status;
}

}  // namespace v100::cuda
