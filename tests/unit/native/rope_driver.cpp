// Prints the rotary angles of a configuration and the table of rows at the positions on stdin.
//
// usage: rope_driver DIMENSION BASE TYPE FACTOR CONTEXT S0 S1 S2 S3 < positions, four integers a row
// prints "magnitude VALUE", a line "FREQUENCY CHANNEL" for each pair, then for each row a line of cosines and one of sines.
// Exit status 1 and the message on stderr for an engine error.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "model/rope.h"

namespace {

const char* name_of(int32_t v100::RopePosition::* channel) {
  if (channel == &v100::RopePosition::time) return "t";
  if (channel == &v100::RopePosition::height) return "h";
  if (channel == &v100::RopePosition::width) return "w";
  return "e";
}

void print(const float* values, int32_t n) {
  for (int32_t i = 0; i < n; ++i) std::printf("%.9g ", static_cast<double>(values[i]));
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  v100::RopeHyperparameters rope;
  rope.dimension = std::atoi(argv[1]);
  rope.freq_base = std::atof(argv[2]);
  rope.scaling_type = argv[3];
  rope.factor = std::atof(argv[4]);
  rope.original_context = std::atoi(argv[5]);
  for (size_t i = 0; i < rope.sections.size(); ++i) rope.sections[i] = std::atoi(argv[6 + i]);
  std::vector<v100::RopePosition> rows;
  for (v100::RopePosition p; std::scanf("%d %d %d %d", &p.time, &p.height, &p.width, &p.extra) == 4;) rows.push_back(p);
  try {
    const v100::RopeAngles angles = v100::rope_angles(rope, {}, {});
    std::printf("magnitude %.17g\n", angles.magnitude);
    for (size_t p = 0; p < angles.frequency.size(); ++p)
      std::printf("%.17g %s\n", angles.frequency[p], name_of(angles.channel[p]));
    v100::RopeTableBuffer buffer;
    const v100::RopeTable table = buffer.fill(angles, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      print(table.cosine + r * static_cast<size_t>(table.pairs), table.pairs);
      print(table.sine + r * static_cast<size_t>(table.pairs), table.pairs);
    }
  } catch (const v100::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
