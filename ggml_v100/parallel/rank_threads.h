// The threads of the ranks: one call runs on all of them and ends within bounded time, whatever a rank does.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/collective.h"

namespace v100 {

class RankThreads {
 public:
  // One thread per name. Throws OutOfMemory when the system has none left.
  explicit RankThreads(std::vector<std::string> names);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  RankGroup& group() const;

  // work(rank) on every rank's thread. Throws DeviceError naming the first rank that threw, and what; or a rank that gave
  // no sign of life for as long as the stall limit. The call ends at latest a second after that; a rank that has not
  // returned then is lost until it does: is_usable() is false, and what `work` refers to must be kept, if need be until
  // the process ends.
  void run(std::function<void(int32_t rank)> work);
  bool is_usable() const;
  // Waits a moment for a lost rank, then throws DeviceError.
  void require_usable() const;

  // 5 minutes unless set: the logits of a large vocabulary for a large ubatch may take one on a slow core.
  void set_stall_limit(std::chrono::duration<double> limit);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads: a lost one may outlive this object
};

}  // namespace v100
