// The objects of the emulated driver and what is done with them: work given to streams, memory, modules.
//
// Functions return a CUresult's number. Entry points that look at an object take the lock of the world, or ask `lives`.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "launch.h"

namespace emulated_cuda {

using Result = int;
using Address = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101,
                 kInvalidImage = 200, kInvalidContext = 201, kNoBinary = 209, kPeerAlreadyEnabled = 704,
                 kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kIllegalAddress = 700, kLaunchFailed = 719,
                 kNotSupported = 801, kCaptureUnsupported = 900, kCaptureInvalidated = 901, kIllegalState = 401,
                 kCaptureUnmatched = 903;

constexpr int kMostDevices = 8;
constexpr unsigned kSharedWithoutOptIn = 48 << 10;

struct Context {
  int device = 0;
  int holders = 0;
  std::set<int> peers;
  Result fault = kSuccess;
};

// Work of a stream that is recorded in place of being done.
struct Recording {
  int mode = 0;
  bool is_invalid = false;
  std::vector<std::function<Result()>> work;
};

struct Stream {
  Context* context = nullptr;
  bool is_blocking = true;  // the default stream waits for it, and it for the default stream
  std::deque<std::function<Result()>> queue;
  std::recursive_mutex mutex;  // of the work that is being done
  std::shared_ptr<Recording> recording;
  bool began = false;  // the recording
};

struct Event {
  Context* context = nullptr;
  bool has_time = true;
  // The newest record: as often as that was asked for and as often as it happened.
  unsigned long asked = 0, happened = 0;
  Stream* stream = nullptr;
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Recording> recording;
};

struct LoadedUnit {
  std::string path;
  const Unit* unit;
};
struct Module;
struct Function {
  Module* module = nullptr;
  const Kernel* kernel = nullptr;
  unsigned most_dynamic_shared = kSharedWithoutOptIn;
};
struct Module {
  Context* context = nullptr;
  const Unit* unit = nullptr;
  std::map<std::string, std::unique_ptr<Function>, std::less<>> functions;
};

struct Graph {
  std::vector<std::function<Result()>> work;
};
struct GraphExec {
  std::vector<std::function<Result()>> work;
};

struct Allocation {
  size_t bytes = 0;  // asked for
  std::byte* base = nullptr;
  size_t mapped = 0;  // from base, with a page that cannot be read at either end
  int device = -1;    // -1: pinned host memory
};

struct Device {
  Context context;
  size_t used = 0;
  Stream default_stream;
};

// All that lives. Never destroyed, like the driver.
struct World {
  std::mutex mutex;
  bool is_initialized = false;
  int device_count = 1;
  size_t device_bytes = 0;
  bool is_lazy = false;
  std::array<Device, kMostDevices> devices;
  std::map<Address, Allocation> allocations;  // by first address
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::set<Function*> functions;
  std::set<Graph*> graphs;
  std::set<GraphExec*> graph_execs;
  std::vector<std::unique_ptr<LoadedUnit>> units;
  std::deque<std::string> fault_texts;  // handed out as C strings
};
World& world();
using Lock = std::lock_guard<std::mutex>;

inline thread_local std::vector<Context*> context_stack;
inline thread_local int recordings_here = 0;  // that this thread began and that forbid it to wait and to allocate

inline Context* current_context() { return context_stack.empty() ? nullptr : context_stack.back(); }
inline bool device_exists(int device) { return device >= 0 && device < world().device_count; }

template <class T>
bool lives(const std::set<T*>& all, T* one) {
  const Lock lock(world().mutex);
  return all.contains(one);
}

// The context that calls are for, or why there is none.
Result enter(Context*& context);
// Is reported by the next wait, with its text; the first of a context.
void report_fault(Context* context, const std::string& text);

// --- streams ----------------------------------------------------------------------------------------------------------

// nullptr is the default stream of the current context.
Result find_stream(Context* context, Stream* handle, Stream*& stream);
// Does what is queued, in order; the first result that is not success.
Result drain(Stream& stream);
Result drain_all(Context* context);
// Gives work to a stream: recorded, done at once or queued.
Result submit(Context* context, Stream* handle, std::function<Result()> work);
// For calls that may not be made by a thread that records.
inline Result forbid_while_recording() { return recordings_here > 0 ? kCaptureUnsupported : kSuccess; }

// --- memory -----------------------------------------------------------------------------------------------------------

// Poisoned memory that ends, but for the alignment, at a page that cannot be read. device: -1 is the host.
Result allocate(int device, size_t bytes, Address& address);
// A fault if something was written beside it.
Result release(Context* context, Address address, bool is_host);
Result copy(Stream* stream, void* to, const void* from, size_t bytes, bool to_device, bool from_device, bool waits);
Result fill(Stream* stream, Address to, size_t bytes, std::function<void()> work);

// --- modules ----------------------------------------------------------------------------------------------------------

// why: of a failure.
Result load_module(Module** module, const void* image, std::string& why);
Result check_launch(const Function& function, Index grid, Index block, unsigned shared_bytes);

}  // namespace emulated_cuda
