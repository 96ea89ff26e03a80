// Typed look-up of metadata keys, with overrides (`--override-kv`). Accepts any integer type whose value fits (a superset
// of the usual strictness); a wrong kind or a value out of range is a ModelError that names the key.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gguf/gguf.h"

namespace v100 {

using MetadataOverride = std::variant<int64_t, double, bool, std::string>;
using MetadataOverrides = std::map<std::string, MetadataOverride, std::less<>>;

class Metadata {
 public:
  Metadata(std::shared_ptr<const GgufFile> file, MetadataOverrides overrides);

  bool has(std::string_view key) const;
  bool is_array(std::string_view key) const;
  std::optional<int64_t> find_int(std::string_view key) const;   // any integer type
  std::optional<double> find_float(std::string_view key) const;  // f32 or f64
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::string> find_string(std::string_view key) const;
  std::optional<uint64_t> find_array_size(std::string_view key) const;
  // One scalar repeated n times, or the first n of an array of at least n; nullopt when the key is absent.
  std::optional<std::vector<int64_t>> find_ints(std::string_view key, int32_t n) const;
  // Throw ModelError naming the key when it is missing.
  int64_t require_int(std::string_view key) const;
  double require_float(std::string_view key) const;
  std::string require_string(std::string_view key) const;

 private:
  std::shared_ptr<const GgufFile> file_;
  MetadataOverrides overrides_;
};

}  // namespace v100
