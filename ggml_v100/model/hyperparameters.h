// Hyperparameters common to all text architectures, read from metadata and checked once.
#pragma once

#include <array>
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
  // M-RoPE: rotated pairs of each position channel (time, height, width, extra); all 0: text positions only.
  std::array<int32_t, 4> sections{};
};

// How a model's file wants the hidden states of a text turned into its embedding; the values of `pooling_type` in files.
enum class PoolingType : int32_t { none = 0, mean = 1, cls = 2, last = 3, rank = 4 };

struct Hyperparameters {
  std::string architecture;
  int32_t context_length = 0;  // training length
  int32_t hidden = 0;
  int32_t layers = 0;             // of the trunk
  int32_t mtp_blocks = 0;         // blocks after the trunk that predict further tokens
  int32_t vocab = 0;              // length of the token list
  std::vector<int32_t> heads;     // per block, those of multi-token prediction last
  std::vector<int32_t> kv_heads;  // per block
  std::vector<int32_t> ffn;       // per block
  int32_t head_dim_k = 0;
  int32_t head_dim_v = 0;
  float rms_epsilon = 0;
  int32_t experts = 0;              // of a layer; 0: dense
  int32_t experts_used = 0;         // by a token
  std::vector<int32_t> expert_ffn;  // per block, of one expert; 0: not in the file
  int32_t shared_expert_ffn = 0;    // of the expert that sees every token, set by families that have one; 0: none
  RopeHyperparameters rope;
  PoolingType pooling = PoolingType::none;
  int32_t labels = 1;  // of the classification head, where there is one
};

class Keys;

// All throw ModelError naming the key for what is missing or out of range.
Hyperparameters read_hyperparameters(const Metadata& metadata);
// RopeHyperparameters::sections of architectures that need them.
std::array<int32_t, 4> read_rope_sections(const Keys& keys);
// Widths of the experts of architectures with a mixture and one shared expert in every block.
void read_shared_mixture(const Keys& keys, Hyperparameters& hp);

}  // namespace v100
