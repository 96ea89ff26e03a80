// One decoder per block format, grouped by family: decode_plain.cpp, decode_small.cpp, decode_k.cpp, decode_iq.cpp.
// Each decodes n_blocks consecutive blocks to n_blocks * block_values floats; blocks may be unaligned.
#pragma once

#include <cstdint>

namespace v100 {

using BlockDecoder = void(const uint8_t* blocks, float* values, int64_t n_blocks);

BlockDecoder decode_f32, decode_f16, decode_bf16, decode_f64;
BlockDecoder decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1, decode_q8_0, decode_q8_1, decode_iq4_nl, decode_mxfp4,
    decode_nvfp4, decode_q1_0, decode_q2_0;
BlockDecoder decode_q2_k, decode_q3_k, decode_q4_k, decode_q5_k, decode_q6_k, decode_q8_k, decode_tq1_0, decode_tq2_0;
BlockDecoder decode_iq1_s, decode_iq1_m, decode_iq2_xxs, decode_iq2_xs, decode_iq2_s, decode_iq3_xxs, decode_iq3_s,
    decode_iq4_xs;

// Decoded value of a 4-bit level of IQ4_NL and IQ4_XS, before the scale.
inline constexpr int8_t kNonLinearLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace v100
