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

// Advice about parts of mapped files; it reads nothing itself and changes no contents.
//
// Small pieces here and there are going to be read: a missing page is fetched without its neighbours.
void will_read_at_random(std::span<const std::byte> bytes) noexcept;
// These bytes are going to be read soon: fetching their pages begins now, beside the caller's work.
void will_read(std::span<const std::byte> bytes) noexcept;

}  // namespace v100
