// Waiting for another thread in three stages: spinning while it is likely to come at once, yielding, then sleeping.
#pragma once

#include <thread>

namespace v100 {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#elif defined(__powerpc64__)
  asm volatile("or 27,27,27" ::: "memory");
#endif
}

// Whether `done()` came true before it was time to sleep. spin_rounds 0: where there are more threads than cores, the one
// waited for needs this core.
template <class Done>
bool wait_awake(int spin_rounds, int yield_rounds, Done&& done) {
  for (int round = 0; round < spin_rounds + yield_rounds; ++round) {
    if (done()) return true;
    if (round < spin_rounds)
      cpu_relax();
    else
      std::this_thread::yield();
  }
  return done();
}

}  // namespace v100
