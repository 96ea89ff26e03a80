// Products of coded panels in AVX-512; see coded_dot.h.
#include "cpu/lanes_avx512.h"
//
#include "cpu/coded_dot.h"

namespace v100::cpu {

constinit const CodedKernels kAvx512CodedKernels = coded_kernels<true>();

}  // namespace v100::cpu
