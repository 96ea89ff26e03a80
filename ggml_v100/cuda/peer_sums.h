// Sums over ranks in the memory of their devices, where these reach each other's: launches like any other, which can be
// recorded. Without that, ranks meet in host memory (parallel/collective.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/kernels/params.h"
#include "cuda/launches.h"
#include "cuda/memory.h"
#include "cuda/recorder.h"
#include "parallel/collective.h"
#include "tensor/tensor.h"

namespace v100::cuda {

class PeerSums {
 public:
  PeerSums(std::shared_ptr<const Launches> launches, RankSeat seat);

  // Whether all ranks have CUDA devices that reach each other. A meeting of all ranks the first time, and after a failure;
  // nothing that was written down may be waiting.
  bool is_ready(const Recorder& recorder);
  // Whether is_ready() would have to meet.
  bool must_meet() const;
  // x becomes the sum, in place. Its size is a multiple of 4.
  void sum(Recorder& recorder, Tensor x);
  // After a wait for the stream: throws DeviceError if others did not come to a sum.
  void check() const;

 private:
  struct Signals {  // in pinned memory, which devices reach
    std::atomic<uint32_t> stop{0}, late{0};
  };
  void prepare(const Stream& stream);

  std::shared_ptr<const Launches> launches_;
  RankSeat seat_;
  bool is_possible_ = false;  // all ranks have CUDA devices
  bool is_prepared_ = false, reaches_all_ = false;
  int64_t failures_ = 0;  // of the group when it was prepared
  std::vector<std::unique_ptr<const Device>> peers_;
  DeviceMemory buffer_;
  std::vector<CUdeviceptr> buffers_;  // of all ranks
  std::shared_ptr<Signals> signals_;
  int64_t turn_ = 0;
};

}  // namespace v100::cuda
