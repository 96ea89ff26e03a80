#include "cuda/recorder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace v100::cuda {

namespace {

constexpr size_t kMostGraphs = 32;
constexpr size_t kMostSeen = 256;
constexpr int32_t kLeastSteps = 8;  // a shorter list is started faster step by step

}  // namespace

Recorder::Recorder(const Device& device) : stream_(device), graphs_(kMostGraphs) {}

void Recorder::write(Step step, const void* params) {
  program_.append(&step, sizeof step);
  if (step.parameter_bytes > 0) {
    static constexpr std::byte kRest[kAlignment]{};
    program_.append(params, step.parameter_bytes);
    program_.append(kRest, (kAlignment - step.parameter_bytes % kAlignment) % kAlignment);
  }
  ++steps_;
}

void Recorder::write_launch(const Kernel& kernel, Grid grid, uint32_t threads, const void* params, size_t bytes,
                            uint32_t shared_bytes) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // no rows, no heads: nothing to do
  write({Kind::launch, static_cast<uint32_t>(bytes), &kernel, grid, threads, shared_bytes, 0, 0, 0, 0}, params);
}

void Recorder::copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  if (bytes > 0) write({Kind::copy, 0, nullptr, {}, 0, 0, 0, to, from, bytes}, nullptr);
}

void Recorder::fill(CUdeviceptr to, unsigned char value, size_t bytes) {
  if (bytes > 0) write({Kind::fill, 0, nullptr, {}, 0, 0, value, to, 0, bytes}, nullptr);
}

void Recorder::take_back(const Mark& mark) {
  if (mark.list != list_) throw Error("a mark of another list was taken back");
  program_.cut(mark.bytes);
  steps_ = mark.steps;
  ++list_;
}

void Recorder::play(const std::string& program, const Stream& stream) {
  for (size_t at = 0; at < program.size();) {
    Step step;
    std::memcpy(&step, program.data() + at, sizeof step);
    at += sizeof step;
    switch (step.kind) {
      case Kind::launch:
        step.kernel->launch_packed(stream, step.grid, step.threads, program.data() + at, step.shared_bytes);
        at += (step.parameter_bytes + kAlignment - 1) / kAlignment * kAlignment;
        break;
      case Kind::copy:
        stream.copy(step.to, step.from, step.bytes);
        break;
      case Kind::fill:
        stream.fill(step.to, static_cast<unsigned char>(step.value), step.bytes);
        break;
    }
  }
}

bool Recorder::comes_again(const std::string& program) {
  const size_t hash = std::hash<std::string>()(program);  // of another list with the same hash: recorded early, no harm
  if (std::find(seen_.begin(), seen_.end(), hash) != seen_.end()) return true;
  if (seen_.size() == kMostSeen) seen_.pop_front();
  seen_.push_back(hash);
  return false;
}

void Recorder::run(const std::function<void()>& before_start) {
  if (program_.is_empty()) return;
  const GraphKey program = std::exchange(program_, {});
  const int32_t steps = std::exchange(steps_, 0);
  ++list_;
  const Device::Guard guard(stream_.device());
  const auto start = [&] { play(program.bytes(), stream_); };
  const Graph* graph = steps < kLeastSteps ? nullptr : graphs_.find(program);
  // Recording takes longer than running, and many a prompt has a shape that does not come again.
  if (graph == nullptr && steps >= kLeastSteps && comes_again(program.bytes()))
    graph = &graphs_.find(program, stream_, start);
  if (before_start) before_start();
  if (graph != nullptr)
    graph->launch(stream_);
  else
    start();
}

}  // namespace v100::cuda
