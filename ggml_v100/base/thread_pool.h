// A fixed set of threads that share the chunks of a loop and meet at its end.
//
// Workers spin briefly between calls (a futex wake costs 20 us, a decode step has hundreds of calls) and then sleep.
// The calling thread takes part. An exception of any thread is rethrown to the caller after all have finished.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/thread_settings.h"

namespace v100 {

class ThreadPool {
 public:
  // Throws InvalidArgument for settings that are out of range or that the system refuses, OutOfMemory.
  explicit ThreadPool(ThreadSettings settings);
  explicit ThreadPool(int32_t n_threads) : ThreadPool(ThreadSettings{.count = n_threads}) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t size() const noexcept;

  // Threads that take part in the following calls: 1..size(). The others sleep. Also places the calling thread as
  // thread 0 of the pool when it has not been yet: it is the one that shares the work.
  void set_active(int32_t n_threads);
  int32_t active() const noexcept;

  // Runs work(thread) on the calling thread (0) and on each worker (1..active() - 1) that is free while it does. work takes
  // its portions from a counter shared by all and returns when none is left, so a worker that the system does not schedule
  // in time is neither needed nor waited for. Not reentrant, one caller at a time.
  template <typename Work>
  void share(Work&& work) {
    auto* target = &work;
    share_erased([](void* context, int32_t thread) { (*static_cast<decltype(target)>(context))(thread); }, target);
  }

  // Splits [0, count) into contiguous chunks handed out in order to whichever thread is free: body(begin, end).
  // Which thread takes a chunk varies between runs, so body's result must not depend on it.
  template <typename Body>
  void parallel_for(int64_t count, int64_t chunk, Body&& body) {
    if (count <= 0) return;
    if (count <= chunk || active() == 1) {
      body(int64_t{0}, count);
      return;
    }
    std::atomic<int64_t> next{0};
    share([&](int32_t) {
      for (int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed); begin < count;
           begin = next.fetch_add(chunk, std::memory_order_relaxed))
        body(begin, begin + chunk < count ? begin + chunk : count);
    });
  }

  static int32_t hardware_threads();  // cores this process may use, at least 1

 private:
  using Erased = void (*)(void*, int32_t);
  void share_erased(Erased function, void* context);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace v100
