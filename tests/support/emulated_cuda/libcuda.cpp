// A CUDA driver without a device: the functions of the driver API that we use, over host memory and the executor.
//
// EMULATED_CUDA_DEVICES       how many, 1 to 8 (1)
// EMULATED_CUDA_MEMORY_MIB    of each (2048)
// EMULATED_CUDA_CAPABILITY    70 takes the units' cubin, 75 and more their PTX, which is the same here (70)
// EMULATED_CUDA_STREAMS       eager: work is done when it is given. lazy: when it is waited for, so that what is not waited
//                             for is seen to be missing (eager)
// EMULATED_CUDA_WORKERS       threads of the host that run blocks of a launch (those of the machine, at most 4)
//
// What a real driver leaves undefined is an error here where that is cheap: copies beyond an allocation, objects of another
// context, launches beyond a kernel's bounds. Fresh and freed memory is poisoned. A fault of a kernel is reported by the next
// wait, with its text, and stays.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>

#include "launch.h"
#include "objects.h"

using namespace emulated_cuda;

namespace {

struct ErrorName {
  Result number;
  const char *name, *text;
};
constexpr ErrorName kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kPeerAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not begun in this stream"},
};

constexpr unsigned kMostShared = 96 << 10;

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atol(text);
}

// A line for each launch that is done, in EMULATED_CUDA_LAUNCHES, if that names a file.
void note_launch(const char* kernel) {
  const char* path = std::getenv("EMULATED_CUDA_LAUNCHES");
  if (path == nullptr) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (std::FILE* file = std::fopen(path, "a"); file != nullptr) {
    std::fprintf(file, "%s\n", kernel);
    std::fclose(file);
  }
}

}  // namespace

extern "C" {

// --- driver and devices -----------------------------------------------------------------------------------------------

Result cuInit(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  World& w = world();
  const Lock lock(w.mutex);
  if (w.is_initialized) return kSuccess;
  w.device_count = static_cast<int>(std::clamp(setting("EMULATED_CUDA_DEVICES", 1), 1L, long{kMostDevices}));
  w.device_bytes = static_cast<size_t>(setting("EMULATED_CUDA_MEMORY_MIB", 2048)) << 20;
  const char* streams = std::getenv("EMULATED_CUDA_STREAMS");
  w.is_lazy = streams != nullptr && std::string_view(streams) == "lazy";
  for (int i = 0; i < kMostDevices; ++i) w.devices[static_cast<size_t>(i)].context.device = i;
  w.is_initialized = true;
  return kSuccess;
}

Result cuDriverGetVersion(int* version) { return *version = 12040, kSuccess; }

Result cuGetErrorName(Result error, const char** text) {
  for (const ErrorName& known : kErrors)
    if (known.number == error) return *text = known.name, kSuccess;
  return *text = nullptr, kInvalidValue;
}

// The newest fault's text stands for "unspecified launch failure".
Result cuGetErrorString(Result error, const char** text) {
  if (error == kLaunchFailed) {
    const Lock lock(world().mutex);
    if (!world().fault_texts.empty()) return *text = world().fault_texts.back().c_str(), kSuccess;
  }
  for (const ErrorName& known : kErrors)
    if (known.number == error) return *text = known.text, kSuccess;
  return *text = nullptr, kInvalidValue;
}

Result cuDeviceGetCount(int* count) { return *count = world().device_count, kSuccess; }

Result cuDeviceGet(int* device, int ordinal) {
  if (!device_exists(ordinal)) return kInvalidDevice;
  return *device = ordinal, kSuccess;
}

Result cuDeviceGetName(char* name, int length, int device) {
  if (!device_exists(device)) return kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(length), "Emulated GPU");
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (!device_exists(device)) return kInvalidDevice;
  const int capability = static_cast<int>(setting("EMULATED_CUDA_CAPABILITY", 70));
  switch (attribute) {
    case 1:
      return *value = static_cast<int>(kMostThreads), kSuccess;  // threads of a block
    case 8:
      return *value = static_cast<int>(kSharedWithoutOptIn), kSuccess;
    case 10:
      return *value = static_cast<int>(kWarpLanes), kSuccess;
    case 16:
      return *value = 80, kSuccess;  // multiprocessors
    case 32:
      return *value = 1, kSuccess;  // ECC
    case 38:
      return *value = 6 << 20, kSuccess;  // L2
    case 39:
      return *value = 2048, kSuccess;  // threads of a multiprocessor
    case 41:
      return *value = 1, kSuccess;  // unified addressing
    case 75:
      return *value = capability / 10, kSuccess;
    case 76:
      return *value = capability % 10, kSuccess;
    case 81:
      return *value = static_cast<int>(kMostShared), kSuccess;  // of a multiprocessor
    case 82:
      return *value = 65536, kSuccess;  // registers of a multiprocessor
    case 97:
      return *value = static_cast<int>(kMostShared), kSuccess;  // of a block, opted in
    default:
      return kInvalidValue;
  }
}

Result cuDeviceTotalMem_v2(size_t* bytes, int device) {
  if (!device_exists(device)) return kInvalidDevice;
  return *bytes = world().device_bytes, kSuccess;
}

Result cuDeviceGetPCIBusId(char* id, int length, int device) {
  if (!device_exists(device)) return kInvalidDevice;
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return kSuccess;
}

Result cuDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!device_exists(device) || !device_exists(peer)) return kInvalidDevice;
  return *can = device != peer ? 1 : 0, kSuccess;
}

Result cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  if (!device_exists(device) || !device_exists(peer) || device == peer) return kInvalidDevice;
  return *value = attribute == 1 ? 0 : 1, kSuccess;
}

// --- contexts ---------------------------------------------------------------------------------------------------------

Result cuDevicePrimaryCtxRetain(Context** context, int device) {
  if (!world().is_initialized) return kNotInitialized;
  if (!device_exists(device)) return kInvalidDevice;
  const Lock lock(world().mutex);
  Context& primary = world().devices[static_cast<size_t>(device)].context;
  ++primary.holders;
  return *context = &primary, kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
  if (!device_exists(device)) return kInvalidDevice;
  Context& primary = world().devices[static_cast<size_t>(device)].context;
  if (primary.holders == 0) return kInvalidContext;
  if (primary.holders == 1) (void)drain_all(&primary);
  const Lock lock(world().mutex);
  if (--primary.holders == 0) primary.fault = kSuccess, primary.peers.clear();
  return kSuccess;
}

Result cuCtxSetCurrent(Context* context) {
  if (!context_stack.empty()) context_stack.pop_back();
  if (context != nullptr) context_stack.push_back(context);
  return kSuccess;
}

Result cuCtxGetCurrent(Context** context) { return *context = current_context(), kSuccess; }

Result cuCtxPushCurrent_v2(Context* context) {
  if (context == nullptr) return kInvalidContext;
  context_stack.push_back(context);
  return kSuccess;
}

Result cuCtxPopCurrent_v2(Context** context) {
  if (context_stack.empty()) return kInvalidContext;
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return kSuccess;
}

Result cuCtxEnablePeerAccess(Context* peer, unsigned flags) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (flags != 0 || peer == nullptr) return kInvalidValue;
  if (peer == context) return kInvalidDevice;
  const Lock lock(world().mutex);
  return context->peers.insert(peer->device).second ? kSuccess : kPeerAlreadyEnabled;
}

Result cuCtxSynchronize() {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  const Result result = drain_all(context);
  return result != kSuccess ? result : context->fault;
}

// --- memory -----------------------------------------------------------------------------------------------------------

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  const Lock lock(world().mutex);
  *total = world().device_bytes;
  *free = world().device_bytes - world().devices[static_cast<size_t>(context->device)].used;
  return kSuccess;
}

Result cuMemAlloc_v2(Address* address, size_t bytes) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  Device& device = world().devices[static_cast<size_t>(context->device)];
  {
    const Lock lock(world().mutex);
    if (bytes > world().device_bytes - device.used) return kOutOfMemory;
    device.used += bytes;
  }
  const Result result = allocate(context->device, bytes, *address);
  if (result != kSuccess) {
    const Lock lock(world().mutex);
    device.used -= bytes;
  }
  return result;
}

// Waits for the device, as the real one does.
Result cuMemFree_v2(Address address) {
  if (address == 0) return kSuccess;
  Context* context = current_context();
  if (context == nullptr) return kInvalidContext;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  (void)drain_all(context);
  return release(context, address, false);
}

Result cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  if (bytes == 0) return kInvalidValue;
  Address made = 0;
  const Result result = allocate(-1, bytes, made);
  *address = reinterpret_cast<void*>(made);
  return result;
}

Result cuMemFreeHost(void* address) {
  Context* context = current_context();
  if (context == nullptr) return kInvalidContext;
  (void)drain_all(context);
  return release(context, reinterpret_cast<Address>(address), true);
}

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream* stream) {
  return copy(stream, reinterpret_cast<void*>(to), from, bytes, true, false, false);
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream* stream) {
  return copy(stream, to, reinterpret_cast<const void*>(from), bytes, false, true, false);
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream* stream) {
  return copy(stream, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, true, true, false);
}
Result cuMemcpyPeerAsync(Address to, Context*, Address from, Context*, size_t bytes, Stream* stream) {
  return copy(stream, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, true, true, false);
}
Result cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
  return copy(nullptr, reinterpret_cast<void*>(to), from, bytes, true, false, true);
}
Result cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
  return copy(nullptr, to, reinterpret_cast<const void*>(from), bytes, false, true, true);
}
Result cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) {
  return copy(nullptr, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, true, true, true);
}
Result cuMemsetD8Async(Address to, unsigned char value, size_t count, Stream* stream) {
  return fill(stream, to, count, [=] { std::memset(reinterpret_cast<void*>(to), value, count); });
}
Result cuMemsetD8_v2(Address to, unsigned char value, size_t count) {
  return cuMemsetD8Async(to, value, count, nullptr);
}
Result cuMemsetD32Async(Address to, unsigned value, size_t count, Stream* stream) {
  if (to % 4 != 0) return kInvalidValue;
  return fill(stream, to, count * 4, [=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); });
}

// --- streams and events -----------------------------------------------------------------------------------------------

Result cuStreamCreate(Stream** stream, unsigned flags) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (flags > 1) return kInvalidValue;
  auto made = std::make_unique<Stream>();
  made->context = context, made->is_blocking = flags == 0;
  const Lock lock(world().mutex);
  world().streams.insert(made.get());
  *stream = made.release();
  return kSuccess;
}

Result cuStreamDestroy_v2(Stream* stream) {
  if (!lives(world().streams, stream)) return kInvalidHandle;
  (void)drain(*stream);
  const Lock lock(world().mutex);
  world().streams.erase(stream);
  delete stream;
  return kSuccess;
}

Result cuStreamSynchronize(Stream* handle) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  Stream* stream = nullptr;
  if (const Result result = find_stream(context, handle, stream); result != kSuccess) return result;
  if (stream->recording != nullptr) return stream->recording->is_invalid = true, kCaptureUnsupported;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  const Result result = drain(*stream);
  return result != kSuccess ? result : stream->context->fault;
}

// What is asked for comes about, so that nobody asks for ever.
Result cuStreamQuery(Stream* handle) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  Stream* stream = nullptr;
  if (const Result result = find_stream(context, handle, stream); result != kSuccess) return result;
  if (stream->recording != nullptr) return kCaptureUnsupported;
  const std::lock_guard lock(stream->mutex);
  const bool was_done = stream->queue.empty();
  const Result result = drain(*stream);
  return result != kSuccess ? result : was_done ? stream->context->fault : kNotReady;
}

Result cuEventCreate(Event** event, unsigned flags) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  auto made = std::make_unique<Event>();
  made->context = context, made->has_time = (flags & 2u) == 0;
  const Lock lock(world().mutex);
  world().events.insert(made.get());
  *event = made.release();
  return kSuccess;
}

Result cuEventDestroy_v2(Event* event) {
  if (!lives(world().events, event)) return kInvalidHandle;
  if (event->stream != nullptr && lives(world().streams, event->stream)) (void)drain(*event->stream);
  const Lock lock(world().mutex);
  world().events.erase(event);
  delete event;
  return kSuccess;
}

Result cuEventRecord(Event* event, Stream* handle) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (!lives(world().events, event)) return kInvalidHandle;
  Stream* stream = nullptr;
  if (const Result result = find_stream(context, handle, stream); result != kSuccess) return result;
  if (event->context != stream->context) return kInvalidHandle;
  event->recording = stream->recording;
  if (stream->recording != nullptr) return kSuccess;  // an edge of the graph, whose work is done in order anyway
  const unsigned long number = ++event->asked;
  event->stream = stream;
  return submit(context, handle, [=] {
    event->time = std::chrono::steady_clock::now();
    event->happened = number;
    return kSuccess;
  });
}

namespace {
Result wait_for(Event& event) {
  const unsigned long number = event.asked;
  if (event.happened >= number || event.stream == nullptr) return kSuccess;
  return drain(*event.stream);
}
}  // namespace

Result cuStreamWaitEvent(Stream* handle, Event* event, unsigned) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (!lives(world().events, event)) return kInvalidHandle;
  Stream* stream = nullptr;
  if (const Result result = find_stream(context, handle, stream); result != kSuccess) return result;
  if (event->recording != nullptr) {  // joins the recording
    if (stream->recording != nullptr && stream->recording != event->recording) return kCaptureUnmatched;
    stream->recording = event->recording;
    return kSuccess;
  }
  if (stream->recording != nullptr) return stream->recording->is_invalid = true, kCaptureUnsupported;
  return submit(stream->context, handle, [=] { return wait_for(*event); });
}

Result cuEventSynchronize(Event* event) {
  if (!lives(world().events, event)) return kInvalidHandle;
  if (event->recording != nullptr) return kCaptureUnsupported;
  const Result result = wait_for(*event);
  return result != kSuccess ? result : event->context->fault;
}

Result cuEventQuery(Event* event) {
  if (!lives(world().events, event)) return kInvalidHandle;
  if (event->recording != nullptr) return kCaptureUnsupported;
  const bool was_done = event->happened >= event->asked;
  const Result result = wait_for(*event);
  return result != kSuccess ? result : was_done ? event->context->fault : kNotReady;
}

Result cuEventElapsedTime(float* milliseconds, Event* begin, Event* end) {
  if (!lives(world().events, begin) || !lives(world().events, end)) return kInvalidHandle;
  if (!begin->has_time || !end->has_time || begin->asked == 0 || end->asked == 0) return kInvalidHandle;
  if (begin->happened < begin->asked || end->happened < end->asked) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return kSuccess;
}

// --- modules and launches ---------------------------------------------------------------------------------------------

Result cuModuleLoadDataEx(Module** module, const void* image, unsigned n_options, int* options, void** values) {
  std::string why;
  const Result result = load_module(module, image, why);
  char* log = nullptr;
  size_t log_bytes = 0;
  for (unsigned i = 0; i < n_options; ++i) {
    if (options[i] == 5) log = static_cast<char*>(values[i]);              // CU_JIT_ERROR_LOG_BUFFER
    if (options[i] == 6) log_bytes = reinterpret_cast<size_t>(values[i]);  // ..._SIZE_BYTES
  }
  if (log != nullptr && log_bytes > 0) std::snprintf(log, log_bytes, "%s", why.c_str());
  return result;
}
Result cuModuleLoadData(Module** module, const void* image) {
  std::string why;
  return load_module(module, image, why);
}

Result cuModuleUnload(Module* module) {
  if (!lives(world().modules, module)) return kInvalidHandle;
  (void)drain_all(module->context);
  const Lock lock(world().mutex);
  for (const auto& [name, function] : module->functions) world().functions.erase(function.get());
  world().modules.erase(module);
  delete module;
  return kSuccess;
}

Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
  if (!lives(world().modules, module)) return kInvalidHandle;
  const Lock lock(world().mutex);
  std::unique_ptr<Function>& found = module->functions[name];
  if (found == nullptr) {
    const Unit& unit = *module->unit;
    const Kernel* end = unit.kernels + unit.count;
    const Kernel* kernel =
        std::find_if(unit.kernels, end, [&](const Kernel& k) { return std::strcmp(k.name, name) == 0; });
    if (kernel == end) {
      module->functions.erase(name);
      return kNotFound;
    }
    found = std::make_unique<Function>();
    found->module = module, found->kernel = kernel;
    world().functions.insert(found.get());
  }
  return *function = found.get(), kSuccess;
}

Result cuFuncGetAttribute(int* value, int attribute, Function* function) {
  if (!lives(world().functions, function)) return kInvalidHandle;
  switch (attribute) {
    case 0: {
      const unsigned most = function->kernel->most_threads;
      return *value = static_cast<int>(most != 0 ? most : kMostThreads), kSuccess;
    }
    case 8:
      return *value = static_cast<int>(function->most_dynamic_shared), kSuccess;
    default:
      return kNotSupported;
  }
}

Result cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (!lives(world().functions, function)) return kInvalidHandle;
  if (attribute == 9) return value >= -1 && value <= 100 ? kSuccess : kInvalidValue;  // preferred carve-out
  if (attribute != 8 || value < 0 || value > static_cast<int>(kMostShared)) return kInvalidValue;
  function->most_dynamic_shared = static_cast<unsigned>(value);
  return kSuccess;
}

Result cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream* stream, void** parameters,
                      void** extra) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (!lives(world().functions, function)) return kInvalidHandle;
  if (function->module->context != context) return kInvalidContext;
  if (parameters == nullptr || extra != nullptr) return kInvalidValue;
  const Index grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  if (const Result result = check_launch(*function, grid, block, shared_bytes); result != kSuccess) return result;
  const auto* bytes = static_cast<const std::byte*>(parameters[0]);
  // The parameter is copied now, 16-byte aligned, and lives as long as the work.
  struct alignas(16) Slice {
    std::byte bytes[16];
  };
  const size_t size = function->kernel->parameter_bytes;
  const auto kept = std::make_shared<std::vector<Slice>>((size + 15) / 16);
  std::memcpy(kept->data(), bytes, size);
  const Kernel* kernel = function->kernel;
  const Unit* unit = function->module->unit;
  const Result result = submit(context, stream, [=] {
    if (context->fault != kSuccess) return kSuccess;  // reported by whoever waits
    note_launch(kernel->name);
    const std::string text = run({kernel, unit, kept->data(), grid, block, shared_bytes});
    if (!text.empty()) report_fault(context, "emulated device: " + text);
    return kSuccess;
  });
  return result;
}

// --- graphs -----------------------------------------------------------------------------------------------------------

Result cuStreamBeginCapture_v2(Stream* stream, int mode) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (stream == nullptr) return kCaptureUnsupported;
  if (!lives(world().streams, stream)) return kInvalidHandle;
  if (stream->recording != nullptr) return kIllegalState;
  stream->recording = std::make_shared<Recording>();
  stream->recording->mode = mode;
  stream->began = true;
  if (mode != 2) ++recordings_here;  // 2 is relaxed
  return kSuccess;
}

Result cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (!lives(world().streams, stream)) return kInvalidHandle;
  if (stream->recording == nullptr || !stream->began) return kIllegalState;
  const std::shared_ptr<Recording> recording = stream->recording;
  if (recording->mode != 2) --recordings_here;
  stream->began = false;
  {
    const Lock lock(world().mutex);
    for (Stream* other : world().streams)
      if (other->recording == recording) other->recording = nullptr;
    for (Event* event : world().events)
      if (event->recording == recording) event->recording = nullptr;
  }
  if (recording->is_invalid) return kCaptureInvalidated;
  auto made = std::make_unique<Graph>(Graph{std::move(recording->work)});
  const Lock lock(world().mutex);
  world().graphs.insert(made.get());
  *graph = made.release();
  return kSuccess;
}

Result cuStreamIsCapturing(Stream* stream, int* status) {
  if (stream != nullptr && !lives(world().streams, stream)) return kInvalidHandle;
  return *status = stream != nullptr && stream->recording != nullptr ? 1 : 0, kSuccess;
}

Result cuGraphGetNodes(Graph* graph, void**, size_t* count) {
  if (!lives(world().graphs, graph)) return kInvalidHandle;
  return *count = graph->work.size(), kSuccess;
}

Result cuGraphInstantiateWithFlags(GraphExec** exec, Graph* graph, unsigned long long) {
  if (!lives(world().graphs, graph)) return kInvalidHandle;
  auto made = std::make_unique<GraphExec>(GraphExec{graph->work});
  const Lock lock(world().mutex);
  world().graph_execs.insert(made.get());
  *exec = made.release();
  return kSuccess;
}

Result cuGraphLaunch(GraphExec* exec, Stream* stream) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (!lives(world().graph_execs, exec)) return kInvalidHandle;
  for (const auto& work : exec->work)
    if (const Result result = submit(context, stream, work); result != kSuccess) return result;
  return kSuccess;
}

Result cuGraphExecDestroy(GraphExec* exec) {
  if (!lives(world().graph_execs, exec)) return kInvalidHandle;
  const Lock lock(world().mutex);
  world().graph_execs.erase(exec);
  delete exec;
  return kSuccess;
}

Result cuGraphDestroy(Graph* graph) {
  if (!lives(world().graphs, graph)) return kInvalidHandle;
  const Lock lock(world().mutex);
  world().graphs.erase(graph);
  delete graph;
  return kSuccess;
}

}  // extern "C"
