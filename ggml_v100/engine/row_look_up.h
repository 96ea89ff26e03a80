// Rows of logits that lie on devices, for the host: of each row what somebody needs of it, put together from all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/ops.h"
#include "sampling/logits_row.h"

namespace v100 {

class RowLookUp {
 public:
  // needs: of each row; nullptr: the whole row.
  RowLookUp(std::span<const RowNeeds* const> needs, int32_t vocab, size_t n_ranks);

  // By each rank: its columns of all rows, those from `first` of the vocabulary on. The tensor must stay until the end.
  void ask(size_t rank, Ops& ops, Tensor logits, int32_t first);
  // Then, once. Rows with NaN or +infinity are wanted whole: samplers say where they are.
  bool has_whole_rows();
  void read_whole_rows(size_t rank, Ops& ops);
  // At last. They live as long as this object.
  std::span<const LogitsRow> put_together();

 private:
  struct Share {  // of a rank
    Tensor logits;
    int32_t first = 0, largest = 0;
    RowAnswer answer;
  };
  void gather(size_t row);

  std::vector<RowNeeds> needs_;  // largest = 0: the whole row
  int32_t vocab_, largest_ = 1, listed_ = 0;
  std::vector<Share> shares_;
  std::vector<int32_t> whole_rows_;
  std::vector<float> whole_;                                    // [whole rows, vocab]
  std::vector<std::vector<Candidate>> candidates_, listed_of_;  // of each row
  std::vector<LogitsRow> rows_;
};

}  // namespace v100
