#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"

namespace v100::cuda {

namespace {

// Cubins of the 12.4 compiler run on every driver of CUDA 12. (PTX of that compiler needs 12.4: Module checks that.)
constexpr int kOldestVersion = 12000;
constexpr const char* kOldestText = "driver 525 (CUDA 12.0)";

std::string version_name(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The words of a driver whose version may be too old to have the functions below.
template <class Function>
bool find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

// nullptr, or the first symbol that the library lacks. Suffixes mark the revision of a function that is declared above.
const char* load_functions(void* library, DriverApi& api) {
  const char* missing = nullptr;
  const auto load = [&](auto& function, const char* symbol) {
    if (missing == nullptr && !find(library, symbol, function)) missing = symbol;
  };
  load(api.cuGetErrorName, "cuGetErrorName");
  load(api.cuGetErrorString, "cuGetErrorString");
  load(api.cuDeviceGetCount, "cuDeviceGetCount");
  load(api.cuDeviceGet, "cuDeviceGet");
  load(api.cuDeviceGetName, "cuDeviceGetName");
  load(api.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  load(api.cuDeviceTotalMem, "cuDeviceTotalMem_v2");
  load(api.cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId");
  load(api.cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer");
  load(api.cuDeviceGetP2PAttribute, "cuDeviceGetP2PAttribute");
  load(api.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  load(api.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  load(api.cuCtxSetCurrent, "cuCtxSetCurrent");
  load(api.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  load(api.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  load(api.cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess");
  load(api.cuCtxSynchronize, "cuCtxSynchronize");
  load(api.cuMemGetInfo, "cuMemGetInfo_v2");
  load(api.cuMemAlloc, "cuMemAlloc_v2");
  load(api.cuMemFree, "cuMemFree_v2");
  load(api.cuMemHostAlloc, "cuMemHostAlloc");
  load(api.cuMemFreeHost, "cuMemFreeHost");
  load(api.cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  load(api.cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  load(api.cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  load(api.cuMemsetD8Async, "cuMemsetD8Async");
  load(api.cuStreamCreate, "cuStreamCreate");
  load(api.cuStreamDestroy, "cuStreamDestroy_v2");
  load(api.cuStreamSynchronize, "cuStreamSynchronize");
  load(api.cuStreamQuery, "cuStreamQuery");
  load(api.cuStreamWaitEvent, "cuStreamWaitEvent");
  load(api.cuEventCreate, "cuEventCreate");
  load(api.cuEventDestroy, "cuEventDestroy_v2");
  load(api.cuEventRecord, "cuEventRecord");
  load(api.cuEventSynchronize, "cuEventSynchronize");
  load(api.cuEventQuery, "cuEventQuery");
  load(api.cuEventElapsedTime, "cuEventElapsedTime");
  load(api.cuModuleLoadDataEx, "cuModuleLoadDataEx");
  load(api.cuModuleUnload, "cuModuleUnload");
  load(api.cuModuleGetFunction, "cuModuleGetFunction");
  load(api.cuFuncSetAttribute, "cuFuncSetAttribute");
  load(api.cuLaunchKernel, "cuLaunchKernel");
  load(api.cuStreamBeginCapture, "cuStreamBeginCapture_v2");
  load(api.cuStreamEndCapture, "cuStreamEndCapture");
  load(api.cuGraphInstantiate, "cuGraphInstantiateWithFlags");
  load(api.cuGraphGetNodes, "cuGraphGetNodes");
  load(api.cuGraphLaunch, "cuGraphLaunch");
  load(api.cuGraphExecDestroy, "cuGraphExecDestroy");
  load(api.cuGraphDestroy, "cuGraphDestroy");
  return missing;
}

}  // namespace

std::shared_ptr<const Driver> Driver::load() {
  const char* library = std::getenv("V100_CUDA_DRIVER");
  return load(library != nullptr && *library != '\0' ? library : "libcuda.so.1");
}

std::shared_ptr<const Driver> Driver::load(const std::string& library) {
  std::shared_ptr<Driver> driver(new Driver);
  driver->library_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (driver->library_ == nullptr) {
    const char* why = dlerror();
    throw DeviceError("no NVIDIA driver: " + library + " cannot be loaded" +
                      (why != nullptr ? " (" + std::string(why) + ")" : std::string()));
  }
  DriverApi& api = driver->api_;
  if (!find(driver->library_, "cuInit", api.cuInit) ||
      !find(driver->library_, "cuDriverGetVersion", api.cuDriverGetVersion))
    throw DeviceError(library + " is not a CUDA driver: it lacks cuInit");
  if (api.cuDriverGetVersion(&driver->version_) != kCudaSuccess) driver->version_ = 0;
  const char* missing = load_functions(driver->library_, api);
  if (missing != nullptr || driver->version_ < kOldestVersion)
    throw DeviceError("the NVIDIA driver is too old: it offers CUDA " + version_name(driver->version_) +
                      (missing != nullptr ? " and lacks " + std::string(missing) : std::string()) + ", needed is " +
                      kOldestText + " or newer");
  const CUresult started = api.cuInit(0);
  if (started == kCudaNoDevice) throw DeviceError("the NVIDIA driver sees no device");
  driver->check(started, "starting the NVIDIA driver");
  return driver;
}

Driver::~Driver() {
  if (library_ != nullptr) dlclose(library_);
}

std::string Driver::version_text() const { return version_name(version_); }

std::string Driver::words(CUresult result) const {
  const char *name = nullptr, *text = nullptr;
  if (api_.cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr) name = "unknown error";
  if (api_.cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) text = "no description";
  return std::string(text) + " (" + name + ", " + std::to_string(result) + ")";
}

void Driver::fail(CUresult result, std::string_view doing) const {
  const std::string message = std::string(doing) + ": " + words(result);
  if (result == kCudaOutOfMemory) throw OutOfMemory(message);
  throw DeviceError(message);
}

}  // namespace v100::cuda
