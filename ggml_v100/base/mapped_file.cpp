// POSIX implementation of MappedFile.
#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace v100 {

namespace {

[[noreturn]] void fail(const std::string& path, const char* action, int error_number) {
  throw Error(path + ": cannot " + action + ": " + std::generic_category().message(error_number));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(const std::string& path) {
    // O_NONBLOCK: opening a FIFO must not wait for a writer; regular files ignore it.
    do value_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (value_ < 0 && errno == EINTR);
    if (value_ < 0) fail(path, "open", errno);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { ::close(value_); }
  int value() const noexcept { return value_; }

 private:
  int value_;
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const FileDescriptor file(path);
  struct stat status{};
  if (::fstat(file.value(), &status) != 0) fail(path, "inspect", errno);
  if (S_ISDIR(status.st_mode)) throw Error(path + ": is a directory, expected a file");
  if (!S_ISREG(status.st_mode)) throw Error(path + ": is not a regular file");
  if (static_cast<uint64_t>(status.st_size) > std::numeric_limits<size_t>::max())
    throw Error(path + ": " + std::to_string(status.st_size) + " bytes do not fit into the address space");
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses a length of 0
  void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.value(), 0);
  if (mapping == MAP_FAILED) fail(path, "map", errno);
  data_ = static_cast<const std::byte*>(mapping);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(size_t offset, size_t n_bytes) const noexcept {
  const long system_page = ::sysconf(_SC_PAGESIZE);
  if (system_page <= 0 || offset >= size_) return;
  const size_t page = static_cast<size_t>(system_page);
  const size_t end = offset + std::min(n_bytes, size_ - offset);
  // Inner pages only: the border pages may hold a neighbour that is still being read. The file's last page has none.
  const size_t first_page = (offset + page - 1) / page;
  const size_t end_page = end == size_ ? (end + page - 1) / page : end / page;
  if (first_page >= end_page) return;
  // Advice only: when the system refuses it, the pages simply stay.
  (void)::madvise(const_cast<std::byte*>(data_) + first_page * page, (end_page - first_page) * page, MADV_DONTNEED);
}

namespace {

// Advice for all pages that hold some of the bytes. When the system refuses it, reading is only slower.
void advise(std::span<const std::byte> bytes, int advice) noexcept {
  const long system_page = ::sysconf(_SC_PAGESIZE);
  if (system_page <= 0 || bytes.empty()) return;
  const auto page = static_cast<uintptr_t>(system_page);
  const auto first = reinterpret_cast<uintptr_t>(bytes.data()), begin = first / page * page;
  (void)::madvise(reinterpret_cast<void*>(begin), first + bytes.size() - begin, advice);
}

}  // namespace

void will_read_at_random(std::span<const std::byte> bytes) noexcept { advise(bytes, MADV_RANDOM); }

void will_read(std::span<const std::byte> bytes) noexcept { advise(bytes, MADV_WILLNEED); }

}  // namespace v100
