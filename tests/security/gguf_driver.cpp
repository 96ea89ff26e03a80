// Opens hostile GGUF files and decodes random blocks, to be compiled with sanitizers. Prints one line per input,
// "OK ..." or "GgufError: ...". All else (a crash, another exception, a sanitizer report) is a fault of the reader.
//
//   gguf_driver open FILE...        opens files, splits included; the last line says how much the process grew:
//                                   "peak growth: N KiB"
//   gguf_driver stream SCRATCH      reads records from stdin (flag byte "metadata only", u64 length, content), writes
//                                   each to SCRATCH and opens it; also parses it from a heap block of exactly its size,
//                                   where an out-of-bounds read cannot hide in the rest of a mapped page
//   gguf_driver blocks SEED ROUNDS  decodes and checks random bytes as every tensor type
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "gguf/container.h"
#include "gguf/gguf.h"
#include "quants/decode.h"

namespace {

bool is_integer_type(v100::QuantType type) { return type >= v100::QuantType::I8 && type <= v100::QuantType::I64; }

void decode_blocks(v100::QuantType type, const std::byte* blocks, int64_t n_values) {
  if (is_integer_type(type)) return;
  const auto values = std::make_unique<float[]>(static_cast<size_t>(n_values));
  v100::decode(type, blocks, values.get(), n_values);
}

// Touches every byte that the file offers.
std::string walk(const v100::GgufFile& file) {
  uint64_t sum = 0;
  const auto add = [&sum](const void* data, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; ++i) sum += static_cast<const unsigned char*>(data)[i];
  };
  for (const v100::GgufKeyValue& entry : file.metadata()) {
    add(entry.key.data(), entry.key.size());
    if (const auto* text = std::get_if<std::string_view>(&entry.value)) add(text->data(), text->size());
    if (const auto* array = std::get_if<v100::GgufArray>(&entry.value)) {
      add(array->bytes.data(), array->bytes.size());
      for (const std::string_view text : array->strings) add(text.data(), text.size());
    }
    if (file.find(entry.key) != &entry) throw std::runtime_error("find() does not find a key of the file");
  }
  std::string not_finite;
  uint64_t n_bytes = 0;
  for (const v100::GgufTensor& tensor : file.tensors()) {
    if (file.find_tensor(tensor.name) != &tensor)
      throw std::runtime_error("find_tensor() does not find a tensor of the file");
    const std::span<const std::byte> data = file.data(tensor);
    n_bytes += data.size();
    add(data.data(), data.size());
    if (!v100::all_finite(tensor.type, data.data(), tensor.n_elements())) not_finite += " " + std::string(tensor.name);
    decode_blocks(tensor.type, data.data(), tensor.n_elements());
    file.release(tensor);
    add(data.data(), data.size());  // released pages can be read again
  }
  return "OK " + std::to_string(file.metadata().size()) + " keys, " + std::to_string(file.tensors().size()) +
         " tensors, " + std::to_string(n_bytes) + " data bytes, sum " + std::to_string(sum) +
         (not_finite.empty() ? "" : ", not finite:" + not_finite);
}

// A file opened for its metadata has no data to walk.
std::string outcome_of_file(const std::string& path, bool metadata_only) {
  try {
    const auto file = v100::GgufFile::open(path, metadata_only);
    return metadata_only ? "OK metadata" : walk(*file);
  } catch (const v100::GgufError& error) {
    return std::string("GgufError: ") + error.what();
  }
}

std::string outcome_of_bytes(std::span<const std::byte> bytes, const std::string& path, bool metadata_only) {
  try {
    v100::parse_container(bytes, path, 0, !metadata_only);
    return "OK";
  } catch (const v100::GgufError& error) {
    return std::string("GgufError: ") + error.what();
  }
}

long peak_kib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

void run_open(int n_files, char** files) {
  const long before = peak_kib();
  for (int i = 0; i < n_files; ++i) std::puts(outcome_of_file(files[i], false).c_str());
  std::printf("peak growth: %ld KiB\n", peak_kib() - before);
}

void write_file(const std::string& path, const std::byte* data, size_t n_bytes) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "wb"), std::fclose);
  if (!file || std::fwrite(data, 1, n_bytes, file.get()) != n_bytes) throw std::runtime_error("cannot write " + path);
}

void run_stream(const std::string& scratch) {
  unsigned char metadata_only = 0;
  while (std::fread(&metadata_only, 1, 1, stdin) == 1) {
    uint64_t n_bytes = 0;
    if (std::fread(&n_bytes, sizeof n_bytes, 1, stdin) != 1) throw std::runtime_error("stdin ends inside a record");
    const auto content = std::make_unique<std::byte[]>(n_bytes);
    if (std::fread(content.get(), 1, n_bytes, stdin) != n_bytes) throw std::runtime_error("stdin ends inside a record");
    write_file(scratch, content.get(), n_bytes);
    const std::string of_file = outcome_of_file(scratch, metadata_only != 0);
    const std::string of_bytes = outcome_of_bytes({content.get(), n_bytes}, scratch, metadata_only != 0);
    // Opening a file checks more (its split keys), never less.
    const bool agree = of_bytes == "OK" ? of_file.starts_with("OK") || of_file.find("split") != std::string::npos
                                        : of_file == of_bytes;
    if (!agree) throw std::runtime_error("file: " + of_file + "; bytes: " + of_bytes);
    std::puts(of_file.c_str());
  }
}

void run_blocks(uint32_t seed, int rounds) {
  std::mt19937 random(seed);
  for (int id = 0; id < v100::kQuantTypeCount; ++id) {
    const v100::QuantTraits* t = v100::find_traits(id);
    if (t == nullptr) continue;
    for (int round = 0; round < rounds; ++round) {
      const int64_t n_blocks = round % 3 + 1;
      const auto n_bytes = static_cast<size_t>(n_blocks * t->block_bytes);
      const auto blocks = std::make_unique<std::byte[]>(n_bytes);
      for (size_t i = 0; i < n_bytes; ++i) blocks[i] = static_cast<std::byte>(random() & 0xFF);
      decode_blocks(t->type, blocks.get(), n_blocks * t->block_values);
      v100::all_finite(t->type, blocks.get(), n_blocks * t->block_values);
    }
    std::printf("OK %s\n", std::string(t->name).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "open") {
      run_open(argc - 2, argv + 2);
    } else if (mode == "stream" && argc == 3) {
      run_stream(argv[2]);
    } else if (mode == "blocks" && argc == 4) {
      run_blocks(static_cast<uint32_t>(std::stoul(argv[2])), std::stoi(argv[3]));
    } else {
      throw std::runtime_error("usage: gguf_driver open FILE... | stream SCRATCH | blocks SEED ROUNDS");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gguf_driver: %s\n", error.what());
    return 1;
  }
  return 0;
}
