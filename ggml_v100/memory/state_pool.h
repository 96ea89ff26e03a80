// Which slot holds the recurrent state of which sequence.
//
// A committed slot is never written again: a step writes into a slot of its own and commits it at the end, or drops it and
// the state before the step still stands. So sequences may share a slot (fork), and a copy costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace v100 {

class StatePool {
 public:
  // 2 * n_sequences slots: one committed and one being written per sequence. Throws InvalidArgument for a negative count.
  explicit StatePool(int32_t n_sequences);

  int32_t n_slots() const { return static_cast<int32_t>(references_.size()); }
  // The committed state; -1: none, the sequence is at its beginning (all zeros).
  int32_t slot(int32_t sequence) const { return committed_[static_cast<size_t>(sequence)]; }
  // The slot that a step writes, between begin and commit or abort.
  int32_t begin(int32_t sequence);
  int32_t written(int32_t sequence) const { return written_[static_cast<size_t>(sequence)]; }
  void commit(int32_t sequence) noexcept;
  void abort(int32_t sequence) noexcept;
  // destination := the state of source.
  void fork(int32_t source, int32_t destination) noexcept;
  void clear(int32_t sequence) noexcept;

 private:
  void release(int32_t& slot) noexcept;

  std::vector<int32_t> references_;  // per slot
  std::vector<int32_t> committed_;   // per sequence, or -1
  std::vector<int32_t> written_;     // per sequence, or -1
};

}  // namespace v100
