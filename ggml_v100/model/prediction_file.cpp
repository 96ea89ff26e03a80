// Joins tensors and keys of two files.
#include "model/prediction_file.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "gguf/message.h"
#include "gguf/metadata.h"

namespace v100 {

namespace {

constexpr std::string_view kBlockCount = ".block_count", kPredicting = ".nextn_predict_layers";
constexpr int32_t kFirstShard = 1 << 20;  // parts of the second file are numbered from here on

struct Counts {
  int64_t layers, predicting;
};

Counts count_blocks(const std::shared_ptr<const GgufFile>& file, const std::string& architecture) {
  const Metadata metadata(file, {});
  const int64_t predicting = metadata.find_int(architecture + std::string(kPredicting)).value_or(0);
  return {metadata.require_int(architecture + std::string(kBlockCount)) - predicting, predicting};
}

// Whether a tensor belongs to block `first` or one behind it.
bool is_behind(std::string_view name, int64_t first) {
  constexpr std::string_view kPrefix = "blk.";
  int64_t layer = -1;
  if (!name.starts_with(kPrefix)) return false;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer >= first;
}

class JoinedFile final : public GgufFile {
 public:
  JoinedFile(std::shared_ptr<const GgufFile> model, std::shared_ptr<const GgufFile> blocks,
             const std::string& architecture, Counts counts)
      : model_(std::move(model)), blocks_(std::move(blocks)) {
    for (const GgufTensor& tensor : model_->tensors())
      if (!is_behind(tensor.name, counts.layers)) tensors_.push_back(tensor);
    for (GgufTensor tensor : blocks_->tensors()) {
      if (!is_behind(tensor.name, counts.layers)) continue;
      tensor.shard += kFirstShard;
      tensors_.push_back(tensor);
    }
    for (const GgufTensor& tensor : tensors_) by_name_.emplace(tensor.name, &tensor);

    for (const GgufKeyValue& entry : model_->metadata())
      if (!is_of_blocks(entry.key, architecture, counts)) metadata_.push_back(entry);
    for (const GgufKeyValue& entry : blocks_->metadata())
      if (is_of_blocks(entry.key, architecture, counts)) metadata_.push_back(entry);
  }

  int32_t version() const override { return model_->version(); }
  uint64_t alignment() const override { return model_->alignment(); }
  const std::string& path() const override { return model_->path(); }
  const std::vector<GgufKeyValue>& metadata() const override { return metadata_; }
  const std::vector<GgufTensor>& tensors() const override { return tensors_; }
  const GgufTensor* find_tensor(std::string_view name) const override {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  const GgufKeyValue* find(std::string_view key) const override {
    const auto found = std::ranges::find(metadata_, key, &GgufKeyValue::key);
    return found == metadata_.end() ? nullptr : &*found;
  }
  std::span<const std::byte> data(const GgufTensor& tensor) const override {
    return file_of(tensor).data(as_there(tensor));
  }
  void release(const GgufTensor& tensor) const override { file_of(tensor).release(as_there(tensor)); }

 private:
  // What the second file knows better: the numbers of blocks, and lists with an entry for each of them.
  bool is_of_blocks(std::string_view key, const std::string& architecture, Counts counts) const {
    if (key == architecture + std::string(kBlockCount) || key == architecture + std::string(kPredicting)) return true;
    if (!key.starts_with(architecture + ".")) return false;
    const GgufKeyValue* entry = blocks_->find(key);
    const auto* array = entry == nullptr ? nullptr : std::get_if<GgufArray>(&entry->value);
    return array != nullptr && array->count == static_cast<uint64_t>(counts.layers + counts.predicting);
  }
  const GgufFile& file_of(const GgufTensor& tensor) const { return tensor.shard < kFirstShard ? *model_ : *blocks_; }
  static GgufTensor as_there(GgufTensor tensor) {
    if (tensor.shard >= kFirstShard) tensor.shard -= kFirstShard;
    return tensor;
  }

  std::shared_ptr<const GgufFile> model_, blocks_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string_view, const GgufTensor*> by_name_;
  std::vector<GgufKeyValue> metadata_;
};

}  // namespace

std::shared_ptr<const GgufFile> with_prediction_blocks(std::shared_ptr<const GgufFile> model,
                                                       std::shared_ptr<const GgufFile> blocks) {
  const Metadata ours(model, {}), theirs(blocks, {});
  const std::string architecture = ours.require_string("general.architecture");
  const auto differ = [&](const std::string& what, const std::string& found, const std::string& expected) {
    throw ModelError(message(blocks->path(), ": the blocks of multi-token prediction do not belong to this model: ",
                             what, " is ", found, ", the model's ", expected));
  };
  if (const std::string other = theirs.require_string("general.architecture"); other != architecture)
    differ("the architecture", other, architecture);
  const Counts counts = count_blocks(blocks, architecture);
  const Counts own = count_blocks(model, architecture);
  if (counts.predicting < 1 || counts.layers < 1)
    throw ModelError(message(blocks->path(), ": no blocks of multi-token prediction"));
  if (counts.layers != own.layers)
    differ("the number of layers", std::to_string(counts.layers), std::to_string(own.layers));
  for (const char* key : {".embedding_length", ".vocab_size", ".attention.head_count", ".attention.head_count_kv",
                          ".attention.key_length", ".rope.dimension_count"}) {
    const std::string name = architecture + key;
    if (ours.is_array(name) || theirs.is_array(name) || !ours.has(name) || !theirs.has(name)) continue;
    if (ours.require_int(name) != theirs.require_int(name))
      differ(name, std::to_string(theirs.require_int(name)), std::to_string(ours.require_int(name)));
  }
  return std::make_shared<JoinedFile>(std::move(model), std::move(blocks), architecture, counts);
}

}  // namespace v100
