#include "cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace v100::cuda {

Staging::Staging(const Device& device, size_t piece_bytes, size_t pieces)
    : device_(device), piece_bytes_(piece_bytes), n_pieces_(pieces) {}

Staging::Piece& Staging::next_piece() {
  if (pieces_.size() < n_pieces_) {
    pieces_.push_back(std::unique_ptr<Piece>(new Piece{PinnedMemory(device_, piece_bytes_), Event(device_)}));
    return *pieces_.back();
  }
  Piece& piece = *pieces_[turn_];
  turn_ = (turn_ + 1) % n_pieces_;
  if (piece.is_used) piece.used.synchronize();
  piece.is_used = false;
  return piece;
}

void Staging::upload(const Stream& stream, CUdeviceptr to, const void* from, size_t bytes) {
  upload(stream, to, bytes, 1, [from](std::byte* piece, size_t first, size_t count) {
    std::memcpy(piece, static_cast<const std::byte*>(from) + first, count);
  });
}

void Staging::upload(const Stream& stream, CUdeviceptr to, size_t bytes, size_t unit, const Fill& fill) {
  if (unit > piece_bytes_)
    throw InvalidArgument(std::to_string(unit) + " bytes at once do not pass through pieces of " +
                          std::to_string(piece_bytes_));
  const size_t most = piece_bytes_ / unit * unit;
  for (size_t first = 0; first < bytes; first += most) {
    const size_t count = std::min(most, bytes - first);
    Piece& piece = next_piece();
    fill(piece.memory.data(), first, count);
    stream.copy_to_device(to + first, piece.memory.data(), count);
    piece.used.record(stream);
    piece.is_used = true;
  }
}

void Staging::download(const Stream& stream, void* to, CUdeviceptr from, size_t bytes) {
  struct Part {
    Piece* piece;
    size_t first, count;
  };
  std::vector<Part> parts;  // under way
  for (size_t first = 0; first < bytes;) {
    parts.clear();
    for (size_t i = 0; i < n_pieces_ && first < bytes; ++i) {
      const size_t count = std::min(piece_bytes_, bytes - first);
      Piece& piece = next_piece();
      stream.copy_to_host(piece.memory.data(), from + first, count);
      parts.push_back({&piece, first, count});
      first += count;
    }
    stream.synchronize();
    for (const Part& part : parts)
      std::memcpy(static_cast<std::byte*>(to) + part.first, part.piece->memory.data(), part.count);
  }
}

}  // namespace v100::cuda
