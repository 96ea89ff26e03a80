// A driver library for tests of the driver layer: no device, but memory, counters and errors as FAKE_CUDA asks for.
//
// FAKE_CUDA is "name=value,name=value": version, init, count, capability (60 is 6.0), free (bytes), and a function's
// name with the code that it returns. Every call that matters is written to stderr, one line each.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

long setting(const std::string& name, long otherwise) {
  const char* all = std::getenv("FAKE_CUDA");
  if (all == nullptr) return otherwise;
  const std::string text = "," + std::string(all);
  const size_t at = text.find("," + name + "=");
  return at == std::string::npos ? otherwise : std::atol(text.c_str() + at + name.size() + 2);
}

int result_of(const char* function) { return static_cast<int>(setting(function, 0)); }

int called(const char* function) {
  std::fprintf(stderr, "%s\n", function);
  return result_of(function);
}

char handles[64];

}  // namespace

extern "C" {

int cuInit(unsigned) { return static_cast<int>(setting("init", 0)); }
int cuDriverGetVersion(int* version) { return *version = static_cast<int>(setting("version", 12040)), 0; }
int cuGetErrorName(int error, const char** text) {
  *text = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : error == 218 ? "CUDA_ERROR_INVALID_PTX" : nullptr;
  return *text == nullptr ? 1 : 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : error == 218 ? "a PTX JIT compilation failed" : nullptr;
  return *text == nullptr ? 1 : 0;
}
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(setting("count", 2)), 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int length, int device) {
  std::snprintf(name, static_cast<size_t>(length), "Fake V100 %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const long capability = setting("capability", 70);
  *value = static_cast<int>(attribute == 75   ? capability / 10
                            : attribute == 76 ? capability % 10
                            : attribute == 16 ? 80
                            : attribute == 32 ? 1
                            : attribute == 97 ? 98304
                                              : 6291456);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{16} << 30, 0; }
int cuDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "0004:0%d:00.0", device);
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int, int) { return *can = 1, 0; }
int cuDeviceGetP2PAttribute(int* value, int, int, int) { return *value = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = handles, called("cuDevicePrimaryCtxRetain"); }
int cuDevicePrimaryCtxRelease_v2(int) { return called("cuDevicePrimaryCtxRelease"); }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxEnablePeerAccess(void*, unsigned) { return 0; }
int cuCtxSynchronize() { return result_of("cuCtxSynchronize"); }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = static_cast<size_t>(setting("free", 1L << 30));
  *total = size_t{16} << 30;
  return 0;
}
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  if (bytes > static_cast<size_t>(setting("free", 1L << 30))) return 2;
  return *address = reinterpret_cast<unsigned long long>(std::calloc(bytes, 1)), called("cuMemAlloc");
}
int cuMemFree_v2(unsigned long long address) {
  return std::free(reinterpret_cast<void*>(address)), called("cuMemFree");
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  return *address = std::calloc(bytes, 1), called("cuMemHostAlloc");
}
int cuMemFreeHost(void* address) { return std::free(address), called("cuMemFreeHost"); }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), result_of("cuMemcpyHtoDAsync");
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void*) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), result_of("cuMemcpyDtoHAsync");
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void*) {
  return std::memset(reinterpret_cast<void*>(to), value, bytes), 0;
}
int cuStreamCreate(void** stream, unsigned) { return *stream = handles + 1, called("cuStreamCreate"); }
int cuStreamDestroy_v2(void*) { return called("cuStreamDestroy"); }
int cuStreamSynchronize(void*) { return result_of("cuStreamSynchronize"); }
int cuStreamQuery(void*) { return 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) { return *event = handles + 2, called("cuEventCreate"); }
int cuEventDestroy_v2(void*) { return called("cuEventDestroy"); }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventQuery(void*) { return result_of("cuEventQuery"); }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1.5f, 0; }
int cuModuleLoadDataEx(void** module, const void* image, unsigned n_options, int* options, void** values) {
  const char* bytes = static_cast<const char*>(image);
  std::fprintf(stderr, "cuModuleLoadDataEx %s\n",
               std::memcmp(bytes,
                           "\x7f"
                           "ELF",
                           4) == 0
                   ? "cubin"
                   : bytes);
  const int result = result_of("cuModuleLoadDataEx");
  if (result != 0 && n_options > 0 && options[0] == 5)
    std::strcpy(static_cast<char*>(values[0]), "line 7: bad instruction");
  return *module = handles + 3, result;
}
int cuModuleUnload(void*) { return called("cuModuleUnload"); }
int cuModuleGetFunction(void** function, void*, const char*) {
  return *function = handles + 4, result_of("cuModuleGetFunction");
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  std::fprintf(stderr, "cuFuncSetAttribute %d %d\n", attribute, value);
  return 0;
}
int cuLaunchKernel(void*, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared,
                   void*, void** parameters, void**) {
  std::fprintf(stderr, "cuLaunchKernel %u %u %u x %u shared %u first %d\n", x, y, z, threads, shared,
               *static_cast<int*>(parameters[0]));
  return result_of("cuLaunchKernel");
}
int cuStreamBeginCapture_v2(void*, int) { return called("cuStreamBeginCapture"); }
int cuStreamEndCapture(void*, void** graph) { return *graph = handles + 5, called("cuStreamEndCapture"); }
int cuGraphInstantiateWithFlags(void** exec, void*, unsigned long long) {
  return *exec = handles + 6, called("cuGraphInstantiate");
}
int cuGraphGetNodes(void*, void**, size_t* count) { return *count = 3, 0; }
int cuGraphLaunch(void*, void*) { return called("cuGraphLaunch"); }
int cuGraphExecDestroy(void*) { return called("cuGraphExecDestroy"); }
int cuGraphDestroy(void*) { return called("cuGraphDestroy"); }

}  // extern "C"
