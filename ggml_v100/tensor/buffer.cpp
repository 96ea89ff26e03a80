// Buffers come straight from anonymous mappings: zeroed by the kernel on first touch, given back at once on release.
#include "tensor/buffer.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace v100 {

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes of host memory");
  data_ = static_cast<std::byte*>(memory);
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);  // advice only: small pages are correct too
#endif
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace v100
