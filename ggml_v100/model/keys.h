// Typed, range-checked look-up of an architecture's own metadata keys, `<architecture>.*`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/metadata.h"

namespace v100 {

// All throw ModelError naming the key and what was found.
class Keys {
 public:
  explicit Keys(const Metadata& metadata) : Keys(metadata, metadata.require_string("general.architecture")) {}

  // "qwen2.rope.freq_base" for "rope.freq_base".
  std::string full(const std::string& name) const { return prefix_ + name; }
  bool has(const std::string& name) const { return metadata_.has(full(name)); }

  bool is_array(const std::string& name) const { return metadata_.is_array(full(name)); }

  int32_t required(const std::string& name, int64_t low, int64_t high) const;
  int32_t optional(const std::string& name, int64_t missing, int64_t low, int64_t high) const;
  // One scalar for all layers, or an array of at least `layers` elements.
  std::vector<int32_t> per_layer(const std::string& name, int32_t layers, const std::vector<int32_t>& missing,
                                 int64_t low, int64_t high) const;
  // Finite.
  double real(const std::string& name, double missing) const;
  double required_real(const std::string& name) const;

 private:
  Keys(const Metadata& metadata, const std::string& architecture) : metadata_(metadata), prefix_(architecture + ".") {}
  int32_t check(const std::string& name, int64_t value, int64_t low, int64_t high) const;

  const Metadata& metadata_;
  std::string prefix_;
};

}  // namespace v100
