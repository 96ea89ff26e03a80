#include "cuda/graph.h"

#include <algorithm>

namespace v100::cuda {

namespace {
constexpr int kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other ranks' threads go on allocating
}

std::unique_ptr<Graph> Graph::capture(const Stream& stream, const std::function<void()>& work) {
  const Device& device = stream.device();
  const DriverApi& api = device.api();
  device.check(api.cuStreamBeginCapture(stream.handle(), kThreadLocal), "beginning to record a graph");
  CUgraph recorded = nullptr;
  try {
    work();
  } catch (...) {
    (void)api.cuStreamEndCapture(stream.handle(), &recorded);
    if (recorded != nullptr) (void)api.cuGraphDestroy(recorded);
    throw;
  }
  device.check(api.cuStreamEndCapture(stream.handle(), &recorded), "recording a graph");
  std::unique_ptr<Graph> graph(new Graph(device));
  CUresult result = api.cuGraphGetNodes(recorded, nullptr, &graph->nodes_);
  if (result == kCudaSuccess) result = api.cuGraphInstantiate(&graph->exec_, recorded, 0);
  (void)api.cuGraphDestroy(recorded);
  device.check(result, "preparing a graph");
  return graph;
}

Graph::~Graph() {
  const Device::Guard guard(device_);
  if (exec_ != nullptr) (void)device_.api().cuGraphExecDestroy(exec_);
}

void Graph::launch(const Stream& stream) const {
  device_.check(device_.api().cuGraphLaunch(exec_, stream.handle()), "replaying a graph");
}

const Graph* GraphCache::find(const GraphKey& key) {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
  if (found == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found);
  return entries_.front().graph.get();
}

const Graph& GraphCache::find(const GraphKey& key, const Stream& stream, const std::function<void()>& work) {
  if (const Graph* graph = find(key)) return *graph;
  std::unique_ptr<Graph> graph = Graph::capture(stream, work);
  while (!entries_.empty() && entries_.size() >= capacity_) entries_.pop_back();
  entries_.push_front({key, std::move(graph)});
  return *entries_.front().graph;
}

}  // namespace v100::cuda
