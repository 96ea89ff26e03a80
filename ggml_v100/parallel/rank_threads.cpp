// One generation per call; the caller watches over the ranks while it waits for the last to return.
#include "parallel/rank_threads.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/patience.h"
#include "base/thread_pool.h"

namespace v100 {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinRounds = 2000, kYieldRounds = 400;
constexpr auto kWatch = std::chrono::milliseconds(50);      // how often the caller looks at the ranks' signs of life
constexpr auto kGrace = std::chrono::seconds(1);            // for ranks to return after a failure
constexpr auto kPatience = std::chrono::milliseconds(500);  // of a later call, for ranks that have not
constexpr double kStallSeconds = 300;

}  // namespace

struct RankThreads::State {
  explicit State(std::vector<std::string> rank_names) : names(std::move(rank_names)), group(names) {
    for (auto& one : returned) one = true;
  }

  std::vector<std::string> names;
  RankGroup group;
  const bool spins = static_cast<int32_t>(names.size()) <= ThreadPool::hardware_threads();  // cores for all
  std::vector<std::thread> threads;
  std::function<void(int32_t)> work;
  std::atomic<uint32_t> generation{0};
  std::atomic<int32_t> running{0};
  std::vector<std::atomic<bool>> returned = std::vector<std::atomic<bool>>(names.size());  // of the last call
  std::atomic<bool> stopping{false};
  std::atomic<double> stall_seconds{kStallSeconds};
  std::string loss;  // the last failure after which a rank did not return in time
  std::mutex mutex;
  std::condition_variable wake, done;

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
  }

  void call(int32_t rank) {
    try {
      work(rank);
    } catch (const Interrupted&) {  // of a failure that is known already
    } catch (const std::bad_alloc&) {
      group.fail(rank, "out of host memory");
    } catch (const std::exception& error) {
      group.fail(rank, error.what());
    } catch (...) {
      group.fail(rank, "an unknown exception");
    }
  }

  void serve(int32_t rank) {
    // Signals are for the threads of the program, whose waiting they interrupt.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    uint32_t seen = 0;
    for (;;) {
      const auto has_news = [&] {
        return generation.load(std::memory_order_acquire) != seen || stopping.load(std::memory_order_relaxed);
      };
      if (!wait_awake(spins ? kSpinRounds : 0, kYieldRounds, has_news)) {
        std::unique_lock lock(mutex);
        wake.wait(lock, has_news);
      }
      if (stopping.load()) return;
      seen = generation.load(std::memory_order_acquire);
      call(rank);
      returned[static_cast<size_t>(rank)].store(true, std::memory_order_relaxed);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard lock(mutex);  // the caller between its check and its wait holds the mutex
        done.notify_all();
      }
    }
  }

  bool all_returned() const { return running.load(std::memory_order_acquire) == 0; }

  // Fails a rank that has not moved for too long while it was not waiting for another. Time is counted in looks, so that a
  // process that was stopped for a while does not find all its ranks silent.
  class Watch {
   public:
    explicit Watch(State& state) : state_(state), seen_(state.names.size()), silence_(state.names.size(), 0.0) {
      for (size_t r = 0; r < seen_.size(); ++r) seen_[r] = state.group.beats(static_cast<int32_t>(r));
    }
    void look() {
      const auto now = Clock::now();
      const double passed = std::chrono::duration<double>(std::min<Clock::duration>(now - last_, 2 * kWatch)).count();
      last_ = now;
      const double limit = state_.stall_seconds;
      size_t waiting = 0, unfinished = 0;
      for (size_t r = 0; r < seen_.size(); ++r) {
        const auto rank = static_cast<int32_t>(r);
        const int64_t beats = state_.group.beats(rank);
        const bool is_waiting = state_.group.is_waiting(rank), returned = state_.returned[r];
        if (!returned) ++unfinished, waiting += is_waiting;
        silence_[r] = beats != seen_[r] || is_waiting || returned ? 0.0 : silence_[r] + passed;
        seen_[r] = beats;
        if (silence_[r] > limit) state_.group.fail(rank, "no sign of life for " + std::to_string(limit) + " seconds");
      }
      // Ranks that wait for one that has returned would wait for ever.
      const bool deserted = unfinished > 0 && waiting == unfinished && unfinished < seen_.size();
      desertion_ = deserted ? desertion_ + passed : 0.0;
      if (desertion_ > limit) state_.group.fail(0, "ranks wait for a meeting that others have left");
    }

   private:
    State& state_;
    std::vector<int64_t> seen_;
    std::vector<double> silence_;  // seconds
    double desertion_ = 0;
    Clock::time_point last_ = Clock::now();
  };

  // Whether all ranks returned.
  bool wait_for_ranks() {
    if (wait_awake(spins ? kSpinRounds : 0, 0, [&] { return all_returned(); })) return true;
    Watch watch(*this);
    std::optional<Clock::time_point> failed;
    std::unique_lock lock(mutex);
    while (!done.wait_for(lock, kWatch, [&] { return all_returned(); })) {
      lock.unlock();
      watch.look();
      if (!failed && group.failure()) failed = Clock::now();
      if (failed && Clock::now() - *failed > kGrace) return all_returned();
      lock.lock();
    }
    return true;
  }
};

RankThreads::RankThreads(std::vector<std::string> names) : state_(std::make_shared<State>(std::move(names))) {
  try {
    for (int32_t rank = 0; rank < static_cast<int32_t>(state_->names.size()); ++rank)
      state_->threads.emplace_back([state = state_, rank] { state->serve(rank); });
  } catch (const std::system_error& error) {
    state_->stop();
    for (std::thread& thread : state_->threads) thread.join();
    throw OutOfMemory(std::string("cannot start a thread per rank: ") + error.what());
  }
}

RankThreads::~RankThreads() {
  state_->stop();
  for (size_t r = 0; r < state_->threads.size(); ++r) {
    if (!state_->returned[r])
      state_->threads[r].detach();
    else
      state_->threads[r].join();
  }
}

RankGroup& RankThreads::group() const { return state_->group; }

bool RankThreads::is_usable() const { return state_->all_returned(); }

void RankThreads::require_usable() const {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (!state.done.wait_for(lock, kPatience, [&] { return state.all_returned(); }))
    throw DeviceError(state.loss + "; it has not come back. If it does not, load the model again");
}

void RankThreads::set_stall_limit(std::chrono::duration<double> limit) { state_->stall_seconds = limit.count(); }

void RankThreads::run(std::function<void(int32_t)> work) {
  require_usable();
  State& state = *state_;
  state.group.begin();
  for (auto& returned : state.returned) returned = false;
  state.work = std::move(work);
  state.running = static_cast<int32_t>(state.names.size());
  {
    const std::lock_guard lock(state.mutex);
    state.generation.fetch_add(1, std::memory_order_release);
  }
  state.wake.notify_all();
  const bool all_returned = state.wait_for_ranks();
  const std::optional<std::string> failure = state.group.failure();
  if (!all_returned) {
    state.loss = *failure;
    throw DeviceError(*failure);
  }
  if (failure) throw DeviceError(*failure);
}

}  // namespace v100
