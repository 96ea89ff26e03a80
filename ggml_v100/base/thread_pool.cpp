// Thread pool: a gate announces work and admits workers, a counter announces their end; both are spun on before sleeping.
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
#include "base/patience.h"

namespace v100 {

namespace {

// Waiting in three stages. Spinning bridges the gap between two operations of a forward pass. Yielding lets another thread
// of this machine have the core (the server's, or the one waited for when there are more threads than cores) without the
// 20 us of a sleep. Sleeping keeps cores cool between requests.
constexpr int kSpinRounds = 2000;  // of the waiting caller; of idle workers at poll 50
constexpr int kYieldRounds = 400;

}  // namespace

// One word tells workers of a call and lets them in: generation (changes with every call), threads that may take part,
// whether the call still admits workers, and how many it has admitted. A worker enters by raising the last field with a
// compare-and-swap, which fails once the caller has closed the gate or opened it for another call: the caller then knows
// whom to wait for, and a worker that the system did not schedule in time costs nothing.
namespace {

struct Gate {
  static constexpr uint64_t kEntered = 1;
  static constexpr uint64_t kClosed = uint64_t{1} << 15;
  static constexpr int kActiveShift = 16, kGenerationShift = 32;

  static uint64_t open(uint32_t generation, int32_t active) {
    return uint64_t{generation} << kGenerationShift | static_cast<uint64_t>(active) << kActiveShift;
  }
  static uint32_t generation(uint64_t gate) { return static_cast<uint32_t>(gate >> kGenerationShift); }
  static int32_t active(uint64_t gate) { return static_cast<int32_t>(gate >> kActiveShift & 0xFFFF); }
  static int32_t entered(uint64_t gate) { return static_cast<int32_t>(gate & (kClosed - 1)); }
};

}  // namespace

struct ThreadPool::State {
  ThreadSettings settings;
  std::thread::id placed;  // the caller that was placed last
  std::vector<std::thread> workers;
  std::atomic<int32_t> started{0};
  std::atomic<uint64_t> gate{Gate::kClosed};
  std::atomic<int32_t> left{0};  // workers that have finished the current call
  std::atomic<bool> stopping{false};
  std::atomic<int32_t> sleepers{0};
  int32_t active = 1;
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

  bool has_news(uint32_t seen) const {
    return Gate::generation(gate.load(std::memory_order_acquire)) != seen || stopping.load(std::memory_order_relaxed);
  }

  void wait_for_news(uint32_t seen) {
    const int spin_rounds = kSpinRounds * settings.poll / 50, yield_rounds = kYieldRounds * settings.poll / 50;
    if (wait_awake(spin_rounds, yield_rounds, [&] { return has_news(seen); })) return;
    std::unique_lock lock(mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return has_news(seen); });
    sleepers.fetch_sub(1);
  }

  void place(int32_t thread) {
    try {
      place_this_thread(settings, thread);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      failure = std::current_exception();
    }
  }

  void rethrow_failure() {
    if (!failure) return;
    std::exception_ptr thrown;
    std::swap(thrown, failure);
    std::rethrow_exception(thrown);
  }

  void join_all() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
  }

  void worker(int32_t thread) {
    place(thread);
    started.fetch_add(1, std::memory_order_release);
    uint32_t seen = 0;
    for (;;) {
      wait_for_news(seen);
      if (stopping.load()) return;
      uint64_t now = gate.load(std::memory_order_acquire);
      seen = Gate::generation(now);
      while (thread < Gate::active(now) && (now & Gate::kClosed) == 0 && Gate::generation(now) == seen) {
        if (!gate.compare_exchange_weak(now, now + Gate::kEntered, std::memory_order_acq_rel,
                                        std::memory_order_acquire))
          continue;
        call(thread);
        left.fetch_add(1, std::memory_order_release);
        break;
      }
    }
  }
};

ThreadPool::ThreadPool(ThreadSettings settings) : state_(std::make_unique<State>()) {
  if (settings.count < 1 || settings.count > 512)
    throw InvalidArgument("number of threads is " + std::to_string(settings.count) + ", expected 1 to 512");
  if (settings.poll < 0 || settings.poll > 100)
    throw InvalidArgument("poll is " + std::to_string(settings.poll) + ", expected 0 to 100");
  state_->active = settings.count;
  state_->settings = std::move(settings);
  try {
    for (int32_t i = 1; i < state_->settings.count; ++i)
      state_->workers.emplace_back([s = state_.get(), i] { s->worker(i); });
  } catch (const std::system_error& error) {
    state_->join_all();
    throw OutOfMemory(std::string("cannot start threads: ") + error.what());
  }
  while (state_->started.load(std::memory_order_acquire) < state_->settings.count - 1) std::this_thread::yield();
  if (state_->failure) {
    state_->join_all();
    state_->rethrow_failure();
  }
}

ThreadPool::~ThreadPool() { state_->join_all(); }

int32_t ThreadPool::size() const noexcept { return static_cast<int32_t>(state_->workers.size()) + 1; }

int32_t ThreadPool::active() const noexcept { return state_->active; }

void ThreadPool::set_active(int32_t n_threads) {
  if (n_threads < 1 || n_threads > size())
    throw InvalidArgument("active threads is " + std::to_string(n_threads) + ", expected 1 to " +
                          std::to_string(size()));
  state_->active = n_threads;
  if (state_->placed == std::this_thread::get_id()) return;
  place_this_thread(state_->settings, 0);
  state_->placed = std::this_thread::get_id();
}

void ThreadPool::share_erased(Erased function, void* context) {
  State& state = *state_;
  state.function = function;
  state.context = context;
  state.left.store(0, std::memory_order_relaxed);
  const uint32_t generation = Gate::generation(state.gate.load(std::memory_order_relaxed)) + 1;
  state.gate.store(Gate::open(generation, state.active), std::memory_order_seq_cst);
  if (state.sleepers.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(state.mutex);  // a sleeper between its check and its wait holds the mutex
    state.wake.notify_all();
  }
  state.call(0);  // returns when no portion is left to take
  const int32_t entered = Gate::entered(state.gate.fetch_or(Gate::kClosed, std::memory_order_acq_rel));
  for (int round = 0; state.left.load(std::memory_order_acquire) != entered; ++round) {
    if (round < kSpinRounds) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
  state.rethrow_failure();
}

int32_t ThreadPool::hardware_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace v100
