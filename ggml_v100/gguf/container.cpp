// Parser of one GGUF file. No count, length or offset is used before it is compared with the bytes that remain.
#include "gguf/container.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "gguf/message.h"

namespace v100 {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place: a little-endian machine is needed");

namespace {

constexpr size_t kHeaderBytes = 24;              // magic, version, two counts
constexpr size_t kSmallestKeyValueBytes = 14;    // key of one byte, type, one-byte value
constexpr size_t kSmallestTensorInfoBytes = 24;  // empty name, no dimensions
constexpr uint64_t kMaxStringBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxArrayCount = uint64_t{1} << 30;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = uint64_t{1} << 30;
constexpr size_t kMaxTensorNameBytes = 63;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kMaxU64 = std::numeric_limits<uint64_t>::max();

struct ValueTypeTraits {
  std::string_view name;
  size_t bytes;
};

constexpr ValueTypeTraits kValueTypes[] = {
    {"u8", 1},   {"i8", 1},     {"u16", 2},   {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4},
    {"bool", 1}, {"string", 0}, {"array", 0}, {"u64", 8}, {"i64", 8}, {"f64", 8},
};

class Parser {
 public:
  Parser(std::span<const std::byte> file, std::string_view path, int32_t shard, bool needs_data)
      : file_(file), path_(path), shard_(shard), needs_data_(needs_data) {}

  GgufContainer parse() {
    GgufContainer result;
    read_magic();
    result.version = read_version();
    const auto n_tensors = read<int64_t>("the number of tensors");
    const auto n_keys = read<int64_t>("the number of metadata keys");
    check_count("tensors", n_tensors, kSmallestTensorInfoBytes);
    check_count("metadata keys", n_keys, kSmallestKeyValueBytes);

    for (int64_t i = 0; i < n_keys; ++i) result.metadata.push_back(read_key_value(i, n_keys));
    context_.clear();
    result.by_key = index_by_key(result.metadata);
    result.alignment = alignment_of(result);

    for (int64_t i = 0; i < n_tensors; ++i) result.tensors.push_back(read_tensor_info(i, n_tensors));
    context_.clear();
    result.data_start = padded(position_, result.alignment);
    if (n_tensors > 0) {
      if (result.data_start > file_.size())
        fail("file of ", file_.size(), " bytes ends before its data section, which starts at ", result.data_start);
      place_tensors(result);
    }
    index_by_name(result.tensors, path_);
    if (needs_data_) check_data_is_present(result);
    return result;
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw GgufError(message(path_, ": ", context_, context_.empty() ? "" : ": ", parts...));
  }

  size_t remaining() const { return file_.size() - position_; }

  std::span<const std::byte> take(uint64_t n_bytes, std::string_view what) {
    if (n_bytes > remaining())
      fail("file ends inside ", what, ": ", n_bytes, " bytes at offset ", position_, ", but only ", remaining(),
           " remain");
    const auto bytes = file_.subspan(position_, static_cast<size_t>(n_bytes));
    position_ += bytes.size();
    return bytes;
  }

  template <class T>
  T read(std::string_view what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }

  std::string_view read_string(std::string_view what) {
    const auto n_bytes = read<uint64_t>(what);
    if (n_bytes > kMaxStringBytes) fail("length of ", what, " is ", n_bytes, " bytes, the limit is ", kMaxStringBytes);
    const auto bytes = take(n_bytes, what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  void read_magic() {
    if (file_.size() >= 4 && std::memcmp(file_.data(), "GGUF", 4) != 0) {
      std::string found(reinterpret_cast<const char*>(file_.data()), 4);
      for (char& c : found)
        if (c < 0x20 || c > 0x7E) c = '?';
      fail("not a GGUF file: it starts with '", found, "', expected 'GGUF'");
    }
    if (file_.size() < kHeaderBytes)
      fail("file of ", file_.size(), " bytes is too short for the GGUF header of ", kHeaderBytes, " bytes");
    position_ = 4;
  }

  int32_t read_version() {
    const auto version = read<uint32_t>("the version");
    if (version != 0 && (version & 0xFFFFu) == 0)
      fail("version reads as ", version,
           ": the file is in the other byte order (big-endian); a little-endian one is needed");
    if (version == 1) fail("GGUF version 1 is no longer supported; versions 2 and 3 are");
    if (version != 2 && version != 3) fail("GGUF version ", version, " is unknown; versions 2 and 3 are supported");
    return static_cast<int32_t>(version);
  }

  void check_count(std::string_view what, int64_t count, size_t smallest_bytes) const {
    if (count < 0) fail("number of ", what, " is negative: ", count);
    if (static_cast<uint64_t>(count) > (file_.size() - kHeaderBytes) / smallest_bytes)
      fail("header claims ", count, " ", what, ", but ", file_.size() - kHeaderBytes, " bytes follow, enough for ",
           (file_.size() - kHeaderBytes) / smallest_bytes, " at most");
  }

  GgufKeyValue read_key_value(int64_t index, int64_t n_keys) {
    context_ = message("metadata key ", index, " of ", n_keys);
    const std::string_view key = read_string("the key name");
    if (key.empty()) fail("key name is empty");
    context_ = message("metadata key ", quoted(key));
    if (key.find('\0') != std::string_view::npos) fail("key name contains a NUL byte");
    const GgufValueType type = read_value_type("value type");
    return {key, type, type == GgufValueType::ARRAY ? GgufValue(read_array()) : read_scalar(type)};
  }

  GgufValueType read_value_type(std::string_view what) {
    const auto id = read<int32_t>(what);
    if (id < 0 || static_cast<size_t>(id) >= std::size(kValueTypes)) fail(what, " ", id, " is unknown, expected 0..12");
    return static_cast<GgufValueType>(id);
  }

  GgufValue read_scalar(GgufValueType type) {
    constexpr std::string_view what = "the value";
    const auto natural = [](uint64_t v) { return GgufValue(std::in_place_type<uint64_t>, v); };
    const auto integer = [](int64_t v) { return GgufValue(std::in_place_type<int64_t>, v); };
    const auto real = [](double v) { return GgufValue(std::in_place_type<double>, v); };
    switch (type) {
      case GgufValueType::U8:
        return natural(read<uint8_t>(what));
      case GgufValueType::I8:
        return integer(read<int8_t>(what));
      case GgufValueType::U16:
        return natural(read<uint16_t>(what));
      case GgufValueType::I16:
        return integer(read<int16_t>(what));
      case GgufValueType::U32:
        return natural(read<uint32_t>(what));
      case GgufValueType::I32:
        return integer(read<int32_t>(what));
      case GgufValueType::F32:
        return real(static_cast<double>(read<float>(what)));
      case GgufValueType::BOOL:
        return GgufValue(std::in_place_type<bool>, read<uint8_t>(what) != 0);
      case GgufValueType::STRING:
        return GgufValue(std::in_place_type<std::string_view>, read_string(what));
      case GgufValueType::U64:
        return natural(read<uint64_t>(what));
      case GgufValueType::I64:
        return integer(read<int64_t>(what));
      case GgufValueType::F64:
        return real(read<double>(what));
      case GgufValueType::ARRAY:
        break;  // read_array
    }
    fail("value type ", static_cast<int32_t>(type), " is no scalar");
  }

  GgufArray read_array() {
    GgufArray array{read_value_type("array element type"), 0, {}, {}};
    if (array.element_type == GgufValueType::ARRAY) fail("arrays of arrays are not supported");
    array.count = read<uint64_t>("the array length");
    if (array.count > kMaxArrayCount) fail("array of ", array.count, " elements, the limit is ", kMaxArrayCount);
    if (array.element_type != GgufValueType::STRING) {
      array.bytes = take(array.count * value_type_bytes(array.element_type), "the array");
      return array;
    }
    if (array.count > remaining() / 8)  // each string has at least its length
      fail("array of ", array.count, " strings, but only ", remaining(), " bytes remain");
    array.strings.reserve(static_cast<size_t>(array.count));
    for (uint64_t i = 0; i < array.count; ++i) array.strings.push_back(read_string("an array string"));
    return array;
  }

  std::vector<size_t> index_by_key(const std::vector<GgufKeyValue>& metadata) const {
    std::vector<size_t> index(metadata.size());
    std::iota(index.begin(), index.end(), size_t{0});
    const auto key_of = [&](size_t i) { return metadata[i].key; };
    std::ranges::sort(index, {}, key_of);
    if (const auto twin = std::ranges::adjacent_find(index, {}, key_of); twin != index.end())
      fail("duplicate metadata key ", quoted(key_of(*twin)));
    return index;
  }

  uint64_t alignment_of(const GgufContainer& container) const {
    const GgufKeyValue* entry = find_key(container, "general.alignment");
    if (entry == nullptr) return kDefaultAlignment;
    if (entry->type != GgufValueType::U32)
      fail("general.alignment has type ", value_type_name(entry->type), ", expected u32");
    const uint64_t alignment = std::get<uint64_t>(entry->value);
    if (!std::has_single_bit(alignment) || alignment > kMaxAlignment)
      fail("general.alignment is ", alignment, ", expected a power of two, at most ", kMaxAlignment);
    return alignment;
  }

  // Everything but the tensor's place, which depends on its predecessors; file_offset is relative to the data section.
  GgufTensor read_tensor_info(int64_t index, int64_t n_tensors) {
    context_ = message("tensor ", index, " of ", n_tensors);
    GgufTensor tensor{};
    tensor.name = read_string("the tensor name");
    context_ = message("tensor ", quoted(tensor.name));
    if (tensor.name.size() > kMaxTensorNameBytes)
      fail("name of ", tensor.name.size(), " bytes is too long, the limit is ", kMaxTensorNameBytes);
    const auto n_dims = read<uint32_t>("the number of dimensions");
    if (n_dims > kMaxDims) fail("has ", n_dims, " dimensions, the limit is ", kMaxDims);
    tensor.n_dims = static_cast<int32_t>(n_dims);
    for (uint32_t i = 0; i < kMaxDims; ++i) tensor.ne[i] = i < n_dims ? read<int64_t>("the dimensions") : 1;
    const auto type_id = read<int32_t>("the tensor type");
    tensor.file_offset = read<uint64_t>("the data offset");
    tensor.shard = shard_;
    check_dimensions(tensor);
    const QuantTraits& type = checked_type(type_id);
    tensor.type = type.type;
    tensor.n_bytes = checked_bytes(tensor, type);
    return tensor;
  }

  static std::string shape_text(const GgufTensor& tensor) {
    std::string text = "[";
    for (int32_t i = 0; i < tensor.n_dims; ++i) text += message(i == 0 ? "" : ", ", tensor.ne[i]);
    return text + "]";
  }

  // A zero counts as one in the product, so that no partial product of the dimensions overflows either.
  void check_dimensions(const GgufTensor& tensor) const {
    int64_t product = 1;
    for (const int64_t dim : tensor.ne) {
      if (dim < 0) fail("shape ", shape_text(tensor), " has a negative dimension");
      const int64_t factor = std::max<int64_t>(dim, 1);
      if (product > std::numeric_limits<int64_t>::max() / factor)
        fail("shape ", shape_text(tensor), " has more elements than a 64-bit integer can count");
      product *= factor;
    }
  }

  const QuantTraits& checked_type(int32_t id) const {
    if (const QuantTraits* found = find_traits(id)) return *found;
    if ((id >= 31 && id <= 33) || (id >= 36 && id <= 38))
      fail("type id ", id, " was removed from the format: repacked files are not supported, use ",
           id <= 33 ? "Q4_0" : "IQ4_NL", " instead");
    if (id == 4 || id == 5) fail("type id ", id, " was removed from the format");
    fail("type id ", id, " is unknown, expected 0..", kQuantTypeCount - 1);
  }

  uint64_t checked_bytes(const GgufTensor& tensor, const QuantTraits& type) const {
    if (tensor.ne[0] % type.block_values != 0)
      fail("rows of ", tensor.ne[0], " values, expected a multiple of the ", type.block_values,
           " values in a block of type ", type.name);
    const auto n_blocks = static_cast<uint64_t>(tensor.n_elements() / type.block_values);
    const auto block_bytes = static_cast<uint64_t>(type.block_bytes);
    if (n_blocks > std::numeric_limits<size_t>::max() / block_bytes)
      fail("shape ", shape_text(tensor), " of type ", type.name, " needs more bytes than can be addressed");
    return n_blocks * block_bytes;
  }

  static uint64_t padded(uint64_t n_bytes, uint64_t alignment) {
    return (n_bytes + alignment - 1) / alignment * alignment;
  }

  // Tensors follow one another without gaps, each padded to the alignment.
  void place_tensors(GgufContainer& container) {
    uint64_t expected = 0;
    const uint64_t limit = kMaxU64 - container.data_start - (container.alignment - 1);  // neither sum below can wrap
    for (GgufTensor& tensor : container.tensors) {
      context_ = message("tensor ", quoted(tensor.name));
      if (tensor.file_offset != expected)
        fail("data offset is ", tensor.file_offset, ", expected ", expected, ", where the previous tensor ends");
      if (expected > limit || tensor.n_bytes > limit - expected)
        fail("size of ", tensor.n_bytes, " bytes at offset ", expected,
             " of the data section overflows a 64-bit file offset");
      tensor.file_offset = container.data_start + expected;
      expected = padded(expected + tensor.n_bytes, container.alignment);
    }
    context_.clear();
  }

  // The padding after the last tensor may be missing.
  void check_data_is_present(const GgufContainer& container) {
    for (const GgufTensor& tensor : container.tensors) {
      if (tensor.file_offset <= file_.size() && tensor.n_bytes <= file_.size() - tensor.file_offset) continue;
      context_ = message("tensor ", quoted(tensor.name));
      fail("data of ", tensor.n_bytes, " bytes at offset ", tensor.file_offset, " lies outside the file of ",
           file_.size(), " bytes");
    }
  }

  std::span<const std::byte> file_;
  std::string_view path_;
  int32_t shard_;
  bool needs_data_;
  size_t position_ = 0;
  std::string context_;  // what is being read, for messages
};

}  // namespace

GgufContainer parse_container(std::span<const std::byte> file, std::string_view path, int32_t shard, bool needs_data) {
  return Parser(file, path, shard, needs_data).parse();
}

const GgufKeyValue* find_key(const GgufContainer& container, std::string_view key) {
  const auto key_of = [&](size_t i) { return container.metadata[i].key; };
  const auto at = std::ranges::lower_bound(container.by_key, key, {}, key_of);
  return at != container.by_key.end() && key_of(*at) == key ? &container.metadata[*at] : nullptr;
}

std::vector<size_t> index_by_name(const std::vector<GgufTensor>& tensors, std::string_view path) {
  std::vector<size_t> index(tensors.size());
  std::iota(index.begin(), index.end(), size_t{0});
  const auto name_of = [&](size_t i) { return tensors[i].name; };
  std::ranges::sort(index, {}, name_of);
  if (const auto twin = std::ranges::adjacent_find(index, {}, name_of); twin != index.end())
    throw GgufError(message(path, ": duplicate tensor name ", quoted(name_of(*twin))));
  return index;
}

std::string_view value_type_name(GgufValueType type) { return kValueTypes[static_cast<size_t>(type)].name; }
size_t value_type_bytes(GgufValueType type) { return kValueTypes[static_cast<size_t>(type)].bytes; }

}  // namespace v100
