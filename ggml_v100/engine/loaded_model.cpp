// Loading in one direction: open and validate the file, choose the backend, let the architecture pack its tensors.
#include "engine/loaded_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "engine/rank_models.h"
#include "model/prediction_file.h"
#include "ops/reference.h"
#include "quants/file_types.h"

namespace v100 {

namespace {

uint64_t identify(const GgufFile& file, const Backend& backend, const Placement& placement) {
  constexpr size_t kSampleBytes = 256;
  Fnv1a hash;
  hash.add(backend.name());
  if (placement.ranks() > 1) hash.add(placement.text());
  add_tensors(hash, file, kSampleBytes);
  return hash.value();
}

// "135M", "1.1B": three significant digits at most, as model names are written.
std::string size_text(int64_t n_params) {
  char text[32];
  const auto n = static_cast<double>(n_params);
  if (n >= 1e12)
    std::snprintf(text, sizeof text, "%.2fT", n / 1e12);
  else if (n >= 1e9)
    std::snprintf(text, sizeof text, "%.2fB", n / 1e9);
  else if (n >= 1e6)
    std::snprintf(text, sizeof text, "%.2fM", n / 1e6);
  else
    std::snprintf(text, sizeof text, "%.2fK", n / 1e3);
  return text;
}

}  // namespace

std::shared_ptr<const GgufFile> open_files(const ModelParams& params) {
  auto file = GgufFile::open(params.path);
  return params.mtp_file.empty() ? file : with_prediction_blocks(file, GgufFile::open(params.mtp_file));
}

std::shared_ptr<const GgufFile> open_drafter(const ModelParams& params) {
  return params.drafter.empty() ? nullptr : GgufFile::open(params.drafter);
}

std::unique_ptr<Backend> create_backend(const std::string& device, const std::string& isa) {
  if (const auto ordinal = cuda_ordinal(device)) return create_cuda_backend(*ordinal);
  if (isa == "reference") return create_reference_backend();
  return create_cpu_backend(isa == "auto" ? available_cpu_instruction_sets().back() : isa);
}

// Only a model on one device can be placed without knowing it: then what is wrong with it is said while it is loaded.
Placement place(const ModelParams& params, const GgufFile& file, const Metadata& metadata) {
  const PlacementParams& placement = params.placement;
  if (placement.devices.size() < 2 && !placement.device_layers && placement.overrides.empty())
    return Placement(placement);
  const Hyperparameters hp = read_hyperparameters(metadata);
  PlacedModel model{hp.layers, params.load_mtp ? hp.mtp_blocks : 0, {}};
  for (const GgufTensor& tensor : file.tensors()) model.tensors.emplace_back(tensor.name);
  return Placement(placement, model);
}

void add_tensors(Fnv1a& hash, const GgufFile& file, size_t sample_bytes) {
  for (const GgufTensor& tensor : file.tensors()) {
    hash.add(tensor.name);
    hash.add(&tensor.type, sizeof tensor.type);
    hash.add(tensor.ne, sizeof tensor.ne);
    const auto data = file.data(tensor);
    hash.add(data.data(), std::min(data.size(), sample_bytes));
  }
}

LoadedModel::LoadedModel(const ModelParams& params)
    : file_(open_files(params)), metadata_(file_, params.kv_overrides), placement_(place(params, *file_, metadata_)) {
  if (params.n_threads < 0)
    throw InvalidArgument("number of threads is " + std::to_string(params.n_threads) + ", expected 0 or more");
  ThreadPool pool(params.n_threads > 0 ? params.n_threads : ThreadPool::hardware_threads());
  std::vector<const Backend*> backends;
  for (const std::string& device : placement_.devices()) {
    backends_.push_back(create_backend(device, params.isa));
    backends.push_back(backends_.back().get());
  }
  const auto drafter = open_drafter(params);
  const ModelFiles files{file_, drafter, params.load_mtp, params.check_tensors};
  for (RankModel& rank : load_ranks(files, metadata_, placement_, backends, pool, LoadFor::pack)) {
    texts_.push_back(std::move(rank.text));
    origins_.push_back(std::move(rank.origins));
    rank_bytes_.push_back(rank.packed_bytes);
  }
  fingerprint_ = identify(*file_, backend(), placement_);
  // Saved sequences hold the drafter's keys and values too.
  if (drafter != nullptr) fingerprint_ ^= identify(*drafter, backend(placement_.rank_of_drafter()), placement_);
  for (const GgufTensor& tensor : file_->tensors()) {
    n_params_ += tensor.n_elements();
    size_bytes_ += tensor.n_bytes;
  }
}

std::string LoadedModel::file_type_label() const {
  std::vector<QuantType> types;
  for (const GgufTensor& tensor : file_->tensors()) types.push_back(tensor.type);
  return describe_file_type(metadata_.find_int("general.file_type"), types);
}

std::string LoadedModel::description() const {
  const std::string size = metadata_.find_string("general.size_label").value_or(size_text(n_params_));
  return text().hyperparameters().architecture + " " + size + " " + file_type_label();
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names{"reference"};
  for (const std::string& name : available_cpu_instruction_sets()) names.push_back(name);
  return names;
}

}  // namespace v100
