#include "cuda/module.h"

#include <array>

#include "base/error.h"

namespace v100::cuda {

namespace {

constexpr int kPtxDriver = 12040;                 // PTX 8.4, what the 12.4 compiler writes
constexpr int kErrorLog = 5, kErrorLogBytes = 6;  // CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
constexpr uint32_t kSharedWithoutOptIn = 48 << 10;

}  // namespace

void Kernel::launch_packed(const Stream& stream, Grid grid, uint32_t threads, const void* params,
                           uint32_t shared_bytes) const {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // no rows, no heads: nothing to do
  void* arguments[] = {const_cast<void*>(params)};
  const Device& device = stream.device();
  const CUresult result = device.api().cuLaunchKernel(function_, grid.x, grid.y, grid.z, threads, 1, 1, shared_bytes,
                                                      stream.handle(), arguments, nullptr);
  if (result != kCudaSuccess) device.check(result, "launching " + name_);
}

Module::Module(const Device& device, const KernelArchive& archive, std::string_view unit)
    : device_(device), unit_(unit) {
  const Device::Guard guard(device);
  const KernelArchive::Unit code = archive.unit(unit);
  const bool is_volta = device.info().capability_major == 7;
  if (!is_volta && device.driver().version() < kPtxDriver)
    throw DeviceError(device.info().device_name() + " (" + device.info().name + ", compute capability " +
                      device.info().capability() +
                      ") needs driver 550 (CUDA 12.4) or newer to compile the kernels; this one offers CUDA " +
                      device.driver().version_text());
  std::array<char, 4096> log{};
  std::array<int, 2> options{kErrorLog, kErrorLogBytes};
  std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size() - 1)};
  const CUresult result =
      device.api().cuModuleLoadDataEx(&module_, is_volta ? code.cubin.data() : code.ptx.data(),
                                      static_cast<unsigned>(options.size()), options.data(), values.data());
  if (result != kCudaSuccess)
    device.check(result,
                 "loading kernel unit '" + unit_ + "'" + (log[0] != '\0' ? " [" + std::string(log.data()) + "]" : ""));
}

Module::~Module() {
  const Device::Guard guard(device_);
  (void)device_.api().cuModuleUnload(module_);
}

Kernel Module::kernel(const std::string& name, uint32_t shared_bytes) const {
  const Device::Guard guard(device_);
  Kernel kernel;
  kernel.name_ = unit_ + "/" + name;
  device_.check(device_.api().cuModuleGetFunction(&kernel.function_, module_, name.c_str()),
                "finding kernel " + kernel.name_);
  if (shared_bytes > kSharedWithoutOptIn)
    device_.check(device_.api().cuFuncSetAttribute(kernel.function_,
                                                   static_cast<int>(FunctionAttribute::max_dynamic_shared_bytes),
                                                   static_cast<int>(shared_bytes)),
                  "giving " + kernel.name_ + " " + std::to_string(shared_bytes) + " bytes of shared memory");
  return kernel;
}

}  // namespace v100::cuda
