// Which vector instruction sets this processor and its operating system offer.
#pragma once

namespace v100 {

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512_vnni = false;  // AVX-512 F, BW, DQ, VL and VNNI
};

CpuFeatures detect_cpu_features();

}  // namespace v100
