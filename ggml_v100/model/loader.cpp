// Weight loading: packed copies are made straight from the mapping, whose pages are then let go.
#include "model/loader.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "base/mapped_file.h"
#include "quants/decode.h"

namespace v100 {

namespace {

std::string shape_text(const int64_t* ne, size_t n) {
  std::string text = "[";
  for (size_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(ne[i]);
  return text + "]";
}

// Layer of a tensor named "blk.<layer>.*"; nothing for others.
std::optional<int32_t> layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "blk.";
  int32_t layer = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* first = name.data() + kPrefix.size();
  if (std::from_chars(first, name.data() + name.size(), layer).ptr == first) return std::nullopt;
  return layer;
}

bool is_weight_type(QuantType type) {
  switch (type) {
    case QuantType::I8:
    case QuantType::I16:
    case QuantType::I32:
    case QuantType::I64:
    case QuantType::F64:
    case QuantType::Q8_1:
    case QuantType::Q8_K:
      return false;
    default:
      return true;
  }
}

// Stands for a weight that is only measured.
class MeasuredWeight final : public LinearWeight {
 public:
  MeasuredWeight(QuantType type, int32_t in_features, int32_t out_features, float scale, size_t bytes)
      : LinearWeight(type, in_features, out_features, scale), bytes_(bytes) {}
  size_t bytes() const override { return bytes_; }

 private:
  size_t bytes_;
};

}  // namespace

WeightLoader::WeightLoader(std::shared_ptr<const GgufFile> file, const Backend& backend, ThreadPool& pool,
                           bool check_values, bool load_mtp, Shard& shard, LoadFor purpose)
    : file_(std::move(file)),
      backend_(backend),
      pool_(pool),
      check_values_(check_values),
      load_mtp_(load_mtp),
      shard_(shard),
      purpose_(purpose) {
  for (const GgufTensor& tensor : file_->tensors())
    if (tensor.name.empty()) throw ModelError("the file has a tensor without a name");
}

bool WeightLoader::has(const std::string& name) const { return file_->find_tensor(name) != nullptr; }

bool WeightLoader::is_here(const std::string& name) const {
  const std::optional<int32_t> layer = layer_of(name);
  return !layer || shard_.has_layer(*layer);
}

double WeightLoader::bytes(const std::vector<std::string>& names) const {
  double sum = 0;
  for (const std::string& name : names)
    if (const GgufTensor* tensor = file_->find_tensor(name)) sum += static_cast<double>(tensor->n_bytes);
  return sum;
}

int32_t WeightLoader::block_values(const std::string& name) const {
  const GgufTensor* tensor = file_->find_tensor(name);
  return tensor == nullptr ? 1 : traits(tensor->type).block_values;
}

int32_t WeightLoader::columns(const std::string& name) const {
  const int64_t columns = find(name).ne[0];
  if (columns > std::numeric_limits<int32_t>::max())
    throw ModelError("tensor " + name + " has " + std::to_string(columns) + " columns");
  return static_cast<int32_t>(columns);
}

void WeightLoader::check(const GgufTensor& tensor) const {
  if (check_values_ && shard_.is_first() && !all_finite(tensor.type, file_->data(tensor).data(), tensor.n_elements()))
    throw ModelError("tensor " + std::string(tensor.name) + " has non-finite values");
}

const GgufTensor& WeightLoader::find(const std::string& name) const {
  const GgufTensor* tensor = file_->find_tensor(name);
  if (tensor == nullptr) throw ModelError("tensor " + name + " is missing");
  if (tensor->n_elements() == 0) throw ModelError("tensor " + name + " is empty");
  return *tensor;
}

void WeightLoader::require_weight_type(const GgufTensor& tensor) {
  if (!is_weight_type(tensor.type))
    throw ModelError("tensor " + std::string(tensor.name) + " has type " + std::string(traits(tensor.type).name) +
                     ", which is not a weight type");
}

const GgufTensor& WeightLoader::require(const std::string& name, std::vector<int64_t> shape) const {
  const GgufTensor* tensor = &find(name);
  shape.resize(4, 1);
  for (size_t i = 0; i < 4; ++i)
    if (tensor->ne[i] != shape[i])
      throw ModelError("tensor " + name + " has shape " + shape_text(tensor->ne, 4) + ", the hyperparameters need " +
                       shape_text(shape.data(), 4));
  require_weight_type(*tensor);
  check(*tensor);
  return *tensor;
}

std::vector<float> WeightLoader::scales(const std::string& name, int32_t matrices) const {
  const std::string full = name + ".scale";
  if (!has(full)) return std::vector<float>(static_cast<size_t>(matrices), 1.0f);
  std::vector<float> scales = decode_values(require(full, {matrices}));
  for (const float scale : scales)
    if (!std::isfinite(scale)) throw ModelError("tensor " + full + " has a value that is not finite");
  return scales;
}

void WeightLoader::refuse_scale(const std::string& name) const {
  if (has(name + ".scale"))
    throw ModelError("tensor " + name + ".scale: only matrices that are multiplied have a scale");
}

std::vector<float> WeightLoader::decode_values(const GgufTensor& tensor) const {
  std::vector<float> values(static_cast<size_t>(tensor.n_elements()));
  decode(tensor.type, file_->data(tensor).data(), values.data(), tensor.n_elements());
  return values;
}

VectorWeight WeightLoader::place(std::span<const float> values) const {
  vector_bytes_ += values.size_bytes();
  return {purpose_ == LoadFor::pack ? backend_.place(values) : nullptr, static_cast<int32_t>(values.size())};
}

VectorWeight WeightLoader::vector(const std::string& name, int32_t size) const {
  if (name.ends_with(".weight")) refuse_scale(name.substr(0, name.rfind('.')));
  return place(decode_values(require(name, {size})));
}

std::vector<float> WeightLoader::optional_values(const std::string& name, int32_t size) const {
  return has(name) ? decode_values(require(name, {size})) : std::vector<float>{};
}

VectorWeight WeightLoader::optional_vector(const std::string& name, int32_t size) const {
  return has(name) ? vector(name, size) : VectorWeight{};
}

VectorWeight WeightLoader::flat_vector(const std::string& name, std::vector<int64_t> shape) const {
  return place(decode_values(require(name, std::move(shape))));
}

std::vector<int32_t> WeightLoader::token_ids(const std::string& name, int32_t vocab) const {
  if (!has(name)) return {};
  const GgufTensor& tensor = find(name);
  if (tensor.type != QuantType::I64 || tensor.n_elements() != tensor.ne[0] || tensor.ne[0] > vocab)
    throw ModelError(name + ": expected a list of at most " + std::to_string(vocab) + " token ids as I64");
  const std::span<const std::byte> data = file_->data(tensor);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tensor.ne[0]; ++i) {
    int64_t id = 0;
    std::memcpy(&id, data.data() + i * static_cast<int64_t>(sizeof id), sizeof id);
    if (id < 0 || id >= vocab)
      throw ModelError(name + ": entry " + std::to_string(i) + " is " + std::to_string(id) +
                       ", outside the vocabulary of " + std::to_string(vocab));
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

VectorWeight WeightLoader::vector_entries(const std::string& name, int32_t size,
                                          std::span<const RowRange> entries) const {
  const std::vector<float> all = decode_values(require(name, {size}));
  std::vector<float> picked;
  for (const RowRange& range : entries) picked.insert(picked.end(), all.begin() + range.begin, all.begin() + range.end);
  return place(picked);
}

VectorWeight WeightLoader::optional_vector_entries(const std::string& name, int32_t size,
                                                   std::span<const RowRange> entries) const {
  return has(name) ? vector_entries(name, size, entries) : VectorWeight{};
}

std::shared_ptr<const LinearWeight> WeightLoader::pack(const GgufTensor& tensor, int32_t matrix,
                                                       std::span<const RowRange> rows,
                                                       std::span<const RowRange> columns, float scale) const {
  const QuantTraits& type = traits(tensor.type);
  const std::vector<RowRange> row_runs = joined(rows), column_runs = joined(columns);
  const int32_t n_rows = total(rows), n_columns = total(columns);
  if (n_rows == 0 || n_columns == 0) return nullptr;
  if (purpose_ == LoadFor::measure) {
    const size_t bytes = backend_.packed_bytes(tensor.type, n_columns, n_rows);
    packed_bytes_ += bytes;
    return std::make_shared<const MeasuredWeight>(tensor.type, n_columns, n_rows, scale, bytes);
  }
  const int64_t all_bytes = row_bytes(type, tensor.ne[0]);
  const std::byte* first = file_->data(tensor).data() + matrix * tensor.ne[1] * all_bytes;
  std::vector<std::byte> picked;
  const std::byte* source = first + row_runs.front().begin * all_bytes;
  if (row_runs.size() > 1 || n_columns < tensor.ne[0]) {
    for (const RowRange& run : column_runs)
      if (run.begin % type.block_values != 0 || run.end % type.block_values != 0)
        throw ModelError("tensor " + std::string(tensor.name) + " of type " + std::string(type.name) +
                         " cannot be cut at columns " + std::to_string(run.begin) + " and " + std::to_string(run.end));
    picked.resize(static_cast<size_t>(n_rows * row_bytes(type, n_columns)));
    auto to = picked.begin();
    for (const RowRange& run : row_runs)
      for (int32_t row = run.begin; row < run.end; ++row)
        for (const RowRange& part : column_runs)
          to = std::copy_n(first + row * all_bytes + row_bytes(type, part.begin), row_bytes(type, part.size()), to);
    source = picked.data();
  }
  auto weight = backend_.pack_linear(tensor.type, n_columns, n_rows, source, pool_, scale);
  packed_bytes_ += weight->bytes();
  return weight;
}

std::shared_ptr<const WeightOrigin> WeightLoader::remember(WeightOrigin origin) const {
  return origins_.emplace_back(std::make_shared<const WeightOrigin>(std::move(origin)));
}

Linear WeightLoader::linear(const std::string& name, int32_t in_features, int32_t out_features) const {
  return linear_rows(name, in_features, out_features, std::array{RowRange{0, is_here(name) ? out_features : 0}});
}

Linear WeightLoader::linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                 std::span<const RowRange> rows) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, all_rows});
  Linear linear;
  linear.weight = pack(tensor, 0, rows, std::array{RowRange{0, in_features}}, scales(name, 1)[0]);
  if (!rows.empty() && rows.front().begin == 0) linear.name = name + ".weight";
  linear.bias = optional_vector_entries(name + ".bias", all_rows, rows);
  linear.origin = remember({std::string(tensor.name), {rows.begin(), rows.end()}, {{0, in_features}}, {0, 1}, 0});
  // The last part of the last rank: nobody reads these pages again.
  if (shard_.is_last() && (!shard_.is_whole() || rows.back().end == all_rows)) file_->release(tensor);
  return linear;
}

Linear WeightLoader::linear_columns(const std::string& name, int32_t all_columns, std::span<const RowRange> columns,
                                    int32_t out_features) const {
  const GgufTensor& tensor = require(name + ".weight", {all_columns, out_features});
  Linear linear;
  linear.weight = pack(tensor, 0, std::array{RowRange{0, out_features}}, columns, scales(name, 1)[0]);
  linear.name = name + ".weight";
  linear.out_features = out_features;
  const VectorWeight bias = optional_vector(name + ".bias", out_features);
  if (linear.weight != nullptr && columns.front().begin == 0) linear.bias = bias;
  linear.origin =
      remember({std::string(tensor.name), {{0, out_features}}, {columns.begin(), columns.end()}, {0, 1}, 0});
  if (shard_.is_last()) file_->release(tensor);
  return linear;
}

ExpertLinear WeightLoader::expert_linear(const std::string& name, int32_t in_features, int32_t out_features,
                                         int32_t experts, RowRange mine) const {
  return expert_linear_rows(name, in_features, out_features, std::array{RowRange{0, out_features}}, experts, mine);
}

ExpertLinear WeightLoader::expert_linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                              std::span<const RowRange> rows, int32_t experts, RowRange mine) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, all_rows, experts});
  ExpertLinear linear;
  if (rows.front().begin == 0) linear.name = name + ".weight";
  linear.in_features = in_features;
  linear.out_features = total(rows);
  linear.experts.resize(static_cast<size_t>(experts));
  const std::vector<float> scale = scales(name, experts);
  for (auto e = static_cast<size_t>(mine.begin); e < static_cast<size_t>(mine.end); ++e)
    linear.experts[e] = pack(tensor, static_cast<int32_t>(e), rows, std::array{RowRange{0, in_features}}, scale[e]);
  linear.origin = remember({std::string(tensor.name), {rows.begin(), rows.end()}, {{0, in_features}}, mine, experts});
  if (shard_.is_last() && rows.back().end == all_rows) file_->release(tensor);
  return linear;
}

ConvWeight WeightLoader::convolution(const std::string& name, int32_t taps, int32_t channels,
                                     std::span<const RowRange> mine) const {
  refuse_scale(name);
  const std::vector<float> file_order = decode_values(require(name + ".weight", {taps, channels}));  // [channels, taps]
  std::vector<float> weights;
  for (int32_t t = 0; t < taps; ++t)
    for (const RowRange& range : mine)
      for (int64_t c = range.begin; c < range.end; ++c)
        weights.push_back(file_order[static_cast<size_t>(c * taps + t)]);
  return {place(weights).data, taps, total(mine)};
}

EmbeddingTable WeightLoader::embedding(const std::string& name, int32_t features, int32_t vocab) const {
  refuse_scale(name);
  const GgufTensor& tensor = require(name + ".weight", {features, vocab});
  return {file_,       file_->data(tensor).data(),
          tensor.type, vocab,
          features,    remember({std::string(tensor.name), {{0, vocab}}, {{0, features}}, {0, 1}, 0, true})};
}

EmbeddingTable WeightLoader::lazy_table(const std::string& name, int32_t features, int64_t rows) const {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  const GgufTensor& tensor = find(name + ".weight");
  if (tensor.ne[0] != features || tensor.ne[1] < rows || tensor.ne[1] > kMostRows || tensor.ne[2] != 1 ||
      tensor.ne[3] != 1)
    throw ModelError("tensor " + name + ".weight has shape " + shape_text(tensor.ne, 4) +
                     ", the hyperparameters need rows of " + std::to_string(features) + " and at least " +
                     std::to_string(rows) + " of them");
  require_weight_type(tensor);
  refuse_scale(name);
  const std::span<const std::byte> data = file_->data(tensor);
  will_read_at_random(data);
  return {file_, data.data(), tensor.type, static_cast<int32_t>(tensor.ne[1]), features, {}};
}

}  // namespace v100
