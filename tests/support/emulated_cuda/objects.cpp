// The objects of the emulated driver.
#include "objects.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace emulated_cuda {

constexpr size_t kAlignment = 256;  // of allocations
constexpr unsigned char kPoison = 0xff;

World& world() {
  static World* the = new World;
  return *the;
}

// The context that calls are for, or why there is none.
Result enter(Context*& context) {
  if (!world().is_initialized) return kNotInitialized;
  context = current_context();
  if (context == nullptr || context->holders == 0) return kInvalidContext;
  return context->fault;
}

void report_fault(Context* context, const std::string& text) {
  const Lock lock(world().mutex);
  if (context->fault != kSuccess) return;
  world().fault_texts.push_back(text);
  context->fault = kLaunchFailed;
}

// --- streams ----------------------------------------------------------------------------------------------------------

// nullptr is the default stream of the current context.
Result find_stream(Context* context, Stream* handle, Stream*& stream) {
  if (handle == nullptr) {
    stream = &world().devices[static_cast<size_t>(context->device)].default_stream;
    stream->context = context;
    return kSuccess;
  }
  if (!lives(world().streams, handle)) return kInvalidHandle;
  stream = handle;
  return kSuccess;
}

// Does what is queued, in order.
Result drain(Stream& stream) {
  const std::lock_guard lock(stream.mutex);
  Result result = kSuccess;
  while (!stream.queue.empty()) {
    const std::function<Result()> work = std::move(stream.queue.front());
    stream.queue.pop_front();
    const Result done = work();
    if (result == kSuccess) result = done;
  }
  return result;
}

static std::vector<Stream*> streams_of(Context* context) {
  std::vector<Stream*> found;
  const Lock lock(world().mutex);
  for (Stream* stream : world().streams)
    if (stream->context == context) found.push_back(stream);
  found.push_back(&world().devices[static_cast<size_t>(context->device)].default_stream);
  return found;
}

Result drain_all(Context* context) {
  Result result = kSuccess;
  for (Stream* stream : streams_of(context)) {
    const Result done = drain(*stream);
    if (result == kSuccess) result = done;
  }
  return result;
}

// Gives work to a stream: recorded, done at once or queued.
Result submit(Context* context, Stream* handle, std::function<Result()> work) {
  Stream* stream = nullptr;
  if (const Result result = find_stream(context, handle, stream); result != kSuccess) return result;
  if (stream->context != context) return kInvalidHandle;
  if (stream->recording != nullptr) {
    stream->recording->work.push_back(std::move(work));
    return kSuccess;
  }
  // The default stream and the streams that it waits for do their work in the order in which it was given.
  const Device& device = world().devices[static_cast<size_t>(context->device)];
  if (stream == &device.default_stream) {
    for (Stream* other : streams_of(context))
      if (other != stream && other->is_blocking) (void)drain(*other);
  } else if (stream->is_blocking) {
    (void)drain(world().devices[static_cast<size_t>(context->device)].default_stream);
  }
  const std::lock_guard lock(stream->mutex);
  stream->queue.push_back(std::move(work));
  return world().is_lazy ? kSuccess : drain(*stream);
}

// --- memory -----------------------------------------------------------------------------------------------------------

static size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
static size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Poisoned memory that ends, but for the alignment, at a page that cannot be read.
Result allocate(int device, size_t bytes, Address& address) {
  const size_t page = page_bytes(), inner = rounded_up(bytes, page), mapped = inner + 2 * page;
  void* memory = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  std::byte* base = static_cast<std::byte*>(memory);
  if (mprotect(base + page, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(memory, mapped);
    return kOutOfMemory;
  }
  std::memset(base + page, kPoison, inner);
  std::byte* begin = base + page + inner - rounded_up(bytes, kAlignment);
  address = reinterpret_cast<Address>(begin);
  const Lock lock(world().mutex);
  world().allocations[address] = {bytes, base, mapped, device};
  return kSuccess;
}

// Whether what lies around an allocation within its pages is as it was.
static bool is_intact(Address address, const Allocation& allocation) {
  const std::byte* begin = reinterpret_cast<const std::byte*>(address);
  const std::byte* inner = allocation.base + page_bytes();
  const std::byte* end = allocation.base + allocation.mapped - page_bytes();
  const auto is_poison = [](std::byte b) { return b == std::byte{kPoison}; };
  const std::byte* before = std::max(inner, begin - kAlignment);
  return std::all_of(before, begin, is_poison) && std::all_of(begin + allocation.bytes, end, is_poison);
}

Result release(Context* context, Address address, bool is_host) {
  Allocation allocation;
  {
    const Lock lock(world().mutex);
    const auto found = world().allocations.find(address);
    if (found == world().allocations.end() || (found->second.device < 0) != is_host) return kInvalidValue;
    allocation = found->second;
    world().allocations.erase(found);
    if (!is_host) world().devices[static_cast<size_t>(allocation.device)].used -= allocation.bytes;
  }
  const bool intact = is_intact(address, allocation);
  munmap(allocation.base, allocation.mapped);
  if (intact) return kSuccess;
  report_fault(context, "emulated device: something was written beside an allocation of " +
                            std::to_string(allocation.bytes) + " bytes");
  return kLaunchFailed;
}

// Whether [address, address + bytes) lies within one allocation, of a device or pinned: there is one address space.
static bool is_allocated(Address address, size_t bytes) {
  const Lock lock(world().mutex);
  auto after = world().allocations.upper_bound(address);
  if (after == world().allocations.begin()) return false;
  const auto& [begin, allocation] = *--after;
  return address - begin <= allocation.bytes && bytes <= allocation.bytes - (address - begin);
}

Result copy(Stream* stream, void* to, const void* from, size_t bytes, bool to_device, bool from_device, bool waits) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (bytes == 0) return kSuccess;
  if (to_device && !is_allocated(reinterpret_cast<Address>(to), bytes)) return kInvalidValue;
  if (from_device && !is_allocated(reinterpret_cast<Address>(from), bytes)) return kInvalidValue;
  if (to == nullptr || from == nullptr) return kInvalidValue;
  if (waits)
    if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  const Result result = submit(context, stream, [=] {
    const bool is_there = (!to_device || is_allocated(reinterpret_cast<Address>(to), bytes)) &&
                          (!from_device || is_allocated(reinterpret_cast<Address>(from), bytes));
    if (!is_there) {
      report_fault(context, "emulated device: a copy of memory that was freed");
      return kLaunchFailed;
    }
    if (context->fault == kSuccess) std::memmove(to, from, bytes);
    return context->fault;
  });
  if (result != kSuccess || !waits) return result;
  Stream* found = nullptr;
  (void)find_stream(context, stream, found);
  const Result done = drain(*found);
  return done == kSuccess ? context->fault : done;
}

Result fill(Stream* stream, Address to, size_t bytes, std::function<void()> work) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (bytes == 0) return kSuccess;
  if (!is_allocated(to, bytes)) return kInvalidValue;
  return submit(context, stream, [=] {
    if (!is_allocated(to, bytes)) {
      report_fault(context, "emulated device: memory is filled that was freed");
      return kLaunchFailed;
    }
    if (context->fault == kSuccess) work();
    return context->fault;
  });
}

// --- modules ----------------------------------------------------------------------------------------------------------

// An image is "emulated unit\n" and the path of the shared object, ended by a line end (build.py).
constexpr std::string_view kImageBegin = "emulated unit\n";

static Result load_unit(const char* image, const Unit*& unit, std::string& why) {
  if (image == nullptr || std::strncmp(image, kImageBegin.data(), kImageBegin.size()) != 0) {
    why = "not a unit of the emulated device";
    return kNoBinary;
  }
  const char* begin = image + kImageBegin.size();
  const std::string path(begin, std::strcspn(begin, "\n"));
  const Lock lock(world().mutex);
  for (const auto& loaded : world().units)
    if (loaded->path == path) return unit = loaded->unit, kSuccess;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    why = text != nullptr ? text : path;
    return kInvalidImage;
  }
  const auto emulated_unit = reinterpret_cast<const Unit* (*)()>(dlsym(library, "emulated_unit"));
  if (emulated_unit == nullptr) {
    why = path + ": no emulated unit";
    return kInvalidImage;
  }
  unit = emulated_unit();
  world().units.push_back(std::make_unique<LoadedUnit>(LoadedUnit{path, unit}));
  return kSuccess;
}

Result load_module(Module** module, const void* image, std::string& why) {
  Context* context = nullptr;
  if (const Result result = enter(context); result != kSuccess) return result;
  if (const Result result = forbid_while_recording(); result != kSuccess) return result;
  const Unit* unit = nullptr;
  if (const Result result = load_unit(static_cast<const char*>(image), unit, why); result != kSuccess) return result;
  auto made = std::make_unique<Module>();
  made->context = context, made->unit = unit;
  const Lock lock(world().mutex);
  world().modules.insert(made.get());
  *module = made.release();
  return kSuccess;
}

Result check_launch(const Function& function, Index grid, Index block, unsigned shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) return kInvalidValue;
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return kInvalidValue;
  if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > kMostThreads) return kInvalidValue;
  if (function.kernel->most_threads != 0 && threads > function.kernel->most_threads) return kInvalidValue;
  return shared_bytes > function.most_dynamic_shared ? kInvalidValue : kSuccess;
}

std::string describe_address(const void* pointer) {
  const Address address = reinterpret_cast<Address>(pointer);
  const Lock lock(world().mutex);
  auto after = world().allocations.upper_bound(address);
  if (after != world().allocations.end() && after->first - address <= page_bytes())
    return std::to_string(after->first - address) + " bytes before an allocation of " +
           std::to_string(after->second.bytes) + " bytes";
  if (after == world().allocations.begin()) return "outside of all allocations";
  const auto& [begin, allocation] = *--after;
  const Address end = begin + allocation.bytes;
  if (address < end + 16 * page_bytes())
    return std::to_string(address - end) + " bytes after the end of an allocation of " +
           std::to_string(allocation.bytes) + " bytes";
  return "outside of all allocations, or of memory that was freed";
}

}  // namespace emulated_cuda
