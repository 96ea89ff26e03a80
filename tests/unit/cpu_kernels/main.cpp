// Test program of the CPU backend: `cpu_kernels INSTRUCTION_SET THREADS SECTION` runs one section, `cpu_kernels` lists
// what there is to run. Exit status 1 when anything differs from the reference.
#include <cstdlib>

#include "harness.h"

namespace {

using namespace v100::test;

struct Section {
  const char* name;
  void (*run)(Pair& pair, Failures& failures);
};

constexpr Section kSections[] = {
    {"rows", test_rows},
    {"linear_shapes", test_linear_shapes},
    {"linear_extremes", test_linear_extremes},
    {"linear_combinations", test_linear_combinations},
    {"linear_real_sizes", test_linear_real_sizes},
    {"linear_accuracy", test_linear_accuracy},
    {"attention", test_attention},
    {"attention_unseen_keys", test_attention_unseen_keys},
    {"sparse_attention", test_sparse_attention},
    {"streams", test_streams},
    {"block_conv", test_block_conv},
    {"experts", test_experts},
    {"routing", test_routing},
    {"gates", test_gates},
    {"causal_conv", test_causal_conv},
    {"delta_net", test_delta_net},
    {"encoder_searches", test_encoder_searches},
    {"errors", test_errors},
    {"negative_control", test_negative_control},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    for (const std::string& name : v100::available_cpu_instruction_sets())
      for (const Section& section : kSections) std::printf("%s %s\n", name.c_str(), section.name);
    return argc == 1 ? 0 : 2;
  }
  for (const Section& section : kSections) {
    if (std::string(argv[3]) != section.name) continue;
    Pair pair(argv[1], std::atoi(argv[2]));
    Failures failures;
    section.run(pair, failures);
    if (failures.count() > 0) std::fprintf(stderr, "%d failures in %s\n", failures.count(), section.name);
    return failures.count() > 0 ? 1 : 0;
  }
  std::fprintf(stderr, "unknown section %s\n", argv[3]);
  return 2;
}
