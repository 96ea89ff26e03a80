// The CUDA backend: one device, its packed weights and the operations on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/ops.h"

namespace v100 {

// "CUDA0", "CUDA1", ... of the devices that the driver sees. Empty on a machine without a driver, or in a program without
// kernels.
std::vector<std::string> available_cuda_devices();
// Why there is none: one line. Empty where there are.
std::string no_cuda_devices_reason();
// The number of a device's name; nothing for other names.
std::optional<int32_t> cuda_ordinal(std::string_view device);

// Throws DeviceError, one line that says what is missing.
std::unique_ptr<Backend> create_cuda_backend(int32_t ordinal);

}  // namespace v100
