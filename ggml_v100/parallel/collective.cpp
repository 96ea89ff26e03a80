// Meetings of ranks that share memory.
//
// A rank comes by raising its own counter, and waits until everyone's has reached the same number: no rank can be a
// meeting ahead of another, so what a rank published for a meeting stands until it comes to the next.
#include "parallel/collective.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/patience.h"
#include "base/thread_pool.h"

namespace v100 {

namespace {

constexpr int kSpinRounds = 2000, kYieldRounds = 200;
constexpr auto kLongestSleep = std::chrono::milliseconds(20);  // guards against nothing but costs nothing

}  // namespace

RankGroup::RankGroup(std::vector<std::string> names)
    : names_(std::move(names)), seats_(names_.size()), spins_(size() <= ThreadPool::hardware_threads()) {}

void RankGroup::begin() {
  for (Seat& one : seats_) one.meetings.store(0, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  failure_.clear();
  failed_ = false;
}

void RankGroup::fail(int32_t rank, const std::string& cause) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    try {
      failure_ = "rank " + std::to_string(rank) + " (" + names_[static_cast<size_t>(rank)] + "): " + cause;
    } catch (...) {
      failure_ = "a rank failed";  // fits without memory
    }
    failed_ = true;
    failures_.fetch_add(1, std::memory_order_relaxed);
    for (const auto& alarm : alarms_) alarm->store(1);
  }
  wake_.notify_all();
}

void RankGroup::add_alarm(std::shared_ptr<std::atomic<uint32_t>> alarm) {
  const std::lock_guard lock(mutex_);
  alarms_.push_back(std::move(alarm));
}

std::optional<std::string> RankGroup::failure() const {
  const std::lock_guard lock(mutex_);
  if (!failed_) return std::nullopt;
  return failure_;
}

int64_t RankGroup::beats(int32_t rank) const {
  return seats_[static_cast<size_t>(rank)].beats.load(std::memory_order_relaxed);
}

bool RankGroup::is_waiting(int32_t rank) const {
  return seats_[static_cast<size_t>(rank)].waiting.load(std::memory_order_relaxed);
}

void RankGroup::beat(int32_t rank) {
  Seat& mine = seat(rank);
  const int64_t beat = mine.beats.load(std::memory_order_relaxed) + 1;
  mine.beats.store(beat, std::memory_order_relaxed);
  if (has_fault_.load(std::memory_order_relaxed)) suffer(rank, beat);
  if (failed_.load(std::memory_order_relaxed)) throw Interrupted();
}

void RankGroup::inject(InjectedFault fault) {
  const std::lock_guard lock(mutex_);
  fault_ = fault;
  fault_.at += beats(fault.rank);
  has_fault_ = true;
}

void RankGroup::suffer(int32_t rank, int64_t beat) {
  double seconds = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!has_fault_ || rank != fault_.rank || beat < fault_.at) return;
    has_fault_ = false;
    seconds = fault_.hang_seconds;
  }
  if (seconds == 0) throw DeviceError("injected fault");
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

bool RankGroup::all_here(int64_t meetings) const {
  return std::all_of(seats_.begin(), seats_.end(),
                     [&](const Seat& one) { return one.meetings.load(std::memory_order_seq_cst) >= meetings; });
}

void RankGroup::arrive(Seat& mine) {
  const int64_t meetings = mine.meetings.load(std::memory_order_relaxed) + 1;
  mine.meetings.store(meetings, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(mutex_);  // a sleeper between its check and its wait holds the mutex
    wake_.notify_all();
  }
  const auto done = [&] { return all_here(meetings) || failed_.load(std::memory_order_relaxed); };
  mine.waiting.store(true, std::memory_order_relaxed);
  if (!wait_awake(spins_ ? kSpinRounds : 0, kYieldRounds, done)) {
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (!done()) wake_.wait_for(lock, kLongestSleep);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
  mine.waiting.store(false, std::memory_order_relaxed);
  if (failed_.load(std::memory_order_relaxed)) throw Interrupted();
}

void RankGroup::meet(int32_t rank, Meeting meeting, float* data, int64_t count) {
  beat(rank);
  Seat& mine = seat(rank);
  mine.meeting = meeting, mine.data = data, mine.count = count;
  arrive(mine);
  for (const Seat& other : seats_)
    if (other.meeting != meeting || other.count != count)
      throw DeviceError("the ranks met for different things: " + std::to_string(count) + " and " +
                        std::to_string(other.count) + " values");
}

void RankGroup::all_reduce(int32_t rank, float* data, int64_t count) {
  if (count == 0) return;
  meet(rank, Meeting::sum, data, count);
  const auto slice_begin = [&](int64_t r) { return count * r / size(); };
  const int64_t begin = slice_begin(rank), n = slice_begin(rank + 1) - begin;
  std::vector<float>& sum = seat(rank).sum;
  sum.resize(static_cast<size_t>(n));
  std::copy_n(seats_[0].data + begin, n, sum.data());
  for (int32_t r = 1; r < size(); ++r) {
    const float* other = seat(r).data + begin;
    for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += other[i];
  }
  arrive(seat(rank));  // all slices are there, and nobody reads anybody's data any more
  for (int32_t r = 0; r < size(); ++r)
    std::copy_n(seat(r).sum.data(), slice_begin(r + 1) - slice_begin(r), data + slice_begin(r));
}

void RankGroup::broadcast(int32_t rank, int32_t root, float* data, int64_t count) {
  if (count == 0) return;
  meet(rank, Meeting::broadcast, data, count);
  if (rank != root) std::copy_n(seat(root).data, count, data);
  arrive(seat(rank));  // everyone has the data: the root may change its own
}

}  // namespace v100
