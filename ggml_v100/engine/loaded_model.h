// A model in memory: file, backend, packed weights. Immutable; engines share it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gguf/metadata.h"
#include "model/model.h"
#include "ops/ops.h"

namespace v100 {

struct ModelParams {
  std::string path;
  int32_t n_threads = 0;  // for packing; 0 = all cores
  bool check_tensors = false;
  bool load_mtp = false;  // blocks of multi-token prediction, where the file has them
  MetadataOverrides kv_overrides;
  std::string isa;  // "auto" or one of available_isas()
};

class LoadedModel {
 public:
  // Throws GgufError, ModelError, OutOfMemory, InvalidArgument.
  explicit LoadedModel(const ModelParams& params);

  const GgufFile& file() const { return *file_; }
  const Metadata& metadata() const { return metadata_; }
  const Backend& backend() const { return *backend_; }
  const TextModel& text() const { return *text_; }
  int64_t n_params() const { return n_params_; }
  uint64_t size_bytes() const { return size_bytes_; }
  std::string file_type_label() const;
  std::string description() const;  // "llama 135M Q4_1"
  // Identifies weights and packed layout: state files of another model or backend are refused by it.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::shared_ptr<const GgufFile> file_;
  Metadata metadata_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<TextModel> text_;
  int64_t n_params_ = 0;
  uint64_t size_bytes_ = 0;
  uint64_t fingerprint_ = 0;
};

// "reference", then the CPU instruction sets of this machine, best last.
std::vector<std::string> available_isas();

}  // namespace v100
