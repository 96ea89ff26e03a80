// Reading and adding up of control vectors.
#include "engine/control_vector.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "base/hash.h"
#include "quants/decode.h"

namespace v100 {

namespace {

// N of `direction.<N>`.
int32_t layer_of(const GgufTensor& tensor, int32_t layers) {
  constexpr std::string_view kPrefix = "direction.";
  const std::string_view name = tensor.name;
  int32_t layer = 0;
  const char* end = name.data() + name.size();
  const bool is_direction = name.starts_with(kPrefix) && [&] {
    const auto read = std::from_chars(name.data() + kPrefix.size(), end, layer);
    return read.ec == std::errc{} && read.ptr == end;
  }();
  if (!is_direction)
    throw ModelError("tensor " + std::string(name) + " is not a direction.<layer> of a control vector");
  if (layer < 1 || layer >= layers)
    throw ModelError("tensor " + std::string(name) + " is for layer " + std::to_string(layer) +
                     ", the model takes directions for layers 1 to " + std::to_string(layers - 1));
  return layer;
}

}  // namespace

ControlVector::ControlVector(const LoadedModel& model, const std::vector<ControlVectorFile>& files, int32_t first,
                             int32_t last) {
  const Hyperparameters& hp = model.text().hyperparameters();
  if (!model.text().has_residual_stream())
    throw ModelError("control vectors are added to one residual stream, which " + hp.architecture +
                     " models do not have");
  if (first < 0 || last < 0 || (last > 0 && last < first))
    throw InvalidArgument("control vectors cannot be added to layers " + std::to_string(first) + " to " +
                          std::to_string(last));
  if (first == 0) first = 1;
  if (last == 0) last = hp.layers - 1;
  std::vector<std::vector<float>> sums(static_cast<size_t>(hp.layers));
  std::vector<float> direction(static_cast<size_t>(hp.hidden));
  for (const ControlVectorFile& source : files) {
    if (!std::isfinite(source.scale)) throw InvalidArgument("the scale of " + source.path + " is not finite");
    const std::shared_ptr<const GgufFile> file = GgufFile::open(source.path);
    if (file->tensors().empty()) throw ModelError(source.path + ": a control vector without directions");
    for (const GgufTensor& tensor : file->tensors()) {
      const int32_t layer = layer_of(tensor, hp.layers);
      if (tensor.n_elements() != hp.hidden || tensor.ne[0] != hp.hidden)
        throw ModelError("tensor " + std::string(tensor.name) + " of " + source.path + " has " +
                         std::to_string(tensor.n_elements()) + " values, the model has " + std::to_string(hp.hidden) +
                         " features");
      if (!can_decode(tensor.type))
        throw ModelError("tensor " + std::string(tensor.name) + " of " + source.path + " has type " +
                         std::string(traits(tensor.type).name) + ", which is no type of real values");
      decode(tensor.type, file->data(tensor).data(), direction.data(), hp.hidden);
      std::vector<float>& sum = sums[static_cast<size_t>(layer)];
      sum.resize(direction.size());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += source.scale * direction[i];
    }
  }
  Fnv1a hash;
  directions_.resize(sums.size());
  for (int32_t layer = first; layer <= last && layer < hp.layers; ++layer) {
    const std::vector<float>& sum = sums[static_cast<size_t>(layer)];
    if (sum.empty()) continue;
    directions_[static_cast<size_t>(layer)] = sum;
    hash.add(&layer, sizeof layer);
    hash.add(sum.data(), sum.size() * sizeof(float));
  }
  fingerprint_ = hash.value();
}

}  // namespace v100
