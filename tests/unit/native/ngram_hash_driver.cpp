// Prints the memory-table rows of every token of a sequence, a line for each.
//
// usage: ngram_hash_driver NGRAM_SIZE HEADS EOS MULTIPLIERS OFFSETS SIZES TOKENS, the last four comma-separated.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "model/ngram_hash.h"

namespace {

template <class T>
std::vector<T> numbers(const std::string& text) {
  std::vector<T> values;
  for (size_t at = 0; at < text.size();
       at = text.find(',', at) == std::string::npos ? text.size() : text.find(',', at) + 1)
    values.push_back(static_cast<T>(std::strtoull(text.c_str() + at, nullptr, 10)));
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  v100::NgramHash hash;
  hash.ngram_size = std::atoi(argv[1]);
  hash.heads = std::atoi(argv[2]);
  hash.eos = std::atoi(argv[3]);
  hash.multipliers = numbers<uint64_t>(argv[4]);
  hash.offsets = numbers<uint64_t>(argv[5]);
  hash.sizes = numbers<uint64_t>(argv[6]);
  const std::vector<int32_t> tokens = numbers<int32_t>(argv[7]);
  std::vector<int32_t> rows(static_cast<size_t>(hash.hashes()));
  for (size_t i = 0; i < tokens.size(); ++i) {
    hash.rows_of(tokens, static_cast<int32_t>(i), rows.data());
    for (const int32_t row : rows) std::printf("%d ", row);
    std::printf("\n");
  }
  return 0;
}
