// Weight loading: packed copies are made straight from the mapping, whose pages are then let go.
#include "model/loader.h"

#include "base/error.h"
#include "quants/decode.h"

namespace v100 {

namespace {

std::string shape_text(const int64_t* ne, size_t n) {
  std::string text = "[";
  for (size_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(ne[i]);
  return text + "]";
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
                           bool check_values)
    : file_(std::move(file)), backend_(backend), pool_(pool), check_values_(check_values) {
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
  const std::string scale = name.substr(0, name.rfind('.')) + ".scale";
  if (has(scale)) throw ModelError("tensor " + scale + ": per-tensor weight scales are not supported yet");
  check(*tensor);
  return *tensor;
}

VectorWeight WeightLoader::decode_vector(const GgufTensor& tensor) const {
  const auto n = static_cast<size_t>(tensor.n_elements());
  std::shared_ptr<float[]> values(new float[n]);
  decode(tensor.type, file_->data(tensor).data(), values.get(), tensor.n_elements());
  return {values, static_cast<int32_t>(n)};
}

VectorWeight WeightLoader::vector(const std::string& name, int32_t size) const {
  return decode_vector(require(name, {size}));
}

VectorWeight WeightLoader::optional_vector(const std::string& name, int32_t size) const {
  return has(name) ? vector(name, size) : VectorWeight{};
}

Linear WeightLoader::linear(const std::string& name, int32_t in_features, int32_t out_features) const {
  return linear_rows(name, in_features, out_features, 0, out_features, name);
}

Linear WeightLoader::linear_rows(const std::string& name, int32_t in_features, int32_t all_rows, int32_t first,
                                 int32_t out_features, const std::string& bias_name) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, all_rows});
  const int64_t offset = first * row_bytes(traits(tensor.type), in_features);
  Linear linear;
  linear.weight =
      backend_.pack_linear(tensor.type, in_features, out_features, file_->data(tensor).data() + offset, pool_);
  if (first == 0) linear.name = name + ".weight";
  linear.bias = optional_vector(bias_name + ".bias", out_features);
  if (first + out_features == all_rows) file_->release(tensor);
  return linear;
}

ExpertLinear WeightLoader::expert_linear(const std::string& name, int32_t in_features, int32_t out_features,
                                         int32_t experts) const {
  const GgufTensor& tensor = require(name + ".weight", {in_features, out_features, experts});
  const std::byte* rows = file_->data(tensor).data();
  const int64_t matrix_bytes = out_features * row_bytes(traits(tensor.type), in_features);
  ExpertLinear linear;
  linear.in_features = in_features;
  linear.out_features = out_features;
  linear.name = name + ".weight";
  for (int32_t e = 0; e < experts; ++e)
    linear.experts.push_back(
        backend_.pack_linear(tensor.type, in_features, out_features, rows + e * matrix_bytes, pool_));
  file_->release(tensor);
  return linear;
}

EmbeddingTable WeightLoader::embedding(const std::string& name, int32_t features, int32_t vocab) const {
  const GgufTensor& tensor = require(name + ".weight", {features, vocab});
  return {file_, file_->data(tensor).data(), tensor.type, vocab, features};
}

}  // namespace v100
