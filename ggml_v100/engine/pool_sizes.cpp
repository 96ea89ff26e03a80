// Sizes of the pools of pages.
#include "engine/pool_sizes.h"

#include "base/error.h"

namespace v100 {

int32_t rounded_context(const TextModel& model, int32_t n_ctx) {
  const int64_t tokens = n_ctx > 0 ? n_ctx : model.hyperparameters().context_length;
  return static_cast<int32_t>((tokens + kPageTokens - 1) / kPageTokens * kPageTokens);
}

int32_t pool_pages(int32_t n_ctx, int32_t n_seq_max) { return n_ctx / kPageTokens + (n_seq_max > 1 ? n_seq_max : 0); }

int32_t kept_window(std::span<const TextModel* const> texts, bool swa_full) {
  if (swa_full) return 0;
  for (const TextModel* text : texts)
    for (const KvShape& shape : text->kv_shapes())
      if (shape.is_windowed) return text->sliding_window();
  return 0;
}

int32_t window_pages(int32_t window) { return window / kPageTokens + 2; }

int32_t window_pool_pages(int32_t window, int32_t n_pages, int32_t n_seq_max) {
  return window > 0 ? n_pages + n_seq_max * window_pages(window) : 0;
}

QuantType cache_type(const char* field, const std::string& name) {
  const auto type = quant_type_from_name(name);
  if (!type) throw InvalidArgument(std::string(field) + " is '" + name + "', which is not a tensor type");
  return *type;
}

std::vector<KvShape> typed_shapes(const TextModel& text, QuantType type_k, QuantType type_v, bool keeps_windows) {
  std::vector<KvShape> shapes = text.kv_shapes();
  for (KvShape& shape : shapes) {
    shape.type_k = type_k;
    // An index cache has keys only: those of tokens in the place of values.
    shape.type_v = shape.block > 0 ? type_k : type_v;
    if (shape.holds_states)
      for (QuantType* type : {&shape.type_k, &shape.type_v})
        if (traits(*type).is_quantized) *type = QuantType::F16;
    shape.is_windowed = shape.is_windowed && keeps_windows;
  }
  return shapes;
}

}  // namespace v100
