// Slots with reference counts; the lowest free one is taken, so that few are ever touched.
#include "memory/state_pool.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace v100 {

StatePool::StatePool(int32_t n_sequences) {
  if (n_sequences < 0)
    throw InvalidArgument("number of sequences is " + std::to_string(n_sequences) + "; expected 0 or more");
  references_.assign(static_cast<size_t>(n_sequences) * 2, 0);
  committed_.assign(static_cast<size_t>(n_sequences), -1);
  written_.assign(static_cast<size_t>(n_sequences), -1);
}

int32_t StatePool::begin(int32_t sequence) {
  const auto free = std::find(references_.begin(), references_.end(), 0);  // there is one: see the constructor
  *free = 1;
  return written_[static_cast<size_t>(sequence)] = static_cast<int32_t>(free - references_.begin());
}

void StatePool::commit(int32_t sequence) noexcept {
  const auto s = static_cast<size_t>(sequence);
  release(committed_[s]);
  std::swap(committed_[s], written_[s]);
}

void StatePool::abort(int32_t sequence) noexcept { release(written_[static_cast<size_t>(sequence)]); }

void StatePool::fork(int32_t source, int32_t destination) noexcept {
  if (source == destination) return;
  const int32_t slot = committed_[static_cast<size_t>(source)];
  if (slot >= 0) ++references_[static_cast<size_t>(slot)];
  release(committed_[static_cast<size_t>(destination)]);
  committed_[static_cast<size_t>(destination)] = slot;
}

void StatePool::clear(int32_t sequence) noexcept { release(committed_[static_cast<size_t>(sequence)]); }

void StatePool::release(int32_t& slot) noexcept {
  if (slot >= 0) --references_[static_cast<size_t>(slot)];
  slot = -1;
}

}  // namespace v100
