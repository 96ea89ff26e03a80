// Host memory of any kind to the device and back, through a ring of pinned pieces.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/memory.h"
#include "cuda/stream.h"

namespace v100::cuda {

class Staging {
 public:
  // Pinned when first used.
  Staging(const Device& device, size_t piece_bytes, size_t pieces);

  size_t piece_bytes() const { return piece_bytes_; }
  // Copies in the stream's order; `from` may change when this returns.
  void upload(const Stream& stream, CUdeviceptr to, const void* from, size_t bytes);
  // The same with bytes that are made in place: fill(piece, first, count) writes those from `first` on, at most
  // piece_bytes() at a time and whole multiples of `unit` but for the last.
  using Fill = std::function<void(std::byte* piece, size_t first, size_t count)>;
  void upload(const Stream& stream, CUdeviceptr to, size_t bytes, size_t unit, const Fill& fill);
  // Waits for the stream's work so far.
  void download(const Stream& stream, void* to, CUdeviceptr from, size_t bytes);

 private:
  struct Piece {
    PinnedMemory memory;
    Event used;
    bool is_used = false;  // by a copy that may be under way
  };
  Piece& next_piece();

  const Device& device_;
  size_t piece_bytes_, n_pieces_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  size_t turn_ = 0;
};

}  // namespace v100::cuda
