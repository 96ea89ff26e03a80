// Typed look-up of metadata: overrides first, then the file, always with range checks.
#include "gguf/metadata.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "gguf/container.h"
#include "gguf/message.h"

namespace v100 {

namespace {

std::string_view override_kind(const MetadataOverride& value) {
  constexpr std::string_view kKinds[] = {"an integer", "a float", "a bool", "a string"};
  return kKinds[value.index()];
}

std::string key_text(const GgufFile& file, std::string_view key) {
  return message(file.path(), ": metadata key ", quoted(key));
}

std::string described(const GgufKeyValue& entry) {
  const auto* array = std::get_if<GgufArray>(&entry.value);
  if (array == nullptr) return message("type ", value_type_name(entry.type));
  return message("type array of ", array->count, " ", value_type_name(array->element_type));
}

// The override of `key` as T; nullptr when there is none. An override of another kind is an error: ignoring it would
// run the model with a value that the user meant to replace.
template <class T>
const T* override_of(const MetadataOverrides& overrides, const GgufFile& file, std::string_view key,
                     std::string_view expected) {
  const auto found = overrides.find(key);
  if (found == overrides.end()) return nullptr;
  if (const T* value = std::get_if<T>(&found->second)) return value;
  throw ModelError(key_text(file, key) +
                   message(": its override is ", override_kind(found->second), ", expected ", expected));
}

[[noreturn]] void fail_kind(const GgufFile& file, const GgufKeyValue& entry, std::string_view expected) {
  throw ModelError(key_text(file, entry.key) + message(" has ", described(entry), ", expected ", expected));
}

[[noreturn]] void fail_missing(const GgufFile& file, std::string_view key) {
  throw ModelError(key_text(file, key) + " is missing");
}

int64_t checked_signed(const GgufFile& file, std::string_view key, uint64_t value) {
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    throw ModelError(key_text(file, key) +
                     message(" is ", value, ", expected at most ", std::numeric_limits<int64_t>::max()));
  return static_cast<int64_t>(value);
}

template <class T>
T element_as(const GgufArray& array, size_t index) {
  T value;
  std::memcpy(&value, array.bytes.data() + index * sizeof value, sizeof value);
  return value;
}

// Element of an array of integers or bools.
int64_t integer_element(const GgufFile& file, const GgufKeyValue& entry, const GgufArray& array, size_t index) {
  switch (array.element_type) {
    case GgufValueType::U8:
      return element_as<uint8_t>(array, index);
    case GgufValueType::I8:
      return element_as<int8_t>(array, index);
    case GgufValueType::U16:
      return element_as<uint16_t>(array, index);
    case GgufValueType::I16:
      return element_as<int16_t>(array, index);
    case GgufValueType::U32:
      return element_as<uint32_t>(array, index);
    case GgufValueType::I32:
      return element_as<int32_t>(array, index);
    case GgufValueType::U64:
      return checked_signed(file, entry.key, element_as<uint64_t>(array, index));
    case GgufValueType::I64:
      return element_as<int64_t>(array, index);
    case GgufValueType::BOOL:
      return element_as<uint8_t>(array, index) != 0;
    case GgufValueType::F32:
    case GgufValueType::F64:
    case GgufValueType::STRING:
    case GgufValueType::ARRAY:
      break;
  }
  fail_kind(file, entry, "integers or bools");
}

int64_t integer_of(const GgufFile& file, const GgufKeyValue& entry, std::string_view expected) {
  if (const auto* natural = std::get_if<uint64_t>(&entry.value)) return checked_signed(file, entry.key, *natural);
  if (const auto* integer = std::get_if<int64_t>(&entry.value)) return *integer;
  fail_kind(file, entry, expected);
}

}  // namespace

Metadata::Metadata(std::shared_ptr<const GgufFile> file, MetadataOverrides overrides)
    : file_(std::move(file)), overrides_(std::move(overrides)) {}

bool Metadata::has(std::string_view key) const { return overrides_.contains(key) || file_->find(key) != nullptr; }

bool Metadata::is_array(std::string_view key) const {
  if (overrides_.contains(key)) return false;
  const GgufKeyValue* entry = file_->find(key);
  return entry != nullptr && std::holds_alternative<GgufArray>(entry->value);
}

std::optional<int64_t> Metadata::find_int(std::string_view key) const {
  constexpr std::string_view expected = "an integer";
  if (const auto* value = override_of<int64_t>(overrides_, *file_, key, expected)) return *value;
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  return integer_of(*file_, *entry, expected);
}

std::optional<double> Metadata::find_float(std::string_view key) const {
  constexpr std::string_view expected = "a float";
  // `key=int:10000` for a float key says exactly what is meant.
  if (const auto found = overrides_.find(key); found != overrides_.end())
    if (const auto* integer = std::get_if<int64_t>(&found->second)) return static_cast<double>(*integer);
  if (const auto* value = override_of<double>(overrides_, *file_, key, expected)) return *value;
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* value = std::get_if<double>(&entry->value)) return *value;
  fail_kind(*file_, *entry, expected);
}

std::optional<bool> Metadata::find_bool(std::string_view key) const {
  constexpr std::string_view expected = "a bool";
  if (const auto* value = override_of<bool>(overrides_, *file_, key, expected)) return *value;
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* value = std::get_if<bool>(&entry->value)) return *value;
  fail_kind(*file_, *entry, expected);
}

std::optional<std::string> Metadata::find_string(std::string_view key) const {
  constexpr std::string_view expected = "a string";
  if (const auto* value = override_of<std::string>(overrides_, *file_, key, expected)) return *value;
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* value = std::get_if<std::string_view>(&entry->value)) return std::string(*value);
  fail_kind(*file_, *entry, expected);
}

std::optional<uint64_t> Metadata::find_array_size(std::string_view key) const {
  if (const auto found = overrides_.find(key); found != overrides_.end())
    throw ModelError(key_text(*file_, key) +
                     message(": its override is ", override_kind(found->second), ", but arrays cannot be overridden"));
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* array = std::get_if<GgufArray>(&entry->value)) return array->count;
  fail_kind(*file_, *entry, "an array");
}

std::optional<std::vector<int64_t>> Metadata::find_ints(std::string_view key, int32_t n) const {
  constexpr std::string_view expected = "an integer or an array of integers";
  if (n < 0) throw InvalidArgument(message("find_ints: n is ", n, ", expected at least 0"));
  const auto size = static_cast<size_t>(n);
  if (const auto* value = override_of<int64_t>(overrides_, *file_, key, expected))
    return std::vector<int64_t>(size, *value);
  const GgufKeyValue* entry = file_->find(key);
  if (entry == nullptr) return std::nullopt;
  const auto* array = std::get_if<GgufArray>(&entry->value);
  if (array == nullptr) return std::vector<int64_t>(size, integer_of(*file_, *entry, expected));
  if (array->count < size)
    throw ModelError(key_text(*file_, key) + message(" has ", array->count, " elements, expected ", n));
  std::vector<int64_t> values(size);
  for (size_t i = 0; i < size; ++i) values[i] = integer_element(*file_, *entry, *array, i);
  return values;
}

int64_t Metadata::require_int(std::string_view key) const {
  if (const auto value = find_int(key)) return *value;
  fail_missing(*file_, key);
}

double Metadata::require_float(std::string_view key) const {
  if (const auto value = find_float(key)) return *value;
  fail_missing(*file_, key);
}

std::string Metadata::require_string(std::string_view key) const {
  if (auto value = find_string(key)) return *std::move(value);
  fail_missing(*file_, key);
}

}  // namespace v100
