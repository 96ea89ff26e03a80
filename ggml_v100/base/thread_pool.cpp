// Thread pool: a generation counter announces work, a countdown announces its end; both are spun on before sleeping.
#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"

namespace v100 {

namespace {

// Waiting in three stages. Spinning bridges the gap between two operations of a forward pass. Yielding lets another thread
// of this machine have the core (the server's, or the one waited for when there are more threads than cores) without the
// 20 us of a sleep. Sleeping keeps cores cool between requests.
constexpr int kSpinRounds = 2000;
constexpr int kYieldRounds = 400;

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#elif defined(__powerpc64__)
  asm volatile("or 27,27,27" ::: "memory");
#endif
}

}  // namespace

struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::atomic<uint64_t> generation{0};  // incremented once per run()
  std::atomic<int32_t> remaining{0};    // active workers that have not finished the current run
  std::atomic<int32_t> active{1};
  std::atomic<int64_t> counter{0};  // next chunk of parallel_for
  std::atomic<bool> stopping{false};
  std::atomic<int32_t> sleepers{0};
  Erased function = nullptr;
  void* context = nullptr;
  std::mutex mutex;
  std::condition_variable wake;
  std::mutex failure_mutex;
  std::exception_ptr failure;

  void call(int32_t thread) {
    try {
      function(context, thread);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  }

  uint64_t wait_for_work(uint64_t seen) {
    for (int round = 0; round < kSpinRounds + kYieldRounds; ++round) {
      const uint64_t now = generation.load(std::memory_order_acquire);
      if (now != seen || stopping.load(std::memory_order_relaxed)) return now;
      if (round < kSpinRounds) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
    }
    std::unique_lock lock(mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen || stopping.load(); });
    sleepers.fetch_sub(1);
    return generation.load(std::memory_order_acquire);
  }

  void worker(int32_t thread) {
    uint64_t seen = 0;
    for (;;) {
      const uint64_t now = wait_for_work(seen);
      if (stopping.load()) return;
      if (now == seen) continue;
      seen = now;
      // A worker outside the active set only notes the generation: run() does not wait for it, so it must not read
      // function or context, which may already belong to a later run.
      if (thread < static_cast<int32_t>(now & 0xFFFF)) {
        call(thread);
        remaining.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
  }
};

ThreadPool::ThreadPool(int32_t n_threads) : state_(std::make_unique<State>()) {
  if (n_threads < 1 || n_threads > 512)
    throw InvalidArgument("number of threads is " + std::to_string(n_threads) + ", expected 1 to 512");
  state_->active = n_threads;
  try {
    for (int32_t i = 1; i < n_threads; ++i) state_->workers.emplace_back([s = state_.get(), i] { s->worker(i); });
  } catch (const std::system_error& error) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->stopping = true;
    }
    state_->wake.notify_all();
    for (auto& worker : state_->workers) worker.join();
    throw OutOfMemory(std::string("cannot start threads: ") + error.what());
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (auto& worker : state_->workers)
    if (worker.joinable()) worker.join();
}

int32_t ThreadPool::size() const noexcept { return static_cast<int32_t>(state_->workers.size()) + 1; }

int32_t ThreadPool::active() const noexcept { return state_->active.load(std::memory_order_relaxed); }

void ThreadPool::set_active(int32_t n_threads) {
  if (n_threads < 1 || n_threads > size())
    throw InvalidArgument("active threads is " + std::to_string(n_threads) + ", expected 1 to " +
                          std::to_string(size()));
  state_->active = n_threads;
}

void ThreadPool::run_erased(Erased function, void* context) {
  State& state = *state_;
  const int32_t n = state.active.load(std::memory_order_relaxed);
  if (n == 1) {
    function(context, 0);
    return;
  }
  state.function = function;
  state.context = context;
  state.remaining.store(n - 1, std::memory_order_relaxed);
  {
    // The generation's low 16 bits carry the number of active threads, so that a late waker reads both in one load.
    const uint64_t next =
        ((state.generation.load(std::memory_order_relaxed) >> 16) + 1) << 16 | static_cast<uint64_t>(n);
    state.generation.store(next, std::memory_order_seq_cst);
  }
  if (state.sleepers.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(state.mutex);  // a sleeper between its check and its wait holds the mutex
    state.wake.notify_all();
  }
  state.call(0);
  for (int round = 0; state.remaining.load(std::memory_order_acquire) != 0; ++round) {
    if (round < kSpinRounds) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (state.failure) {
    std::exception_ptr failure;
    std::swap(failure, state.failure);
    std::rethrow_exception(failure);
  }
}

void ThreadPool::reset_counter() { state_->counter.store(0, std::memory_order_relaxed); }

int64_t ThreadPool::next_chunk(int64_t chunk) { return state_->counter.fetch_add(chunk, std::memory_order_relaxed); }

int32_t ThreadPool::hardware_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace v100
