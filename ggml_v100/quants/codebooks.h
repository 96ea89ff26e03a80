// Codebooks of the IQ formats: vectors of small integers that an index in the block selects.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace v100 {

template <size_t rows, size_t values_per_row>
using Codebook = std::array<std::array<int8_t, values_per_row>, rows>;

extern const Codebook<256, 8> kIq2XxsCodebook;
extern const Codebook<512, 8> kIq2XsCodebook;
extern const Codebook<1024, 8> kIq2SCodebook;
extern const Codebook<256, 4> kIq3XxsCodebook;
extern const Codebook<512, 4> kIq3SCodebook;
extern const Codebook<2048, 8> kIq1Codebook;  // IQ1_S and IQ1_M

}  // namespace v100
