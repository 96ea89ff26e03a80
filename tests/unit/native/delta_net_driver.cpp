// Runs one sequence through the plain gated delta nets.
// Arguments: KEY_HEADS VALUE_HEADS HEAD_DIM ROWS EPS FORM, FORM being "recurrent" or the chunk of the chunked form.
// Standard input, f32: a, dt_bias [value_heads], qkv, beta, alpha [rows, ...], the record of the memories.
// Standard output, f32: y [rows, value_size], the record.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/delta_net.h"
#include "ops/delta_net_chunked.h"

namespace {

using namespace v100;

std::vector<float> read(int32_t rows, int32_t features) {
  std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(features));
  if (std::fread(values.data(), sizeof(float), values.size(), stdin) != values.size())
    throw std::runtime_error("the input is too short");
  return values;
}

VectorWeight read_vector(int32_t size) {
  const std::vector<float> values = read(1, size);
  std::shared_ptr<float[]> data(new float[values.size()]);
  std::copy(values.begin(), values.end(), data.get());
  return {data, size};
}

void write(const std::vector<float>& values) {
  if (std::fwrite(values.data(), sizeof(float), values.size(), stdout) != values.size())
    throw std::runtime_error("cannot write");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  DeltaNet w;
  w.key_heads = std::atoi(argv[1]);
  w.value_heads = std::atoi(argv[2]);
  w.head_dim = std::atoi(argv[3]);
  const int32_t rows = std::atoi(argv[4]);
  const float eps = std::strtof(argv[5], nullptr);
  const std::string form = argv[6];
  w.a = read_vector(w.value_heads);
  w.dt_bias = read_vector(w.value_heads);
  const int32_t width = 2 * w.key_size() + w.value_size();
  std::vector<float> qkv_values = read(rows, width), beta_values = read(rows, w.value_heads),
                     alpha_values = read(rows, w.value_heads), state = read(w.value_size(), w.head_dim);
  std::vector<float> y_values(static_cast<size_t>(rows) * static_cast<size_t>(w.value_size()));
  const Tensor qkv{qkv_values.data(), rows, width}, beta{beta_values.data(), rows, w.value_heads},
      alpha{alpha_values.data(), rows, w.value_heads}, y{y_values.data(), rows, w.value_size()};
  const StateRecords memory{state.data(), static_cast<int64_t>(state.size())};
  const SequenceRows sequence{.rows = {0, rows}, .pages = {}, .tokens = {}, .state_from = 0, .state_to = 0};
  if (form == "recurrent") {
    DeltaNetMemory head_memories(w, memory, sequence);
    for (int32_t r = 0; r < rows; ++r) head_memories.step(qkv.row(r), beta.row(r), alpha.row(r), eps, y.row(r));
    head_memories.store(memory, sequence);
  } else {
    delta_net_chunked_sequence(qkv, beta, alpha, w, eps, sequence, memory, y, std::stoi(form));
  }
  write(y_values);
  write(state);
}
