// Reads `<architecture>.*` keys; every value is range-checked before anything is computed from it.
#include "model/hyperparameters.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "model/keys.h"

namespace v100 {

Hyperparameters read_hyperparameters(const Metadata& metadata) {
  constexpr int64_t kMany = std::numeric_limits<int32_t>::max();
  constexpr int64_t kWidest = 1 << 20;
  Hyperparameters hp;
  hp.architecture = metadata.require_string("general.architecture");
  const Keys keys(metadata);

  hp.context_length = keys.required("context_length", 1, kMany);
  hp.hidden = keys.required("embedding_length", 1, kWidest);
  const int32_t blocks = keys.required("block_count", 1, 512);
  hp.mtp_blocks = keys.optional("nextn_predict_layers", 0, 0, 511);
  hp.layers = blocks - hp.mtp_blocks;
  if (hp.layers < 1) throw ModelError(keys.full("nextn_predict_layers") + " leaves no layer of block_count");
  const auto n_tokens = metadata.find_array_size("tokenizer.ggml.tokens");
  const int64_t vocab = n_tokens ? static_cast<int64_t>(*n_tokens) : keys.required("vocab_size", 1, kMany);
  if (vocab < 1 || vocab > (1 << 24))
    throw ModelError("the vocabulary has " + std::to_string(vocab) + " tokens, expected 1 to " +
                     std::to_string(1 << 24));
  hp.vocab = static_cast<int32_t>(vocab);

  const std::vector<int32_t> none(static_cast<size_t>(blocks), 0);
  hp.heads = keys.per_layer("attention.head_count", blocks, none, 0, 4096);
  hp.kv_heads = keys.per_layer("attention.head_count_kv", blocks, hp.heads, 0, 4096);
  hp.ffn = keys.per_layer("feed_forward_length", blocks, none, 0, kWidest);
  // Blocks that do not attend may have no heads.
  const auto attending = std::find_if(hp.heads.begin(), hp.heads.end(), [](int32_t heads) { return heads > 0; });
  const int32_t head_dim = attending == hp.heads.end() ? 0 : hp.hidden / *attending;
  if (head_dim == 0 && !keys.has("attention.key_length"))
    throw ModelError(keys.full("attention.head_count") + " is " + std::to_string(hp.heads[0]) +
                     ", which gives no head size for " + std::to_string(hp.hidden) + " features");
  hp.head_dim_k = keys.optional("attention.key_length", head_dim, 1, 8192);
  hp.head_dim_v = keys.optional("attention.value_length", head_dim, 1, 8192);
  hp.rms_epsilon = static_cast<float>(keys.required_real("attention.layer_norm_rms_epsilon"));
  if (!(hp.rms_epsilon >= 0.0f) || !(hp.rms_epsilon < 1.0f))
    throw ModelError(keys.full("attention.layer_norm_rms_epsilon") + " is outside [0, 1)");
  hp.experts = keys.optional("expert_count", 0, 0, 1024);
  if (hp.experts > 0) hp.experts_used = keys.required("expert_used_count", 1, hp.experts);
  hp.expert_ffn = keys.per_layer("expert_feed_forward_length", blocks, none, 0, kWidest);

  hp.pooling = static_cast<PoolingType>(keys.optional("pooling_type", 0, 0, 4));
  const auto labels = metadata.find_array_size(keys.full("classifier.output_labels"));
  if (labels && (*labels < 1 || *labels > 65536))
    throw ModelError(keys.full("classifier.output_labels") + " has " + std::to_string(*labels) +
                     " labels, expected 1 to 65536");
  if (labels) hp.labels = static_cast<int32_t>(*labels);

  hp.rope.dimension = keys.optional("rope.dimension_count", hp.head_dim_k, 0, hp.head_dim_k);
  if (hp.rope.dimension % 2 != 0) throw ModelError(keys.full("rope.dimension_count") + " is odd");
  hp.rope.freq_base = keys.real("rope.freq_base", 10000.0);
  if (hp.rope.freq_base <= 0) throw ModelError(keys.full("rope.freq_base") + " is not positive");
  hp.rope.scaling_type = metadata.find_string(keys.full("rope.scaling.type")).value_or("linear");
  hp.rope.factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0));
  if (hp.rope.factor < 0) throw ModelError(keys.full("rope.scaling.factor") + " is negative");
  hp.rope.attn_factor = keys.real("rope.scaling.attn_factor", 1.0);
  hp.rope.original_context = keys.optional("rope.scaling.original_context_length", hp.context_length, 1, kMany);
  return hp;
}

std::array<int32_t, 4> read_rope_sections(const Keys& keys) {
  const std::string name = "rope.dimension_sections";
  std::array<int32_t, 4> sections{};
  const std::vector<int32_t> values = keys.per_layer(name, static_cast<int32_t>(sections.size()), {}, 0, 4096);
  if (values.empty()) throw ModelError(keys.full(name) + " is missing");
  std::copy(values.begin(), values.end(), sections.begin());
  if (std::all_of(sections.begin(), sections.end(), [](int32_t pairs) { return pairs == 0; }))
    throw ModelError(keys.full(name) + " has only zeros, expected the pairs of each position channel");
  return sections;
}

void read_shared_mixture(const Keys& keys, Hyperparameters& hp) {
  if (hp.experts == 0) throw ModelError(keys.full("expert_count") + " is 0 or missing, expected at least 1");
  const int32_t shared = keys.optional("expert_shared_feed_forward_length", 0, 0, 1 << 20);
  hp.shared_expert_ffn = shared > 0 ? shared : hp.ffn[0];
  if (hp.shared_expert_ffn < 1)
    throw ModelError(keys.full("expert_shared_feed_forward_length") + " is missing, and so is feed_forward_length");
  for (size_t block = 0; block < hp.expert_ffn.size(); ++block)
    if (hp.expert_ffn[block] == 0) hp.expert_ffn[block] = hp.ffn[block] / hp.experts_used;
}

}  // namespace v100
