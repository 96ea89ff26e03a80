// A whole file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace v100 {

class MappedFile {
 public:
  // Throws Error (with the path and the system's reason) when path is no readable regular file. An empty file maps to
  // an empty span.
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // Valid as long as this object, also after a move. Reads fault (SIGBUS) if another process shortens the file
  // meanwhile.
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

  // The pages that lie wholly inside [offset, offset + n_bytes) may leave memory; the next read fetches them again. A
  // range outside the file is cut to it.
  void release(size_t offset, size_t n_bytes) const noexcept;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace v100
