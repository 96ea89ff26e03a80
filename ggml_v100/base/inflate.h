// Decompression of raw DEFLATE data (RFC 1951).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace v100 {

// The `size` bytes that `packed` stands for. Throws InvalidArgument for data that is damaged or of another size.
std::vector<std::byte> inflate(std::span<const std::byte> packed, size_t size);

}  // namespace v100
