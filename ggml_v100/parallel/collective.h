// Where the ranks of one host meet: sums over all of them, and data that one hands to the others.
//
// Every rank runs on a thread of its own and comes to the same meetings in the same order. Nobody waits for a rank that
// has failed: the first failure is kept and every other rank is thrown out of its next meeting or operation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace v100 {

// Thrown inside a rank because another one failed. Never leaves RankThreads::run.
class Interrupted {};

// For tests: what goes wrong on a rank, at its n-th sign of life.
struct InjectedFault {
  int32_t rank = 0;
  int64_t at = 0;
  double hang_seconds = 0;  // 0: throws instead
};

class RankGroup {
 public:
  // names: of the ranks' devices, for messages.
  explicit RankGroup(std::vector<std::string> names);

  int32_t size() const { return static_cast<int32_t>(seats_.size()); }

  // Sum over ranks into every rank's data. Added in the order of ranks in f32 by one rank for all: everyone has the same
  // bits.
  void all_reduce(int32_t rank, float* data, int64_t count);
  // The root's data into everyone's.
  void broadcast(int32_t rank, int32_t root, float* data, int64_t count);
  // A sign of life, given at every operation. Throws Interrupted when another rank has failed.
  void beat(int32_t rank);

  // Before a call in which all ranks take part; none is running.
  void begin();
  // The first failure since begin() stands.
  void fail(int32_t rank, const std::string& cause) noexcept;
  // "rank 1 (CPU1): ..." of the first failure.
  std::optional<std::string> failure() const;
  // Of a rank: changes while it computes.
  int64_t beats(int32_t rank) const;
  bool is_waiting(int32_t rank) const;

  const std::vector<std::string>& names() const { return names_; }
  // Becomes 1 when a rank fails, so that whatever waits outside this object can stop. Whoever waits sets it back.
  void add_alarm(std::shared_ptr<std::atomic<uint32_t>> alarm);
  // Calls of fail() that were the first of their call so far.
  int64_t failures() const { return failures_.load(std::memory_order_relaxed); }

  void inject(InjectedFault fault);

 private:
  enum class Meeting { sum, broadcast };
  struct Seat {
    std::atomic<int64_t> meetings{0};  // come to since begin()
    std::atomic<int64_t> beats{0};
    std::atomic<bool> waiting{false};
    Meeting meeting{};  // what it came for: written before `meetings`
    int64_t count = 0;
    float* data = nullptr;
    std::vector<float> sum;  // its slice of the last sum
    alignas(64) char padding[64];
  };

  Seat& seat(int32_t rank) { return seats_[static_cast<size_t>(rank)]; }
  void meet(int32_t rank, Meeting meeting, float* data, int64_t count);
  void arrive(Seat& mine);
  bool all_here(int64_t meetings) const;
  void suffer(int32_t rank, int64_t beat);

  std::vector<std::string> names_;
  std::deque<Seat> seats_;
  bool spins_;  // there are cores for all
  std::atomic<bool> failed_{false};
  std::atomic<int32_t> sleepers_{0};
  mutable std::mutex mutex_;  // of the failure, and of sleeping
  std::condition_variable wake_;
  std::string failure_;
  std::vector<std::shared_ptr<std::atomic<uint32_t>>> alarms_;
  std::atomic<int64_t> failures_{0};
  std::atomic<bool> has_fault_{false};
  InjectedFault fault_;
};

// A rank's place in its group, which outlives it; or that of a rank that is alone, where every meeting is over at once.
class RankSeat {
 public:
  RankSeat() = default;
  RankSeat(RankGroup& group, int32_t rank) : group_(&group), rank_(rank) {}

  bool is_alone() const { return group_ == nullptr; }
  bool is_rank(int32_t rank) const { return group_ != nullptr && rank == rank_; }
  int32_t rank() const { return rank_; }
  RankGroup* group() const { return group_; }  // nullptr: of a rank that is alone
  void all_reduce(float* data, int64_t count) const {
    if (group_ != nullptr) group_->all_reduce(rank_, data, count);
  }
  void broadcast(int32_t root, float* data, int64_t count) const {
    if (group_ != nullptr) group_->broadcast(rank_, root, data, count);
  }
  void beat() const {
    if (group_ != nullptr) group_->beat(rank_);
  }

 private:
  RankGroup* group_ = nullptr;
  int32_t rank_ = 0;
};

}  // namespace v100
