// Reads GGUF containers (v2, v3, single or split) from bounded, mapped memory. Every count is checked against the bytes
// that remain before it is trusted; every fault is a GgufError that names it. Tensor data stays in the mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "quants/types.h"

namespace v100 {

enum class GgufValueType : int32_t {
  U8 = 0,
  I8 = 1,
  U16 = 2,
  I16 = 3,
  U32 = 4,
  I32 = 5,
  F32 = 6,
  BOOL = 7,
  STRING = 8,
  ARRAY = 9,
  U64 = 10,
  I64 = 11,
  F64 = 12,
};

// Array of fixed-size elements: raw little-endian bytes, count * size of them, inside the mapping (maybe unaligned).
// Array of strings: views into the mapping.
struct GgufArray {
  GgufValueType element_type;
  uint64_t count;
  std::span<const std::byte> bytes;       // fixed-size element types
  std::vector<std::string_view> strings;  // STRING; any bytes, not necessarily UTF-8
};

using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray>;  // by widened kind

struct GgufKeyValue {
  std::string_view key;
  GgufValueType type;
  GgufValue value;
};

struct GgufTensor {
  std::string_view name;
  QuantType type;
  int32_t n_dims;
  int64_t ne[4];         // ggml order: ne[0] is contiguous; missing dims are 1
  int32_t shard;         // index of the file it lies in
  uint64_t file_offset;  // absolute, within that file
  uint64_t n_bytes;

  int64_t n_elements() const { return ne[0] * ne[1] * ne[2] * ne[3]; }
};

class GgufFile {
 public:
  // Opens path and, when split.count > 1, its siblings; with single_file only path, which may be any part. With
  // metadata_only the data section may be missing or short (G28). Throws GgufError.
  static std::shared_ptr<const GgufFile> open(const std::string& path, bool metadata_only = false,
                                              bool single_file = false);

  virtual ~GgufFile() = default;
  virtual int32_t version() const = 0;
  virtual uint64_t alignment() const = 0;
  virtual const std::string& path() const = 0;
  virtual const std::vector<GgufKeyValue>& metadata() const = 0;  // of shard 0, in file order
  virtual const std::vector<GgufTensor>& tensors() const = 0;     // of all shards, in file order
  virtual const GgufTensor* find_tensor(std::string_view name) const = 0;
  virtual const GgufKeyValue* find(std::string_view key) const = 0;
  virtual std::span<const std::byte> data(const GgufTensor& tensor) const = 0;
  // The pages of this tensor will not be read again soon (a packed copy exists); they may leave memory.
  virtual void release(const GgufTensor& tensor) const = 0;
};

}  // namespace v100
