// The work of a stream, written down first and started together. A list that was there before is replayed as a graph.
//
// Operations only write down what they launch; it starts when a result is waited for. Two equal lists do the same work
// at the same addresses, so a list that comes again costs one launch, and no key of what a pass depends on is needed: the
// list itself is compared. What changes from pass to pass (positions, page tables) lies in device memory (inputs.h).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "cuda/graph.h"
#include "cuda/module.h"

namespace v100::cuda {

class Recorder {
 public:
  explicit Recorder(const Device& device);

  const Stream& stream() const { return stream_; }
  bool is_empty() const { return program_.is_empty(); }

  template <class Params>
  void launch(const Kernel& kernel, Grid grid, uint32_t threads, const Params& params, uint32_t shared_bytes = 0) {
    static_assert(alignof(Params) <= kAlignment && sizeof(Params) % alignof(uint32_t) == 0);
    write_launch(kernel, grid, threads, &params, sizeof params, shared_bytes);
  }
  // On the device.
  void copy(CUdeviceptr to, CUdeviceptr from, size_t bytes);
  void fill(CUdeviceptr to, unsigned char value, size_t bytes);

  // A place in the list. It is none any more when the list was started or something of it was taken back.
  struct Mark {
    uint64_t list;
    size_t bytes;
    int32_t steps;
    bool operator==(const Mark&) const = default;
  };
  Mark mark() const { return {list_, program_.bytes().size(), steps_}; }
  // Takes back what was written behind a mark.
  void take_back(const Mark& mark);

  void drop() { program_ = {}, steps_ = 0, ++list_; }
  // Starts what was written down, in order; before_start is called when all is ready for that. Throws DeviceError; the list is
  // empty afterwards in any case.
  void run(const std::function<void()>& before_start = {});

 private:
  static constexpr size_t kAlignment = 8;
  enum class Kind : uint32_t { launch, copy, fill };
  struct Step {  // followed by the parameters of a launch
    Kind kind;
    uint32_t parameter_bytes;
    const Kernel* kernel;  // of a launch
    Grid grid;
    uint32_t threads, shared_bytes;
    unsigned value;  // of a fill
    CUdeviceptr to, from;
    size_t bytes;
  };

  void write_launch(const Kernel& kernel, Grid grid, uint32_t threads, const void* params, size_t bytes,
                    uint32_t shared_bytes);
  void write(Step step, const void* params);
  static void play(const std::string& program, const Stream& stream);
  bool comes_again(const std::string& program);

  Stream stream_;
  GraphKey program_;
  int32_t steps_ = 0;
  uint64_t list_ = 0;  // counts what ends marks
  GraphCache graphs_;
  std::deque<size_t> seen_;  // hashes of lists that were run as they are
};

}  // namespace v100::cuda
