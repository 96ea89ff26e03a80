// Loading of adapters: pairs are found and checked against the model's file, then cut as each rank's matrices are.
#include "engine/lora_adapter.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "gguf/message.h"
#include "quants/decode.h"

namespace v100 {

namespace {

struct Pair {
  const GgufTensor* a = nullptr;
  const GgufTensor* b = nullptr;
};

std::string shape_text(const GgufTensor& tensor) {
  std::string text = "[";
  for (int32_t i = 0; i < std::max(tensor.n_dims, 1); ++i) text += (i ? ", " : "") + std::to_string(tensor.ne[i]);
  return text + "]";
}

void require_metadata(const Metadata& metadata, const LoadedModel& model) {
  const auto require = [&](const char* key, const std::string& expected) {
    const std::string found = metadata.require_string(key);
    if (found != expected)
      throw ModelError(std::string(key) + " is " + quoted(found) + ", expected '" + expected + "'");
  };
  require("general.type", "adapter");
  require("adapter.type", "lora");
  const std::string& architecture = model.text().hyperparameters().architecture;
  const std::string found = metadata.require_string("general.architecture");
  if (found != architecture)
    throw ModelError("the adapter is for architecture " + quoted(found) + ", the model has '" + architecture + "'");
  if (metadata.has("adapter.alora.invocation_tokens"))
    throw ModelError("adapter.alora.invocation_tokens: activated adapters (aLoRA) are not supported");
}

// Of each adapted tensor, by its name in the model.
std::map<std::string, Pair, std::less<>> pair_up(const GgufFile& file) {
  std::map<std::string, Pair, std::less<>> pairs;
  for (const GgufTensor& tensor : file.tensors()) {
    constexpr std::string_view kA = ".lora_a", kB = ".lora_b";
    const bool is_a = tensor.name.ends_with(kA);
    if (!is_a && !tensor.name.ends_with(kB))
      throw ModelError("tensor " + std::string(tensor.name) + " is neither a .lora_a nor a .lora_b");
    Pair& pair = pairs[std::string(tensor.name.substr(0, tensor.name.size() - kA.size()))];
    (is_a ? pair.a : pair.b) = &tensor;
    if (!can_decode(tensor.type))
      throw ModelError("tensor " + std::string(tensor.name) + " has type " + std::string(traits(tensor.type).name) +
                       ", which is not a weight type");
    if (tensor.n_elements() == 0) throw ModelError("tensor " + std::string(tensor.name) + " is empty");
  }
  if (pairs.empty()) throw ModelError("the adapter has no tensors");
  for (const auto& [name, pair] : pairs)
    if (pair.a == nullptr || pair.b == nullptr)
      throw ModelError("tensor " + name + (pair.a == nullptr ? ".lora_a" : ".lora_b") + " is missing");
  return pairs;
}

[[noreturn]] void refuse_shapes(const std::string& name, const Pair& pair, const GgufTensor& base) {
  throw ModelError("tensors " + name + ".lora_a " + shape_text(*pair.a) + " and .lora_b " + shape_text(*pair.b) +
                   " do not adapt " + shape_text(base));
}

// A: [in, R] of each matrix, B: [R, out]; or, of embeddings, A [R, vocab] and B [R, features].
void require_shapes(const std::string& name, const Pair& pair, const GgufTensor& base, bool is_looked_up) {
  const int64_t *a = pair.a->ne, *b = pair.b->ne;
  const int64_t rank = b[0];
  const bool fits = is_looked_up ? a[0] == rank && a[1] == base.ne[1] && b[1] == base.ne[0] && base.ne[2] == 1
                                 : a[0] == base.ne[0] && a[1] == rank && b[1] == base.ne[1];
  if (!fits || a[2] != base.ne[2] || b[2] != base.ne[2] || a[3] != 1 || b[3] != 1 || base.ne[3] != 1 ||
      rank > std::numeric_limits<int32_t>::max())
    refuse_shapes(name, pair, base);
}

bool is_float(QuantType type) { return type == QuantType::F32 || type == QuantType::F16 || type == QuantType::BF16; }

// Packs parts of an adapter's matrices for one rank.
class Packer {
 public:
  Packer(const GgufFile& file, const Backend& backend, ThreadPool& pool)
      : file_(file), backend_(backend), pool_(pool) {}

  // The given rows and columns of matrix number `matrix`; quantised types become F32.
  std::shared_ptr<const LinearWeight> pack(const GgufTensor& tensor, int32_t matrix, std::span<const RowRange> rows,
                                           std::span<const RowRange> columns) const {
    const QuantTraits& type = traits(tensor.type);
    const int64_t all = tensor.ne[0], all_bytes = row_bytes(type, all);
    const std::byte* first = file_.data(tensor).data() + matrix * tensor.ne[1] * all_bytes;
    const bool keeps_type = is_float(tensor.type);
    const size_t value_bytes = keeps_type ? static_cast<size_t>(type.block_bytes) : sizeof(float);
    std::vector<std::byte> picked;
    std::vector<float> decoded(keeps_type ? 0 : static_cast<size_t>(all));
    for (const RowRange& run : rows)
      for (int32_t row = run.begin; row < run.end; ++row) {
        const std::byte* values = first + row * all_bytes;
        if (!keeps_type) {
          decode(tensor.type, values, decoded.data(), all);
          values = reinterpret_cast<const std::byte*>(decoded.data());
        }
        for (const RowRange& part : columns)
          picked.insert(picked.end(), values + static_cast<size_t>(part.begin) * value_bytes,
                        values + static_cast<size_t>(part.end) * value_bytes);
      }
    return backend_.pack_linear(keeps_type ? tensor.type : QuantType::F32, total(columns), total(rows), picked.data(),
                                pool_);
  }

 private:
  const GgufFile& file_;
  const Backend& backend_;
  ThreadPool& pool_;
};

LowRank load_part(const std::shared_ptr<const GgufFile>& file, const Packer& packer, const Pair& pair,
                  const WeightOrigin& origin) {
  LowRank part;
  part.rank = static_cast<int32_t>(pair.b->ne[0]);
  const RowRange whole[] = {{0, part.rank}};
  if (origin.is_looked_up) {
    const RowRange features[] = {{0, static_cast<int32_t>(pair.b->ne[1])}};
    part.table = {file, file->data(*pair.a).data(), pair.a->type, static_cast<int32_t>(pair.a->ne[1]), part.rank, {}};
    part.b.weight = packer.pack(*pair.b, 0, features, whole);
  } else if (origin.stack == 0) {
    part.a.weight = packer.pack(*pair.a, 0, whole, origin.columns);
    part.b.weight = packer.pack(*pair.b, 0, origin.rows, whole);
  } else {
    for (ExpertLinear* stack : {&part.experts_a, &part.experts_b})
      stack->experts.resize(static_cast<size_t>(origin.stack));
    part.experts_a.in_features = total(origin.columns), part.experts_a.out_features = part.rank;
    part.experts_b.in_features = part.rank, part.experts_b.out_features = total(origin.rows);
    for (int32_t e = origin.experts.begin; e < origin.experts.end; ++e) {
      part.experts_a.experts[static_cast<size_t>(e)] = packer.pack(*pair.a, e, whole, origin.columns);
      part.experts_b.experts[static_cast<size_t>(e)] = packer.pack(*pair.b, e, origin.rows, whole);
    }
  }
  return part;
}

// Whether the tensor belongs to a block that the model was loaded without (multi-token prediction).
bool is_left_out(const std::string& name, const LoadedModel& model) {
  constexpr std::string_view kPrefix = "blk.";
  int32_t layer = -1;
  if (name.starts_with(kPrefix)) std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer >= model.text().hyperparameters().layers;
}

uint64_t identify(const GgufFile& file, float alpha) {
  constexpr size_t kSampleBytes = 4096;
  Fnv1a hash;
  hash.add(&alpha, sizeof alpha);
  add_tensors(hash, file, kSampleBytes);
  return hash.value();
}

}  // namespace

LoraAdapter::LoraAdapter(std::shared_ptr<const LoadedModel> model, const std::string& path, int32_t n_threads)
    : model_(std::move(model)), parts_(static_cast<size_t>(model_->placement().ranks())) {
  const std::shared_ptr<const GgufFile> file = GgufFile::open(path);
  try {
    load(file, n_threads);
  } catch (const ModelError& error) {
    throw ModelError(path + ": " + error.what());
  }
}

void LoraAdapter::load(const std::shared_ptr<const GgufFile>& file, int32_t n_threads) {
  const Metadata metadata(file, {});
  require_metadata(metadata, *model_);
  const double alpha = metadata.find_float("adapter.lora.alpha").value_or(0.0);
  if (!std::isfinite(alpha)) throw ModelError("adapter.lora.alpha is not finite");
  task_name_ = metadata.find_string("adapter.lora.task_name").value_or("");
  prompt_prefix_ = metadata.find_string("adapter.lora.prompt_prefix").value_or("");
  fingerprint_ = identify(*file, static_cast<float>(alpha));

  ThreadPool pool(n_threads > 0 ? n_threads : ThreadPool::hardware_threads());
  for (const auto& [name, pair] : pair_up(*file)) {
    const GgufTensor* base = model_->file().find_tensor(name);
    if (base == nullptr) throw ModelError("tensor " + name + " of the adapter is not in the model");
    bool is_used = is_left_out(name, *model_);
    // Embeddings that are the output matrix as well are adapted where they are looked up, see the header.
    bool is_looked_up = false;
    for (const auto& origin : model_->origins(0))
      is_looked_up = is_looked_up || (origin->tensor == name && origin->is_looked_up);
    require_shapes(name, pair, *base, is_looked_up);
    for (int32_t rank = 0; rank < model_->placement().ranks(); ++rank) {
      const Packer packer(*file, model_->backend(rank), pool);
      for (const auto& origin : model_->origins(rank)) {
        if (origin->tensor != name || origin->is_looked_up != is_looked_up) continue;
        is_used = true;
        if (total(origin->rows) == 0 || total(origin->columns) == 0) continue;
        LowRank part = load_part(file, packer, pair, *origin);
        part.alpha = static_cast<float>(alpha);
        parts_[static_cast<size_t>(rank)].emplace(origin.get(), std::move(part));
      }
    }
    if (!is_used) throw ModelError("tensor " + name + " is not a matrix that can be adapted");
  }
}

std::vector<float> normalised_scales(std::span<const float> scales, size_t n_adapters) {
  if (!scales.empty() && scales.size() != n_adapters)
    throw InvalidArgument(std::to_string(scales.size()) + " scales for " + std::to_string(n_adapters) + " adapters");
  bool has_any = false;
  for (const float scale : scales) {
    if (!std::isfinite(scale)) throw InvalidArgument("the scale of an adapter is not finite");
    has_any = has_any || scale != 0.0f;
  }
  if (!has_any) return {};
  std::vector<float> normal(scales.begin(), scales.end());
  for (float& scale : normal) scale += 0.0f;  // -0 is 0
  return normal;
}

}  // namespace v100
