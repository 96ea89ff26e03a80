// A model in memory: file, backend, packed weights. Immutable; engines share it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/hash.h"
#include "gguf/metadata.h"
#include "model/model.h"
#include "ops/ops.h"
#include "parallel/placement.h"

namespace v100 {

struct ModelParams {
  std::string path;
  int32_t n_threads = 0;  // for packing; 0 = all cores
  bool check_tensors = false;
  std::string drafter;    // path of a drafter on hidden states made for the model; empty: none
  bool load_mtp = false;  // blocks of multi-token prediction, where the file has them
  std::string mtp_file;   // path of a file that has them; empty: the model's own
  MetadataOverrides kv_overrides;
  std::string isa;  // "auto" or one of available_isas()
  PlacementParams placement;
};

class LoadedModel {
 public:
  // Throws GgufError, ModelError, OutOfMemory, InvalidArgument.
  explicit LoadedModel(const ModelParams& params);

  const GgufFile& file() const { return *file_; }
  const Metadata& metadata() const { return metadata_; }
  const Placement& placement() const { return placement_; }
  const Backend& backend(int32_t rank = 0) const { return *backends_[static_cast<size_t>(rank)]; }
  // A rank's part of the model. Hyperparameters, ropes and windows are the same in all.
  const TextModel& text(int32_t rank = 0) const { return *texts_[static_cast<size_t>(rank)]; }
  // Of all matrices and embedding tables of a rank.
  const std::vector<std::shared_ptr<const WeightOrigin>>& origins(int32_t rank) const {
    return origins_[static_cast<size_t>(rank)];
  }
  // Bytes of packed weights of each rank.
  const std::vector<size_t>& rank_bytes() const { return rank_bytes_; }
  int64_t n_params() const { return n_params_; }
  uint64_t size_bytes() const { return size_bytes_; }
  std::string file_type_label() const;
  std::string description() const;  // "llama 135M Q4_1"
  // Identifies weights, packed layout and split: state files of another model, backend or placement are refused by it.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::shared_ptr<const GgufFile> file_;
  Metadata metadata_;
  Placement placement_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::unique_ptr<TextModel>> texts_;
  std::vector<std::vector<std::shared_ptr<const WeightOrigin>>> origins_;  // of each rank
  std::vector<size_t> rank_bytes_;
  int64_t n_params_ = 0;
  uint64_t size_bytes_ = 0;
  uint64_t fingerprint_ = 0;
};

// The model's file, joined with that of its prediction blocks where there is one. Throws GgufError, ModelError.
std::shared_ptr<const GgufFile> open_files(const ModelParams& params);
// The drafter's; nullptr: none is wanted. Throws GgufError.
std::shared_ptr<const GgufFile> open_drafter(const ModelParams& params);

// The placement of a model that is about to be loaded. Throws InvalidArgument, ModelError.
Placement place(const ModelParams& params, const GgufFile& file, const Metadata& metadata);

// isa: ModelParams::isa, for CPUs. Throws InvalidArgument, DeviceError.
std::unique_ptr<Backend> create_backend(const std::string& device, const std::string& isa);

// What tells files apart: names, types and shapes of all tensors and the first bytes of each, where another quantisation or
// fine-tune differs.
void add_tensors(Fnv1a& hash, const GgufFile& file, size_t sample_bytes);

// "reference", then the CPU instruction sets of this machine, best last.
std::vector<std::string> available_isas();

}  // namespace v100
