// What the Cython layer needs from C++ and cannot spell itself: alternatives of a variant, construction behind smart pointers.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/thread_pool.h"
#include "engine/engine.h"
#include "engine/loaded_model.h"
#include "engine/memory_needs.h"
#include "gguf/gguf.h"
#include "gguf/metadata.h"
#include "quants/convert.h"
#include "quants/types.h"
#include "sampling/sampler.h"
#include "speculative/speculator.h"

namespace v100 {

inline const char* version_text() { return V100_VERSION; }
inline const char* commit_text() { return V100_COMMIT; }
inline int build_number() { return V100_BUILD_NUMBER; }
inline const char* compiler_text() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown compiler";
#endif
}

inline uint64_t value_u64(const GgufValue& value) { return std::get<uint64_t>(value); }
inline int64_t value_i64(const GgufValue& value) { return std::get<int64_t>(value); }
inline double value_f64(const GgufValue& value) { return std::get<double>(value); }
inline bool value_bool(const GgufValue& value) { return std::get<bool>(value); }
inline std::string_view value_string(const GgufValue& value) { return std::get<std::string_view>(value); }
inline const GgufArray& value_array(const GgufValue& value) { return std::get<GgufArray>(value); }
inline std::string_view view_of(const std::string& text) { return text; }

inline QuantType quant_type_or_none(const std::string& name, bool& known) {
  const auto type = quant_type_from_name(name);
  known = type.has_value();
  return type.value_or(QuantType::F32);
}

// n_threads 0: one per core. Starting the threads takes about as long as encoding a row.
inline void convert_rows(QuantType source_type, const std::byte* source, QuantType target_type, int64_t n_rows,
                         int64_t n_columns, const float* importance, std::byte* target, int32_t n_threads) {
  ThreadPool threads(n_threads == 0 ? ThreadPool::hardware_threads() : n_threads);
  convert_rows(source_type, source, target_type, n_rows, n_columns, importance, target, threads);
}

inline void override_int(MetadataOverrides& overrides, const std::string& key, int64_t value) {
  overrides[key] = value;
}
inline void override_float(MetadataOverrides& overrides, const std::string& key, double value) {
  overrides[key] = value;
}
inline void override_bool(MetadataOverrides& overrides, const std::string& key, bool value) { overrides[key] = value; }
inline void override_string(MetadataOverrides& overrides, const std::string& key, const std::string& value) {
  overrides[key] = value;
}

inline std::shared_ptr<const LoadedModel> load_model(const ModelParams& params) {
  return std::make_shared<const LoadedModel>(params);
}
inline std::shared_ptr<MemoryNeeds> open_memory_needs(const ModelParams& params) {
  return std::make_shared<MemoryNeeds>(params);
}
inline std::shared_ptr<const LoraAdapter> load_adapter(std::shared_ptr<const LoadedModel> model,
                                                       const std::string& path, int32_t n_threads) {
  return std::make_shared<const LoraAdapter>(std::move(model), path, n_threads);
}
inline std::shared_ptr<const ControlVector> load_control_vector(const LoadedModel& model,
                                                                const std::vector<ControlVectorFile>& files,
                                                                int32_t first, int32_t last) {
  return std::make_shared<const ControlVector>(model, files, first, last);
}
inline std::shared_ptr<const DryBreakers> new_dry_breakers(const std::vector<DryBreaker>& breakers) {
  return std::make_shared<const DryBreakers>(breakers);
}
inline std::shared_ptr<const InfillVocabulary> new_infill_vocabulary(const std::vector<std::string>& texts,
                                                                     const std::vector<int32_t>& end_tokens,
                                                                     int32_t end) {
  return std::make_shared<const InfillVocabulary>(texts, end_tokens, end);
}
inline std::shared_ptr<Sampler> new_sampler(int32_t n_vocab, const SamplerParams& params) {
  return std::make_shared<Sampler>(n_vocab, params);
}
inline std::shared_ptr<Sampler> copy_sampler(const Sampler& other) { return std::make_shared<Sampler>(other); }
inline std::shared_ptr<HiddenPool> new_hidden_pool(PoolingType type, int32_t hidden) {
  return std::make_shared<HiddenPool>(type, hidden);
}
inline std::shared_ptr<Engine> new_engine(std::shared_ptr<const LoadedModel> model, const EngineParams& params) {
  return std::make_shared<Engine>(std::move(model), params);
}
inline std::shared_ptr<SyntheticAcceptance> new_synthetic_acceptance(const std::vector<double>& rates, uint32_t seed) {
  return std::make_shared<SyntheticAcceptance>(SyntheticAcceptance{rates, std::mt19937(seed)});
}
inline std::shared_ptr<Speculator> new_speculator(std::shared_ptr<Engine> target, const SpeculationParams& params,
                                                  std::shared_ptr<Engine> draft) {
  return std::make_shared<Speculator>(std::move(target), params, std::move(draft));
}

}  // namespace v100
