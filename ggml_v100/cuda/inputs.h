// Small host data of a pass (page tables, positions, angles, indices): one region of device memory, brought there by one
// copy in front of the work that reads it.
//
// The same sequence of requests gets the same addresses in every pass, so that recorded work finds new contents in place.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "cuda/memory.h"
#include "cuda/stream.h"

namespace v100::cuda {

class Inputs {
 public:
  Inputs(const Device& device, size_t bytes);

  struct Place {
    std::byte* host;  // to be filled before send()
    CUdeviceptr device;
  };
  // Aligned to 256 bytes, until restart(); nothing when there is no room left.
  std::optional<Place> take(size_t bytes);
  // Puts the copy of what was taken since the last send() into the stream.
  void send(const Stream& stream);
  // Gives all places away again. Everything that reads them is in the stream.
  void restart();

 private:
  // Two, so that one is filled while the other is still being copied.
  struct Mirror {
    PinnedMemory memory;
    Event copied;
    bool is_copied = true;
  };

  DeviceMemory region_;
  std::array<Mirror, 2> mirrors_;
  size_t turn_ = 0;
  size_t taken_ = 0, sent_ = 0;
};

}  // namespace v100::cuda
