#include "cuda/kernel_archive.h"

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/inflate.h"

#ifndef V100_KERNELS_KEY
#define V100_KERNELS_KEY ""  // not built by CMake: any kernels will do
#endif

namespace v100::cuda {

namespace {

constexpr std::string_view kMagic = "V100KRN1";

// Reads the archive front to back; every length is checked against what is left.
class Reader {
 public:
  Reader(std::span<const std::byte> data, const std::string& where) : data_(data), where_(where) {}

  std::span<const std::byte> bytes(size_t count) {
    if (data_.size() - at_ < count) throw DeviceError(where_ + ": the kernel archive ends early");
    at_ += count;
    return data_.subspan(at_ - count, count);
  }
  uint32_t number() {
    uint32_t value = 0;
    const std::span<const std::byte> b = bytes(4);
    for (size_t i = 0; i < 4; ++i) value |= static_cast<uint32_t>(b[i]) << 8 * i;
    return value;
  }
  std::string text(size_t length) {
    const std::span<const std::byte> b = bytes(length);
    return {reinterpret_cast<const char*>(b.data()), b.size()};
  }
  std::string text() { return text(number()); }

 private:
  std::span<const std::byte> data_;
  const std::string& where_;
  size_t at_ = 0;
};

}  // namespace

#ifdef V100_KERNELS_EMBEDDED
// Defined by the assembler in kernel_archive_data.cpp, which the build writes.
extern "C" const std::byte v100_kernel_archive_begin[];
extern "C" const std::byte v100_kernel_archive_end[];
#endif

KernelArchive::KernelArchive(std::span<const std::byte> data, const std::string& where) : where_(where) {
  Reader in(data, where_);
  if (in.text(kMagic.size()) != kMagic) throw DeviceError(where_ + ": not a kernel archive");
  const std::string key = in.text();
  const std::string expected = V100_KERNELS_KEY;
  if (!expected.empty() && key != expected)
    throw DeviceError(where_ + ": the kernels were compiled from other sources (key " + key + ", this program needs " +
                      expected + ")");
  compiler_ = in.text();
  for (uint32_t left = in.number(); left > 0; --left) {
    std::string name = in.text();
    const auto packed = [&] {
      Packed part;
      part.size = in.number();
      part.bytes = in.bytes(in.number());
      return part;
    };
    Entry entry;
    entry.cubin = packed();
    entry.ptx = packed();
    entries_.emplace(std::move(name), entry);
  }
}

std::shared_ptr<const KernelArchive> KernelArchive::embedded() {
#ifdef V100_KERNELS_EMBEDDED
  const auto size = static_cast<size_t>(v100_kernel_archive_end - v100_kernel_archive_begin);
  return std::shared_ptr<const KernelArchive>(
      new KernelArchive({v100_kernel_archive_begin, size}, "the kernels of this program"));
#else
  return nullptr;
#endif
}

std::shared_ptr<const KernelArchive> KernelArchive::from_directory(const std::string& directory) {
  const std::string path = directory + "/kernels.archive";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw DeviceError(path + ": cannot be opened; compile_kernels.py --out writes it");
  std::vector<char> chars{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<std::byte> data(chars.size());
  for (size_t i = 0; i < chars.size(); ++i) data[i] = static_cast<std::byte>(chars[i]);
  std::shared_ptr<KernelArchive> archive(new KernelArchive(data, path));
  archive->owned_ = std::move(data);  // keeps its address, so the spans stay good
  return archive;
}

std::shared_ptr<const KernelArchive> KernelArchive::of_this_process() {
  const char* directory = std::getenv("V100_KERNELS_DIR");
  return directory != nullptr && *directory != '\0' ? from_directory(directory) : embedded();
}

std::vector<std::string> KernelArchive::units() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

KernelArchive::Unit KernelArchive::unit(std::string_view name) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) throw DeviceError(where_ + ": no kernel unit '" + std::string(name) + "'");
  try {
    Unit unit{inflate(entry->second.cubin.bytes, entry->second.cubin.size),
              inflate(entry->second.ptx.bytes, entry->second.ptx.size)};
    unit.ptx.push_back(std::byte{0});
    return unit;
  } catch (const InvalidArgument& error) {
    throw DeviceError(where_ + ": kernel unit '" + std::string(name) + "' is damaged (" + error.what() + ")");
  }
}

}  // namespace v100::cuda
