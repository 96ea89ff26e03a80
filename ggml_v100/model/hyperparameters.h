// Hyperparameters common to all text architectures, read from metadata and checked once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/metadata.h"

namespace v100 {

// How the file wants positions scaled; the user's settings may replace each (model/rope.h).
struct RopeHyperparameters {
  int32_t dimension = 0;  // rotated features of a head
  double freq_base = 10000.0;
  std::string scaling_type = "linear";
  double factor = 0.0;       // 0: no scaling
  double attn_factor = 1.0;  // multiplies the rotation's magnitude
  int32_t original_context = 0;
};

// How a model's file wants the hidden states of a text turned into its embedding; the values of `pooling_type` in files.
enum class PoolingType : int32_t { none = 0, mean = 1, cls = 2, last = 3, rank = 4 };

struct Hyperparameters {
  std::string architecture;
  int32_t context_length = 0;  // training length
  int32_t hidden = 0;
  int32_t layers = 0;
  int32_t vocab = 0;              // length of the token list
  std::vector<int32_t> heads;     // per layer
  std::vector<int32_t> kv_heads;  // per layer
  std::vector<int32_t> ffn;       // per layer
  int32_t head_dim_k = 0;
  int32_t head_dim_v = 0;
  float rms_epsilon = 0;
  int32_t experts = 0;              // of a layer; 0: dense
  int32_t experts_used = 0;         // by a token
  std::vector<int32_t> expert_ffn;  // per layer, of one expert; 0: not in the file
  RopeHyperparameters rope;
  PoolingType pooling = PoolingType::none;
  int32_t labels = 1;  // of the classification head, where there is one
};

// Throws ModelError naming the key for what is missing or out of range.
Hyperparameters read_hyperparameters(const Metadata& metadata);

}  // namespace v100
