// Drives the CUDA driver layer over the library given first; the case is given second. Prints what came of it, or
// "DeviceError: ..." / "OutOfMemory: ..." with exit status 1.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/inflate.h"
#include "cuda/graph.h"
#include "cuda/memory.h"
#include "cuda/module.h"

using namespace v100;
using namespace v100::cuda;

namespace {

void list(const std::shared_ptr<const Driver>& driver) {
  std::printf("driver %s\n", driver->version_text().c_str());
  for (const DeviceInfo& info : list_devices(*driver)) {
    std::printf("%s %s %s sm%s %d SMs %zu MiB ecc=%d shared=%zu peers", info.device_name().c_str(), info.name.c_str(),
                info.pci_bus_id.c_str(), info.capability().c_str(), info.multiprocessors, info.total_bytes >> 20,
                info.has_ecc ? 1 : 0, info.max_shared_bytes);
    for (const int32_t peer : info.peers) std::printf(" %d", peer);
    std::printf("\n");
  }
}

void copies(const Device& device) {
  const Stream stream(device);
  const DeviceMemory memory(device, 64);
  PinnedMemory pinned(device, 64);
  std::memcpy(pinned.data(), "there and back", 15);
  stream.copy_to_device(memory.address(), pinned.data(), 15);
  std::vector<char> back(15);
  stream.copy_to_host(back.data(), memory.address(), back.size());
  stream.synchronize();
  std::printf("%s\n", back.data());
}

void launches(const Device& device, const std::string& archive) {
  struct Params {
    int first;
  };
  const Stream stream(device);
  const Module module(device, *KernelArchive::from_directory(archive), "unit");
  module.kernel("k", 96 << 10).launch(stream, {3, 2, 1}, 256, Params{7}, 1024);
  module.kernel("k").launch(stream, {0, 2, 1}, 256, Params{8});  // nothing to do
}

void graphs(const Device& device) {
  const Stream stream(device);
  GraphCache cache(2);
  int recorded = 0;
  const auto find = [&](int rows, int64_t address) {
    const Graph& graph = cache.find(GraphKey().add(rows).add(address), stream, [&] { ++recorded; });
    graph.launch(stream);
    return graph.nodes();
  };
  const size_t nodes = find(1, 100);
  find(1, 100);
  find(2, 100);
  find(1, 100);
  find(1, 200);  // pushes out (2, 100), which was used longest ago
  find(1, 100);
  std::printf("%zu nodes, %d recorded, %zu kept\n", nodes, recorded, cache.size());
  find(2, 100);
  std::printf("%d recorded\n", recorded);
  try {
    (void)Graph::capture(stream, [] { throw InvalidArgument("from inside"); });
  } catch (const InvalidArgument& error) {
    std::printf("passed on: %s\n", error.what());
  }
}

int run(const std::string& library, const std::string& what, const std::string& argument) {
  if (what == "archive") {
    const auto archive = KernelArchive::from_directory(argument);
    for (const std::string& name : archive->units()) {
      const KernelArchive::Unit unit = archive->unit(name);
      std::printf("%s %s %zu %zu %s\n", archive->compiler().c_str(), name.c_str(), unit.cubin.size(), unit.ptx.size(),
                  reinterpret_cast<const char*>(unit.ptx.data()));
    }
    return 0;
  }
  const std::shared_ptr<const Driver> driver = Driver::load(library);
  if (what == "list") return list(driver), 0;
  const Device device(driver, what == "ordinal" ? std::stoi(argument) : 0);
  if (what == "memory") {
    const DeviceMemory memory(device, std::stoull(argument));
    DeviceMemory moved;
    moved = DeviceMemory(device, 16);
    std::printf("%zu bytes\n", memory.bytes());
  }
  if (what == "copies") copies(device);
  if (what == "launches") launches(device, argument);
  if (what == "graphs") graphs(device);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argv[1], argv[2], argc > 3 ? argv[3] : "");
  } catch (const OutOfMemory& error) {
    std::printf("OutOfMemory: %s\n", error.what());
  } catch (const DeviceError& error) {
    std::printf("DeviceError: %s\n", error.what());
  }
  return 1;
}
