// Sequences made longer for rows that nobody keeps. States are not touched: a draft only reads them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "memory/paged_memory.h"

namespace v100 {

// Gives the room back when it ends. The tokens that were there before stay as they are.
class BorrowedPages {
 public:
  explicit BorrowedPages(PagedMemory& memory) : memory_(memory) {}
  BorrowedPages(const BorrowedPages&) = delete;
  BorrowedPages& operator=(const BorrowedPages&) = delete;
  ~BorrowedPages() {
    for (const auto& [sequence, length] : lengths_) memory_.truncate(sequence, length);
  }
  // Throws ContextFull.
  void append(int32_t sequence, int32_t n_tokens) {
    const int32_t length = memory_.length(sequence);
    lengths_.reserve(lengths_.size() + 1);
    memory_.append(sequence, n_tokens);
    lengths_.emplace_back(sequence, length);
  }

 private:
  PagedMemory& memory_;
  std::vector<std::pair<int32_t, int32_t>> lengths_;
};

}  // namespace v100
