// Parser of one GGUF file held in a byte range: header, metadata, tensor infos. Knows nothing of files or splits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"

namespace v100 {

struct GgufContainer {
  int32_t version;
  uint64_t alignment;                  // of the data section and of each tensor in it, bytes
  uint64_t data_start;                 // of the data section, bytes from the start of the file
  std::vector<GgufKeyValue> metadata;  // in file order
  std::vector<size_t> by_key;          // indices of `metadata`, sorted by key
  std::vector<GgufTensor> tensors;     // in file order
};

// Parses and validates `file`; the result holds views into it. `path` is for messages. Tensor data that lies outside
// the range is an error if `needs_data`. Throws GgufError. Work and memory are bounded by the size of `file`.
GgufContainer parse_container(std::span<const std::byte> file, std::string_view path, int32_t shard, bool needs_data);

// nullptr when absent.
const GgufKeyValue* find_key(const GgufContainer& container, std::string_view key);

// Indices of `tensors` sorted by name. Throws GgufError when two have the same name.
std::vector<size_t> index_by_name(const std::vector<GgufTensor>& tensors, std::string_view path);

// "u32", "string", ...; size in bytes of a fixed-size type, 0 for STRING and ARRAY.
std::string_view value_type_name(GgufValueType type);
size_t value_type_bytes(GgufValueType type);

}  // namespace v100
