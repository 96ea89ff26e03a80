// Processor detection through the compiler's run-time support, which also asks whether the system saves the registers.
#include "base/cpu_features.h"

namespace v100 {

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  features.avx512_vnni = features.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
#endif
  return features;
}

}  // namespace v100
