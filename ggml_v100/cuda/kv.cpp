#include "cuda/kv.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "base/error.h"

namespace v100::cuda {

namespace {

constexpr std::array<int32_t, 5> kHeadSizes{64, 80, 96, 128, 256};
constexpr std::array<int32_t, 3> kCountedHeadSizes{64, 128, 256};

constexpr int32_t kMostIndexFeatures = 256;

struct TypeEntry {
  QuantType type;
  KvType kernel_type;
};
constexpr std::array<TypeEntry, 6> kTypes{{
    {QuantType::F16, kKvF16},
    {QuantType::Q8_0, kKvQ8_0},
    {QuantType::Q4_0, kKvQ4_0},
    {QuantType::Q4_1, kKvQ4_1},
    {QuantType::Q5_0, kKvQ5_0},
    {QuantType::Q5_1, kKvQ5_1},
}};

KvType kv_type(QuantType type) {
  std::string names;
  for (const TypeEntry& entry : kTypes) {
    if (entry.type == type) return entry.kernel_type;
    names += (names.empty() ? "" : ", ") + std::string(traits(entry.type).name);
  }
  throw InvalidArgument("a KV cache of type " + std::string(traits(type).name) +
                        " cannot be on a CUDA device; expected " + names);
}

KvCache cache_of(const KvShape& shape) {
  KvCache cache{};
  cache.kv_heads = shape.kv_heads;
  cache.head_dim = shape.head_dim_k;
  cache.type_k = kv_type(shape.type_k);
  cache.type_v = kv_type(shape.type_v);
  cache.group = shape.group;
  cache.skew = shape.skew;
  cache.block = shape.block;
  return cache;
}

}  // namespace

bool is_counted(const KvCache& cache) { return std::max(cache.type_k, cache.type_v) >= kKvQ4_1; }

size_t checked_page_bytes(const KvShape& shape) {
  if (shape.head_dim_k != shape.head_dim_v)
    throw InvalidArgument("keys of " + std::to_string(shape.head_dim_k) + " and values of " +
                          std::to_string(shape.head_dim_v) + " features cannot be on a CUDA device; expected the same");
  if (shape.block > 0) {
    if (shape.head_dim_k > kMostIndexFeatures)
      throw InvalidArgument("index keys of " + std::to_string(shape.head_dim_k) +
                            " features cannot be on a CUDA device; expected at most " +
                            std::to_string(kMostIndexFeatures));
  } else {
    const bool counted = is_counted(cache_of(shape));
    const auto known = counted ? std::span<const int32_t>(kCountedHeadSizes) : std::span<const int32_t>(kHeadSizes);
    if (std::ranges::find(known, shape.head_dim_k) == known.end()) {
      std::string sizes;
      for (const int32_t size : known) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
      throw InvalidArgument("heads of " + std::to_string(shape.head_dim_k) + " features cannot be on a CUDA device" +
                            (counted ? " with q4_1, q5_0 or q5_1" : "") + "; expected " + sizes);
    }
  }
  for (const QuantType type : {shape.type_k, shape.type_v})
    if (traits(type).is_quantized && shape.head_dim_k % traits(type).block_values != 0)
      throw InvalidArgument("heads of " + std::to_string(shape.head_dim_k) + " features are no whole blocks of " +
                            std::string(traits(type).name) + ", the type of the KV cache");
  return static_cast<size_t>(kv_page_bytes(cache_of(shape)));
}

KvCache kv_cache(const KvLayer& layer) {
  KvCache cache = cache_of(layer.shape);
  cache.pages = reinterpret_cast<uint8_t*>(layer.pages);
  cache.page_bytes = static_cast<int64_t>(layer.page_stride_bytes);
  return cache;
}

}  // namespace v100::cuda
