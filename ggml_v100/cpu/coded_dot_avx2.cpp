// Products of coded panels in AVX2; see coded_dot.h.
#include "cpu/lanes_avx2.h"
//
#include "cpu/coded_dot.h"

namespace v100::cpu {

constinit const CodedKernels kAvx2CodedKernels = coded_kernels<true>();

}  // namespace v100::cpu
