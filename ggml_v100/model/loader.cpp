// Weight loading: packed copies are made straight from the mapping, whose pages are then let go.
#include "model/loader.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "quants/decode.h"

namespace v100 {

namespace {

std::string shape_text(const int64_t* ne, size_t n) {
  std::string text = "[";
  for (size_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(ne[i]);
  return text + "]";
}

int32_t count_rows(std::span<const RowRange> rows) {
  int32_t count = 0;
  for (const RowRange& range : rows) count += range.end - range.begin;
  return count;
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

}  // namespace

WeightLoader::WeightLoader(std::shared_ptr<const GgufFile> file, const Backend& backend, ThreadPool& pool,
                           bool check_values, bool load_mtp)
    : file_(std::move(file)), backend_(backend), pool_(pool), check_values_(check_values), load_mtp_(load_mtp) {
  for (const GgufTensor& tensor : file_->tensors())
    if (tensor.name.empty()) throw ModelError("the file has a tensor without a name");
}

bool WeightLoader::has(const std::string& name) const { return file_->find_tensor(name) != nullptr; }

void WeightLoader::check(const GgufTensor& tensor) const {
  if (check_values_ && !all_finite(tensor.type, file_->data(tensor).data(), tensor.n_elements()))
    throw ModelError("tensor " + std::string(tensor.name) + " has non-finite values");
}

const GgufTensor& WeightLoader::require(const std::string& name, std::vector<int64_t> shape) const {
  const GgufTensor* tensor = file_->find_tensor(name);
  if (tensor == nullptr) throw ModelError("tensor " + name + " is missing");
  if (tensor->n_elements() == 0) throw ModelError("tensor " + name + " is empty");
  shape.resize(4, 1);
  for (size_t i = 0; i < 4; ++i)
    if (tensor->ne[i] != shape[i])
      throw ModelError("tensor " + name + " has shape " + shape_text(tensor->ne, 4) + ", the hyperparameters need " +
                       shape_text(shape.data(), 4));
  if (!is_weight_type(tensor->type))
    throw ModelError("tensor " + name + " has type " + std::string(traits(tensor->type).name) +
                     ", which is not a weight type");
  check(*tensor);
  return *tensor;
}

std::vector<float> WeightLoader::scales(const std::string& name, int32_t matrices) const {
  const std::string full = name + ".scale";
  if (!has(full)) return std::vector<float>(static_cast<size_t>(matrices), 1.0f);
  const VectorWeight values = decode_vector(require(full, {matrices}));
  std::vector<float> scales(values.data.get(), values.data.get() + matrices);
  for (const float scale : scales)
    if (!std::isfinite(scale)) throw ModelError("tensor " + full + " has a value that is not finite");
  return scales;
}

void WeightLoader::refuse_scale(const std::string& name) const {
  if (has(name + ".scale"))
    throw ModelError("tensor " + name + ".scale: only matrices that are multiplied have a scale");
}

VectorWeight WeightLoader::decode_vector(const GgufTensor& tensor) const {
  const auto n = static_cast<size_t>(tensor.n_elements());
  std::shared_ptr<float[]> values(new float[n]);
  decode(tensor.type, file_->data(tensor).data(), values.get(), tensor.n_elements());
  return {values, static_cast<int32_t>(n)};
}

VectorWeight WeightLoader::vector(const std::string& name, int32_t size) const {
  if (name.ends_with(".weight")) refuse_scale(name.substr(0, name.rfind('.')));
  return decode_vector(require(name, {size}));
}

VectorWeight WeightLoader::optional_vector(const std::string& name, int32_t size) const {
  return has(name) ? vector(name, size) : VectorWeight{};
}

std::shared_ptr<const LinearWeight> WeightLoader::pack_rows(const GgufTensor& tensor, int32_t matrix,
                                                            int32_t in_features, int32_t all_rows,
                                                            std::span<const RowRange> rows, float scale) const {
  const int64_t bytes = row_bytes(traits(tensor.type), in_features);
  const std::byte* first = file_->data(tensor).data() + static_cast<int64_t>(matrix) * all_rows * bytes;
  const int32_t count = count_rows(rows);
  if (rows.size() == 1)
    return backend_.pack_linear(tensor.type, in_features, count, first + rows[0].begin * bytes, pool_, scale);
  std::vector<std::byte> picked(static_cast<size_t>(count * bytes));
  auto to = picked.begin();
  for (const RowRange& range : rows)
    to = std::copy_n(first + range.begin * bytes, (range.end - range.begin) * bytes, to);
  return backend_.pack_linear(tensor.type, in_features, count, picked.data(), pool_, scale);
}

Linear WeightLoader::linear(const std::string& name, int32_t in_features, int32_t out_features) const {
  return linear_rows(name, in_features, out_features, std::array{RowRange{0, out_features}}, name);
}

Linear WeightLoader::linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                 std::span<const RowRange> rows, const std::string& bias_name) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, all_rows});
  Linear linear;
  linear.weight = pack_rows(tensor, 0, in_features, all_rows, rows, scales(name, 1)[0]);
  if (rows.front().begin == 0) linear.name = name + ".weight";
  if (has(name + ".bias")) {
    const VectorWeight fused = vector(name + ".bias", all_rows);
    std::shared_ptr<float[]> bias(new float[static_cast<size_t>(count_rows(rows))]);
    float* to = bias.get();
    for (const RowRange& range : rows) to = std::copy(&fused.data[range.begin], &fused.data[range.end], to);
    linear.bias = {bias, count_rows(rows)};
  } else {
    linear.bias = optional_vector(bias_name + ".bias", count_rows(rows));
  }
  if (rows.back().end == all_rows) file_->release(tensor);
  return linear;
}

ExpertLinear WeightLoader::expert_linear(const std::string& name, int32_t in_features, int32_t out_features,
                                         int32_t experts) const {
  return expert_linear_rows(name, in_features, out_features, std::array{RowRange{0, out_features}}, experts);
}

ExpertLinear WeightLoader::expert_linear_rows(const std::string& name, int32_t in_features, int32_t all_rows,
                                              std::span<const RowRange> rows, int32_t experts) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, all_rows, experts});
  ExpertLinear linear;
  linear.in_features = in_features;
  linear.out_features = count_rows(rows);
  if (rows.front().begin == 0) linear.name = name + ".weight";
  const std::vector<float> scale = scales(name, experts);
  for (int32_t e = 0; e < experts; ++e)
    linear.experts.push_back(pack_rows(tensor, e, in_features, all_rows, rows, scale[static_cast<size_t>(e)]));
  if (rows.back().end == all_rows) file_->release(tensor);
  return linear;
}

ConvWeight WeightLoader::convolution(const std::string& name, int32_t taps, int32_t channels) const {
  refuse_scale(name);
  const VectorWeight file_order = decode_vector(require(name + ".weight", {taps, channels}));
  std::shared_ptr<float[]> weights(new float[static_cast<size_t>(taps) * static_cast<size_t>(channels)]);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t t = 0; t < taps; ++t) weights[t * channels + c] = file_order.data[c * taps + t];
  return {weights, taps, channels};
}

EmbeddingTable WeightLoader::embedding(const std::string& name, int32_t features, int32_t vocab) const {
  refuse_scale(name);
  const GgufTensor& tensor = require(name + ".weight", {features, vocab});
  return {file_, file_->data(tensor).data(), tensor.type, vocab, features};
}

}  // namespace v100
