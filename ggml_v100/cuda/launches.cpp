#include "cuda/launches.h"

#include "base/error.h"

namespace v100::cuda {

namespace {

std::shared_ptr<const KernelArchive> require_kernels(int32_t ordinal) {
  auto archive = KernelArchive::of_this_process();
  if (archive == nullptr)
    throw DeviceError("CUDA" + std::to_string(ordinal) +
                      " cannot be used: this program was built without CUDA kernels");
  return archive;
}

}  // namespace

Launches::Launches(int32_t ordinal) : archive_(require_kernels(ordinal)), device_(Driver::load(), ordinal) {}

const Kernel& Launches::kernel(std::string_view unit, std::string_view name, uint32_t shared_bytes) const {
  const std::lock_guard lock(mutex_);
  auto loaded = units_.find(unit);
  if (loaded == units_.end()) {
    auto module = std::make_unique<Module>(device_, *archive_, unit);
    loaded = units_.emplace(std::string(unit), Unit{std::move(module), {}}).first;
  }
  auto& kernels = loaded->second.kernels;
  auto kernel = kernels.find(name);
  if (kernel == kernels.end())
    kernel = kernels.emplace(std::string(name), loaded->second.module->kernel(std::string(name), shared_bytes)).first;
  return kernel->second;
}

}  // namespace v100::cuda
