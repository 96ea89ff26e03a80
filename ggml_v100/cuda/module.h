// A loaded kernel unit and the launch of its kernels.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "cuda/kernel_archive.h"
#include "cuda/stream.h"

namespace v100::cuda {

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

class Kernel {
 public:
  // Parameters: the kernel's one struct of kernels/params.h, passed by value. A failed launch is reported under the
  // kernel's name; a fault while it runs, by the next wait.
  template <class Params>
  void launch(const Stream& stream, Grid grid, uint32_t threads, const Params& params,
              uint32_t shared_bytes = 0) const {
    launch_packed(stream, grid, threads, &params, shared_bytes);
  }
  // The same with the struct's bytes, aligned as it is.
  void launch_packed(const Stream& stream, Grid grid, uint32_t threads, const void* params,
                     uint32_t shared_bytes) const;
  const std::string& name() const { return name_; }

 private:
  friend class Module;
  std::string name_;
  CUfunction function_ = nullptr;
};

class Module {
 public:
  // The cubin on cards of compute capability 7, compiled PTX on newer ones. Throws DeviceError with the driver's words and
  // its compiler's log.
  Module(const Device& device, const KernelArchive& archive, std::string_view unit);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // shared_bytes: the most dynamic shared memory it is launched with. Throws DeviceError for an unknown kernel.
  Kernel kernel(const std::string& name, uint32_t shared_bytes = 0) const;

 private:
  const Device& device_;
  std::string unit_;
  CUmodule module_ = nullptr;
};

}  // namespace v100::cuda
