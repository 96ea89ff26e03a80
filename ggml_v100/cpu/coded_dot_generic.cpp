// Products of coded panels in plain C++; see coded_dot.h.
#include "cpu/lanes_generic.h"
//
#include "cpu/coded_dot.h"

namespace v100::cpu {

constinit const CodedKernels kGenericCodedKernels = coded_kernels<false>();

}  // namespace v100::cpu
