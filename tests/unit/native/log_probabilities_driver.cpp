// Prints log probabilities of a row of f32 logits from stdin: "chosen VALUE", then a "TOKEN VALUE" line per top one.
//
// usage: log_probabilities_driver TOKEN N_TOP < row. Exit status 1 and the message on stderr for an engine error.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "sampling/sampler.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::vector<float> row;
  for (float value; std::fread(&value, sizeof(value), 1, stdin) == 1;) row.push_back(value);
  try {
    const auto result = v100::log_probabilities(std::span<const float>(row), std::atoi(argv[1]), std::atoi(argv[2]));
    std::printf("chosen %.9g\n", static_cast<double>(result.chosen));
    for (const auto& [token, value] : result.top) std::printf("%d %.9g\n", token, static_cast<double>(value));
  } catch (const v100::InvalidArgument& error) {
    std::fprintf(stderr, "InvalidArgument: %s\n", error.what());
    return 1;
  } catch (const v100::Error& error) {
    std::fprintf(stderr, "Error: %s\n", error.what());
    return 1;
  }
  return 0;
}
