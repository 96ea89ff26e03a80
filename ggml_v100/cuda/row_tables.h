// What kernels read about the rows of a ubatch, as one stretch of device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/driver.h"
#include "ops/kv.h"

namespace v100::cuda {

struct RowTables {
  const int32_t* visible = nullptr;     // [rows, 2]
  const int32_t* kv_index = nullptr;    // [rows]
  const int32_t* sequence = nullptr;    // [rows], -1: of none
  const int32_t* first_row = nullptr;   // [sequences + 1], for operations on rows without gaps between the sequences
  const int32_t* end_row = nullptr;     // [sequences]
  const int32_t* state_from = nullptr;  // [sequences]
  const int32_t* state_to = nullptr;    // [sequences]
  const int32_t* first_position = nullptr;  // [sequences], the first row's index within its sequence
  const int32_t* first_chunk = nullptr;     // [sequences + 1], chunks of prompts (kernels/delta_chunk_shape.h)
  const int32_t* page_table = nullptr;      // [sequences, most_pages]
  int32_t rows = 0, sequences = 0, most_pages = 0, chunks = 0;
};

// A sequence with more rows in a ubatch is a prompt, for attention and for delta nets.
inline constexpr int32_t kMostDecodeRows = 64;
// Rows of adjacent sequences that attention treats alike.
struct RowRun {
  RowRange rows;
  bool is_prompt;
};
std::vector<RowRun> runs_of(const Rows& rows);
// Rows of both.
RowRange common(RowRange a, RowRange b);
// The most rows of a sequence that lie in the part.
int32_t most_rows(const Rows& rows, RowRange part);

// The contents of the tables, one after the other. Rows made up for one operation may lack indices or views, zeros then, and
// have some that belong to no sequence: those of a draft that were refused.
void write_row_tables(const Rows& rows, std::vector<int32_t>& contents);
// The tables of such contents at an address.
RowTables row_tables_at(const Rows& rows, CUdeviceptr address);

}  // namespace v100::cuda
