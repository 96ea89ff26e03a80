// How the threads of a pool are to run: count, processors, priority, patience.
#pragma once

#include <cstdint>
#include <vector>

namespace v100 {

struct ThreadSettings {
  int32_t count = 1;  // calling thread included
  // Processors of thread i: element i % size. Empty: wherever the system puts them.
  std::vector<std::vector<int32_t>> cpus{};
  int32_t priority = 0;  // -1 low, 0 normal, 1 medium, 2 high (nice values), 3 realtime (round robin)
  int32_t poll = 50;     // how long idle workers spin before they sleep, 0 (not at all) to 100
};

// Applies processors and priority to the calling thread as thread number `thread` of a pool.
// Throws InvalidArgument naming what the system refused and why.
void place_this_thread(const ThreadSettings& settings, int32_t thread);

}  // namespace v100
