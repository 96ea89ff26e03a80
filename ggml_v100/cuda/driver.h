// The CUDA driver, loaded when first asked for: nothing of CUDA is needed to build or to start. Types and names are those
// of the driver API, declared here because its header is not there on every build machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace v100::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

// Numbers of the driver API that are used here.
inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaOutOfMemory = 2;
inline constexpr CUresult kCudaNoDevice = 100;
inline constexpr CUresult kCudaNotReady = 600;

enum class DeviceAttribute : int {
  max_shared_bytes_per_block_optin = 97,
  multiprocessors = 16,
  ecc_enabled = 32,
  capability_major = 75,
  capability_minor = 76,
  l2_bytes = 38,
};

enum class PeerAttribute : int { performance_rank = 1, access_supported = 2, native_atomics = 3 };

enum class FunctionAttribute : int { max_dynamic_shared_bytes = 8, shared_carveout_percent = 9 };

// Functions of the driver; each returns a CUresult. Loaded from the symbol named in driver.cpp.
struct DriverApi {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** text);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int length, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDeviceTotalMem)(size_t* bytes, CUdevice device);
  CUresult (*cuDeviceGetPCIBusId)(char* id, int length, CUdevice device);
  CUresult (*cuDeviceCanAccessPeer)(int* can, CUdevice device, CUdevice peer);
  CUresult (*cuDeviceGetP2PAttribute)(int* value, int attribute, CUdevice device, CUdevice peer);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuCtxSetCurrent)(CUcontext context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuCtxEnablePeerAccess)(CUcontext peer, unsigned flags);
  CUresult (*cuCtxSynchronize)();
  CUresult (*cuMemGetInfo)(size_t* free, size_t* total);
  CUresult (*cuMemAlloc)(CUdeviceptr* address, size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr address);
  CUresult (*cuMemHostAlloc)(void** address, size_t bytes, unsigned flags);
  CUresult (*cuMemFreeHost)(void* address);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyDtoHAsync)(void* to, CUdeviceptr from, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr to, unsigned char value, size_t count, CUstream stream);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuStreamQuery)(CUstream stream);
  CUresult (*cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned flags);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventDestroy)(CUevent event);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuEventSynchronize)(CUevent event);
  CUresult (*cuEventQuery)(CUevent event);
  CUresult (*cuEventElapsedTime)(float* milliseconds, CUevent begin, CUevent end);
  CUresult (*cuModuleLoadDataEx)(CUmodule* module, const void* image, unsigned n_options, int* options, void** values);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                             void** parameters, void** extra);
  CUresult (*cuStreamBeginCapture)(CUstream stream, int mode);
  CUresult (*cuStreamEndCapture)(CUstream stream, CUgraph* graph);
  CUresult (*cuGraphInstantiate)(CUgraphExec* exec, CUgraph graph, unsigned long long flags);
  CUresult (*cuGraphGetNodes)(CUgraph graph, void** nodes, size_t* count);
  CUresult (*cuGraphLaunch)(CUgraphExec exec, CUstream stream);
  CUresult (*cuGraphExecDestroy)(CUgraphExec exec);
  CUresult (*cuGraphDestroy)(CUgraph graph);
};

class Driver {
 public:
  // Loads and initialises the driver. Throws DeviceError, one line that says what is missing: no driver, one that is too
  // old, or the driver's own words.
  static std::shared_ptr<const Driver> load(const std::string& library);
  // The library of the environment variable V100_CUDA_DRIVER, else libcuda.so.1.
  static std::shared_ptr<const Driver> load();
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const DriverApi& api() const { return api_; }
  int version() const { return version_; }  // of CUDA: 12040 is 12.4
  std::string version_text() const;         // "12.4"

  // Throws for a result other than success: OutOfMemory for want of device memory, else DeviceError. The text is
  // "doing: words of the driver (name)".
  void check(CUresult result, std::string_view doing) const {
    if (result != kCudaSuccess) fail(result, doing);
  }
  std::string words(CUresult result) const;

 private:
  Driver() = default;
  [[noreturn]] void fail(CUresult result, std::string_view doing) const;

  void* library_ = nullptr;
  DriverApi api_{};
  int version_ = 0;
};

}  // namespace v100::cuda
