// A GGUF model as files: maps the file and, where it is split, its siblings, and joins their tensors.
#include "gguf/gguf.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/mapped_file.h"
#include "gguf/container.h"
#include "gguf/message.h"

namespace v100 {

namespace {

constexpr std::string_view kSplitNo = "split.no";                       // 0-based index of this file
constexpr std::string_view kSplitCount = "split.count";                 // 0 and 1 mean: not split
constexpr std::string_view kSplitTensorsCount = "split.tensors.count";  // in all files together
constexpr int64_t kMaxSplits = 65535;                                   // the count is a u16

struct Shard {
  MappedFile file;
  GgufContainer content;
};

Shard open_shard(const std::string& path, int32_t index, bool needs_data) {
  try {
    MappedFile file(path);
    GgufContainer content = parse_container(file.bytes(), path, index, needs_data);
    return {std::move(file), std::move(content)};  // a moved mapping keeps its address: the views stay valid
  } catch (const GgufError&) {
    throw;
  } catch (const Error& error) {
    throw GgufError(error.what());
  }
}

// Value of a split key, any integer type; nullopt when the key is absent.
std::optional<int64_t> find_split_key(const GgufContainer& content, std::string_view key, int64_t largest,
                                      const std::string& path) {
  const GgufKeyValue* entry = find_key(content, key);
  if (entry == nullptr) return std::nullopt;
  const auto* natural = std::get_if<uint64_t>(&entry->value);
  const auto* integer = std::get_if<int64_t>(&entry->value);
  if (natural == nullptr && integer == nullptr)
    throw GgufError(message(path, ": ", key, " has type ", value_type_name(entry->type), ", expected an integer"));
  if (natural != nullptr ? *natural > static_cast<uint64_t>(largest) : *integer < 0 || *integer > largest)
    throw GgufError(message(path, ": ", key, " is ",
                            natural != nullptr ? std::to_string(*natural) : std::to_string(*integer), ", expected 0..",
                            largest));
  return natural != nullptr ? static_cast<int64_t>(*natural) : *integer;
}

int64_t require_split_key(const GgufContainer& content, std::string_view key, int64_t largest,
                          const std::string& path) {
  if (const auto value = find_split_key(content, key, largest, path)) return *value;
  throw GgufError(message(path, ": split file without the key ", key));
}

// "-00002-of-00005.gguf" for index 1 of 5.
std::string split_suffix(int64_t index, int64_t count) {
  const auto five_digits = [](int64_t number) {
    std::string digits = std::to_string(number);
    return std::string(5 - std::min<size_t>(digits.size(), 5), '0') + digits;
  };
  return "-" + five_digits(index + 1) + "-of-" + five_digits(count) + ".gguf";
}

std::vector<Shard> open_shards(const std::string& path, bool needs_data, bool single_file) {
  std::vector<Shard> shards;
  shards.push_back(open_shard(path, 0, needs_data));
  if (single_file) return shards;
  const int64_t count = find_split_key(shards[0].content, kSplitCount, kMaxSplits, path).value_or(0);
  if (count <= 1) return shards;

  const int64_t given = require_split_key(shards[0].content, kSplitNo, kMaxSplits, path);
  if (given != 0)
    throw GgufError(message(path, ": is part ", given + 1, " of ", count, " (", kSplitNo, " = ", given,
                            "); open the first part instead"));
  const std::string suffix = split_suffix(0, count);
  if (!path.ends_with(suffix))
    throw GgufError(
        message(path, ": invalid split file name: the first of ", count, " parts must end in ", quoted(suffix)));
  const std::string prefix = path.substr(0, path.size() - suffix.size());

  for (int64_t index = 1; index < count; ++index) {
    const std::string sibling = prefix + split_suffix(index, count);
    shards.push_back(open_shard(sibling, static_cast<int32_t>(index), needs_data));
    const GgufContainer& content = shards.back().content;
    const int64_t found = require_split_key(content, kSplitNo, kMaxSplits, sibling);
    if (found != index) throw GgufError(message(sibling, ": ", kSplitNo, " is ", found, ", expected ", index));
    const int64_t claimed = find_split_key(content, kSplitCount, kMaxSplits, sibling).value_or(count);
    if (claimed != count)
      throw GgufError(message(sibling, ": ", kSplitCount, " is ", claimed, ", but ", count, " in the first part"));
  }

  const int64_t expected =
      require_split_key(shards[0].content, kSplitTensorsCount, std::numeric_limits<int64_t>::max(), path);
  size_t total = 0;
  for (const Shard& shard : shards) total += shard.content.tensors.size();
  if (total != static_cast<uint64_t>(expected))
    throw GgufError(message(path, ": ", kSplitTensorsCount, " is ", expected, ", but the ", count, " parts hold ",
                            total, " tensors"));
  return shards;
}

class MappedGguf final : public GgufFile {
 public:
  MappedGguf(std::string path, std::vector<Shard> shards) : path_(std::move(path)) {
    for (Shard& shard : shards) {
      files_.push_back(std::move(shard.file));
      tensors_.insert(tensors_.end(), shard.content.tensors.begin(), shard.content.tensors.end());
    }
    content_ = std::move(shards[0].content);
    by_name_ = index_by_name(tensors_, path_);
  }

  int32_t version() const override { return content_.version; }
  uint64_t alignment() const override { return content_.alignment; }
  const std::string& path() const override { return path_; }
  const std::vector<GgufKeyValue>& metadata() const override { return content_.metadata; }
  const std::vector<GgufTensor>& tensors() const override { return tensors_; }
  const GgufKeyValue* find(std::string_view key) const override { return find_key(content_, key); }

  const GgufTensor* find_tensor(std::string_view name) const override {
    const auto name_of = [this](size_t i) { return tensors_[i].name; };
    const auto at = std::ranges::lower_bound(by_name_, name, {}, name_of);
    return at != by_name_.end() && name_of(*at) == name ? &tensors_[*at] : nullptr;
  }

  std::span<const std::byte> data(const GgufTensor& tensor) const override {
    const std::span<const std::byte> file = file_of(tensor).bytes();
    if (tensor.file_offset > file.size() ||
        tensor.n_bytes > file.size() - tensor.file_offset)  // opened for metadata only
      throw GgufError(message(path_, ": tensor ", quoted(tensor.name), ": data of ", tensor.n_bytes,
                              " bytes at offset ", tensor.file_offset, " lies outside the file of ", file.size(),
                              " bytes"));
    return file.subspan(static_cast<size_t>(tensor.file_offset), static_cast<size_t>(tensor.n_bytes));
  }

  void release(const GgufTensor& tensor) const override {
    file_of(tensor).release(static_cast<size_t>(tensor.file_offset), static_cast<size_t>(tensor.n_bytes));
  }

 private:
  const MappedFile& file_of(const GgufTensor& tensor) const { return files_.at(static_cast<size_t>(tensor.shard)); }

  std::string path_;
  std::vector<MappedFile> files_;
  GgufContainer content_;  // of the first file; its tensors are among tensors_
  std::vector<GgufTensor> tensors_;
  std::vector<size_t> by_name_;  // indices of tensors_, sorted by name
};

}  // namespace

std::shared_ptr<const GgufFile> GgufFile::open(const std::string& path, bool metadata_only, bool single_file) {
  return std::make_shared<const MappedGguf>(path, open_shards(path, !metadata_only, single_file));
}

}  // namespace v100
