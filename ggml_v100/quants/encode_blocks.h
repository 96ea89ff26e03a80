// One encoder per block format, grouped by family: encode_plain.cpp, encode_small.cpp, encode_k.cpp, encode_iq.cpp,
// encode_iq1.cpp. Each encodes one row of n values (a multiple of block_values); importance is nullptr or n weights.
#pragma once

#include <cstdint>

namespace v100 {

using RowEncoder = void(const float* values, int64_t n, const float* importance, uint8_t* blocks);

RowEncoder encode_f32, encode_f16, encode_bf16, encode_f64;
RowEncoder encode_q4_0, encode_q4_1, encode_q5_0, encode_q5_1, encode_q8_0, encode_iq4_nl, encode_mxfp4, encode_nvfp4,
    encode_q1_0, encode_q2_0;
RowEncoder encode_q2_k, encode_q3_k, encode_q4_k, encode_q5_k, encode_q6_k, encode_tq1_0, encode_tq2_0, encode_iq4_xs;
RowEncoder encode_iq1_s, encode_iq1_m, encode_iq2_xxs, encode_iq2_xs, encode_iq2_s, encode_iq3_xxs, encode_iq3_s;

}  // namespace v100
