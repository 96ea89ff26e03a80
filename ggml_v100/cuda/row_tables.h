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
  const int32_t* sequence = nullptr;    // [rows]
  const int32_t* first_row = nullptr;   // [sequences + 1]
  const int32_t* state_from = nullptr;  // [sequences]
  const int32_t* state_to = nullptr;    // [sequences]
  const int32_t* page_table = nullptr;  // [sequences, most_pages]
  int32_t rows = 0, sequences = 0, most_pages = 0;
};

// The contents of the tables, one after the other. Rows made up for one operation may lack indices or views: zeros then.
void write_row_tables(const Rows& rows, std::vector<int32_t>& contents);
// The tables of such contents at an address.
RowTables row_tables_at(const Rows& rows, CUdeviceptr address);

}  // namespace v100::cuda
