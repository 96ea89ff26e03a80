// FNV-1a, 64 bits: names what bytes were seen. Finds differences, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace v100 {

class Fnv1a {
 public:
  void add(const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) hash_ = (hash_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
  }
  void add(std::string_view text) { add(text.data(), text.size()); }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace v100
