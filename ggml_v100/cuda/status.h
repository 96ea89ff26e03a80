// What this program can do with CUDA on this machine, for start logs and device lists. Never throws for a machine without.
#pragma once

#include <string>
#include <vector>

#include "cuda/device.h"

namespace v100::cuda {

// The kernels of this program: their compiler, "built without CUDA kernels", or what is wrong with them.
std::string kernels_text();

struct Status {
  std::string kernels;  // kernels_text()
  std::string driver;   // "12.4", or one line on why there is none
  bool has_driver = false;
  struct Entry {
    DeviceInfo info;
    size_t free_bytes = 0;
    std::string problem;  // why it cannot be used; empty for none
  };
  std::vector<Entry> devices;
};

// Asking for free memory makes a context on each supported device: some hundred milliseconds.
Status status();

}  // namespace v100::cuda
