// The compiled kernels: for each unit of kernels/units.json a cubin for SM70 and PTX for newer cards (compile_kernels.py).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace v100::cuda {

class KernelArchive {
 public:
  // The archive that was linked in; nothing where the build found no compiler for SM70.
  static std::shared_ptr<const KernelArchive> embedded();
  // DIR/kernels.archive. Throws DeviceError for a missing or damaged file, or one made from other sources.
  static std::shared_ptr<const KernelArchive> from_directory(const std::string& directory);
  // That of the environment variable V100_KERNELS_DIR if it is set, else the embedded one.
  static std::shared_ptr<const KernelArchive> of_this_process();

  // "nvrtc 12.4"
  const std::string& compiler() const { return compiler_; }
  std::vector<std::string> units() const;
  bool has_unit(std::string_view name) const { return entries_.find(name) != entries_.end(); }

  struct Unit {
    std::vector<std::byte> cubin;
    std::vector<std::byte> ptx;  // ends with a zero byte
  };
  // Throws DeviceError for an unknown unit or damaged data.
  Unit unit(std::string_view name) const;

 private:
  struct Packed {
    std::span<const std::byte> bytes;
    size_t size = 0;  // unpacked
  };
  struct Entry {
    Packed cubin, ptx;
  };

  KernelArchive(std::span<const std::byte> data, const std::string& where);

  std::vector<std::byte> owned_;  // of a file
  std::string where_, compiler_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace v100::cuda
