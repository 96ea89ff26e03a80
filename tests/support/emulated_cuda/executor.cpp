#include "launch.h"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __F16C__
#include <immintrin.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulated_cuda {

__thread Lane* current __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10;
// Between the stacks of neighbours: no power of two, so that their frames do not fall into the same sets of the caches.
constexpr size_t kStackStride = kStackBytes + 11 * 64;
constexpr uint64_t kStackMark = 0x5ac3b10c5ac3b10cull;  // at a stack's end: gone when it was too small
constexpr int kPoison = 0xff;                           // NaN in f32 and f16
constexpr size_t kSharedGuard = 256;                    // bytes after dynamic shared memory that must stay poisoned
constexpr size_t kMostShared = 96 << 10;
constexpr uint64_t kBlocksWorthHelp = 4;
constexpr size_t kSignalStackBytes = 64 << 10;
constexpr int kCaughtSignals[] = {SIGSEGV, SIGBUS, SIGFPE};

// --- switching between fibers -----------------------------------------------------------------------------------------

#ifdef __x86_64__

// Saves where this fiber stands and goes on where `to` stands. Jumps in place of returns: every call of `meet` by a lane is
// answered by a return to the same place in another, which is what the processor predicts.
[[gnu::always_inline]] inline void switch_stack(void** from, void* to) {
  asm volatile(
      "lea -128(%%rsp), %%rsp\n\t"  // the red zone
      "push %%rbp\n\t"
      "push %%rbx\n\t"
      "lea 1f(%%rip), %%rax\n\t"
      "push %%rax\n\t"
      "mov %%rsp, (%0)\n\t"
      "mov %1, %%rsp\n\t"
      "pop %%rax\n\t"
      "jmp *%%rax\n"
      "1:\n\t"
      "pop %%rbx\n\t"
      "pop %%rbp\n\t"
      "lea 128(%%rsp), %%rsp"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1",
        "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15");
}

// A stack that starts in `entry`, which never returns.
void* fresh_stack(std::byte* memory, size_t bytes, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(memory) + bytes - 64) & ~uintptr_t{63};
  void** words = reinterpret_cast<void**>(top);
  words[0] = reinterpret_cast<void*>(entry);
  words[1] = nullptr;  // where a return address would be
  return words;
}

#else

[[gnu::always_inline]] inline void switch_stack(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

// The context stands at the upper end of its stack.
void* fresh_stack(std::byte* memory, size_t bytes, void (*entry)()) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(memory) + bytes - sizeof(ucontext_t) - 64) & ~uintptr_t{63};
  ucontext_t* context = reinterpret_cast<ucontext_t*>(top);
  getcontext(context);
  context->uc_stack.ss_sp = memory;
  context->uc_stack.ss_size = top - reinterpret_cast<uintptr_t>(memory);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#endif

// --- a block ----------------------------------------------------------------------------------------------------------

std::string hexadecimal(uint32_t mask) {
  std::string text;
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[mask >> shift & 15u];
  return text;
}

const char* words(Waiting kind) {
  switch (kind) {
    case Waiting::no:
      return "run";
    case Waiting::shuffle:
      return "wait in a shuffle";
    case Waiting::ballot:
      return "wait in a ballot";
    case Waiting::sync_warp:
      return "wait in __syncwarp";
    case Waiting::mma:
      return "wait in the tensor instruction";
    case Waiting::block_barrier:
      return "wait in __syncthreads";
    case Waiting::first_threads_barrier:
      return "wait in a barrier of the first warps";
  }
  return "?";
}

// --- the tensor instruction ---------------------------------------------------------------------------------------------

using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
using Places = long __attribute__((vector_size(32)));

Floats four_halves(const uint32_t (&pairs)[2]) {
#ifdef __F16C__
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(pairs)));
#else
  Floats values;
  for (int i = 0; i < 4; ++i)
    values[i] = static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2))));
  return values;
#endif
}

// Four columns of B, a lane each, as rows of k.
void load_columns(const uint32_t (*b)[2], Doubles (&rows)[4]) {
  float columns[4][4];
  for (int column = 0; column < 4; ++column) {
    const Floats values = four_halves(b[column]);
    std::memcpy(columns[column], &values, sizeof(values));
  }
  for (int k = 0; k < 4; ++k) rows[k] = Doubles{columns[0][k], columns[1][k], columns[2][k], columns[3][k]};
}

void add_to(float* c, Doubles sums) {
  Floats values;
  std::memcpy(&values, c, sizeof(values));
  values = __builtin_convertvector(__builtin_convertvector(values, Doubles) + sums, Floats);
  std::memcpy(c, &values, sizeof(values));
}

void multiply(const Warp& warp) {
  for (unsigned quadpair = 0; quadpair < 4; ++quadpair) {
    const unsigned low = 4 * quadpair, high = low + 16;  // lanes of rows, and of columns, 0..3 and 4..7
    Doubles left[4], right[4];                           // columns 0..3 and 4..7
    load_columns(&warp.b[low], left);
    load_columns(&warp.b[high], right);
    for (const unsigned lanes : {low, high}) {
      Doubles row_left[4], row_right[4];
      for (unsigned row = 0; row < 4; ++row) {
        const Floats a = four_halves(warp.a[lanes + row]);
        row_left[row] = static_cast<double>(a[0]) * left[0], row_right[row] = static_cast<double>(a[0]) * right[0];
        for (int k = 1; k < 4; ++k) {
          row_left[row] += static_cast<double>(a[k]) * left[k];
          row_right[row] += static_cast<double>(a[k]) * right[k];
        }
      }
      // Lane r + 0 or 2 has rows r and r + 2; of each columns 0, 1, 4, 5 or 2, 3, 6, 7: registers 0 1 4 5 and 2 3 6 7.
      for (unsigned row = 0; row < 2; ++row) {
        constexpr Places kFirst = {0, 1, 4, 5}, kSecond = {2, 3, 6, 7};
        float *first = warp.c[lanes + row], *second = warp.c[lanes + row + 2];
        add_to(first, __builtin_shuffle(row_left[row], row_left[row + 2], kFirst));
        add_to(first + 4, __builtin_shuffle(row_right[row], row_right[row + 2], kFirst));
        add_to(second, __builtin_shuffle(row_left[row], row_left[row + 2], kSecond));
        add_to(second + 4, __builtin_shuffle(row_right[row], row_right[row + 2], kSecond));
      }
    }
  }
}

// --- the threads of a block -----------------------------------------------------------------------------------------------

[[noreturn]] void fiber_main();

class Worker;
__thread Worker* running __attribute__((tls_model("initial-exec"))) =
    nullptr;  // the worker of the block that runs here

// Runs blocks on one thread of the host.
class Worker {
 public:
  static Worker& of_this_thread() {
    static thread_local std::unique_ptr<Worker> worker(new Worker);
    return *worker;
  }

  ~Worker() {
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
    munmap(signal_stack_, kSignalStackBytes);
    munmap(stacks_, kMostThreads * kStackStride);
    munmap(shared_, kMostShared + kSharedGuard);
  }

  // The text of what went wrong, empty for success.
  std::string run_block(const Launch& launch, Index index) {
    start(launch, index);
    running = this;
    current = &lanes_[0];
    switch_stack(&main_, current->stack);
    current = nullptr;
    if (error_.empty()) check_memory();
    if (error_.empty()) return {};
    const auto triple = [](Index i) {
      return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
    };
    return std::string(launch.kernel->name) + ", block " + triple(index) + " of " + triple(launch.grid) + ": " + error_;
  }

  // All lanes of the mask are there: does what is to be done for them.
  [[gnu::noinline]] void complete(Warp& warp, Waiting kind, uint32_t mask) {
    if (warp.is_mixed)
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        const int i = std::countr_zero(rest);
        if (warp.waits_for[i] != kind || warp.mask_of[i] != mask)
          fail("lanes meet in different places: " + describe(warp));
      }
    if (kind == Waiting::shuffle) shuffle(warp, mask);
    if (kind == Waiting::ballot) vote(warp, mask);
    if (kind == Waiting::mma) multiply(warp);
    warp.waiting &= ~mask;
    warp.runnable |= mask;
    if (warp.waiting != 0) warp.is_mixed = true;
  }

  // A thread that can run, the next one of the warp by choice.
  [[gnu::noinline]] Lane* choose(const Lane& me) {
    const Warp* warp = me.warp;
    if (warp->runnable == 0) {
      ready_ &= ~(1u << (warp - warps_));
      if (ready_ == 0) fail_all_stuck();
      warp = &warps_[std::countr_zero(ready_)];
    }
    return &lanes_[static_cast<unsigned>(warp - warps_) * kWarpLanes +
                   static_cast<unsigned>(std::countr_zero(warp->runnable))];
  }

  [[noreturn, gnu::noinline]] void fail_lonely(const Lane& me, uint32_t mask) {
    if ((mask & me.bit) == 0)
      fail("thread " + std::to_string(me.number) + " is not in its own mask " + hexadecimal(mask));
    fail("not all lanes will come: " + describe(*me.warp));
  }

  void block_barrier(Lane& me) {
    Warp& warp = *me.warp;
    if (++at_barrier_ == threads_) {
      at_barrier_ = 0;
      for (unsigned w = 0; w < warps_used_; ++w) warps_[w].runnable = warps_[w].members;
      ready_ = all_warps();
      return;
    }
    warp.waits_for[me.lane] = Waiting::block_barrier;
    warp.runnable &= ~me.bit;
    run_another(me);
  }

  void first_threads_barrier(Lane& me, unsigned threads) {
    if (me.number >= threads || threads > threads_ || threads % kWarpLanes != 0)
      fail("thread " + std::to_string(me.number) + " in a barrier of the first " + std::to_string(threads));
    if (at_first_ == 0) first_ = threads;
    if (first_ != threads) fail("barriers of different numbers of warps at once");
    if (++at_first_ == threads) {
      at_first_ = 0;
      for (unsigned w = 0; w < threads / kWarpLanes; ++w) {
        warps_[w].runnable = warps_[w].members;
        ready_ |= 1u << w;
      }
      return;
    }
    me.warp->waits_for[me.lane] = Waiting::first_threads_barrier;
    me.warp->runnable &= ~me.bit;
    run_another(me);
  }

  // In a signal's handler: what the running thread did is not possible.
  [[noreturn]] void fault(int signal, const siginfo_t& info) {
    const std::string who = "thread " + std::to_string(current->number);
    if (signal == SIGFPE) fail(who + " divides by zero");
    // An address that no pointer can have, or one that is not aligned for its vector, is not told.
    if (info.si_addr == nullptr || info.si_code == SI_KERNEL) fail(who + " uses a null, wild or misaligned address");
    fail(who + " uses an address " + describe_address(info.si_addr));
  }

  // What the running thread did breaks a rule of the language.
  [[noreturn]] void fault(const std::string& where, const std::string& what) {
    fail("thread " + std::to_string(current->number) + ", " + where + ": " + what);
  }

  [[noreturn]] void run_thread() {
    launch_->kernel->call(launch_->parameter);
    Lane& me = *current;
    me.warp->absent |= me.bit;
    me.warp->runnable &= ~me.bit;
    if (++returned_ == threads_) leave();
    run_another(me);
    std::abort();  // nobody goes on with a thread that returned
  }

  // Goes on with another thread; returns when `me` can go on.
  [[gnu::always_inline]] void run_another(Lane& me) {
    // The next lane of the warp can be found without a look into memory that was just written.
    Lane* next = &me + 1;
    if ((me.warp->runnable & me.bit << 1) == 0) next = choose(me);
    current = next;
    switch_stack(&me.stack, next->stack);
  }

 private:
  Worker() {
    stacks_ = map(kMostThreads * kStackStride);
    shared_ = map(kMostShared + kSharedGuard);
    signal_stack_ = map(kSignalStackBytes);
    stack_t stack{};
    stack.ss_sp = signal_stack_;
    stack.ss_size = kSignalStackBytes;
    sigaltstack(&stack, nullptr);
  }

  static std::byte* map(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(memory);
  }

  uint32_t all_warps() const { return warps_used_ == 32 ? 0xffffffffu : (1u << warps_used_) - 1; }

  void start(const Launch& launch, Index index) {
    launch_ = &launch;
    threads_ = launch.block.x * launch.block.y * launch.block.z;
    warps_used_ = (threads_ + kWarpLanes - 1) / kWarpLanes;
    at_barrier_ = at_first_ = returned_ = 0;
    ready_ = all_warps();
    error_.clear();
    block_.index = index, block_.dimensions = launch.block, block_.grid = launch.grid;
    block_.dynamic_shared = shared_;
    std::memset(shared_, kPoison, launch.shared_bytes + kSharedGuard);
    poison_static_shared(*launch.unit);
    for (unsigned t = 0; t < threads_; ++t) {
      Lane& lane = lanes_[t];
      lane.thread = {t % launch.block.x, t / launch.block.x % launch.block.y, t / launch.block.x / launch.block.y};
      lane.number = t, lane.lane = t % kWarpLanes, lane.bit = 1u << lane.lane;
      lane.warp = &warps_[t / kWarpLanes];
      lane.block = &block_;
      std::byte* stack = stacks_ + t * kStackStride;
      *reinterpret_cast<uint64_t*>(stack) = kStackMark;
      lane.stack = fresh_stack(stack, kStackBytes, fiber_main);
    }
    for (unsigned w = 0; w < warps_used_; ++w) {
      const unsigned lanes = std::min(kWarpLanes, threads_ - w * kWarpLanes);
      Warp& warp = warps_[w];
      warp.members = warp.runnable = lanes == kWarpLanes ? 0xffffffffu : (1u << lanes) - 1;
      warp.absent = ~warp.members;
      warp.waiting = 0;
    }
  }

  // A unit's static shared memory is its thread-local storage, all of it.
  void poison_static_shared(const Unit& unit) {
    if (unit_ != &unit) {
      void* const anchor = unit.shared_anchor();
      static_shared_ = nullptr, static_shared_bytes_ = 0;
      struct Search {
        void* anchor;
        Worker* worker;
      } search{anchor, this};
      dl_iterate_phdr(
          [](dl_phdr_info* info, size_t, void* data) {
            const Search& s = *static_cast<Search*>(data);
            if (info->dlpi_tls_data == nullptr) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
              const auto& header = info->dlpi_phdr[i];
              std::byte* begin = static_cast<std::byte*>(info->dlpi_tls_data);
              if (header.p_type != PT_TLS || s.anchor < begin || s.anchor >= begin + header.p_memsz) continue;
              s.worker->static_shared_ = begin, s.worker->static_shared_bytes_ = header.p_memsz;
              return 1;
            }
            return 0;
          },
          &search);
      unit_ = &unit;
    }
    if (static_shared_bytes_ > 0) std::memset(static_shared_, kPoison, static_shared_bytes_);
  }

  void check_memory() {
    for (size_t i = 0; i < kSharedGuard; ++i)
      if (shared_[launch_->shared_bytes + i] != std::byte{kPoison}) {
        error_ = "a write " + std::to_string(i) + " bytes after the end of dynamic shared memory";
        return;
      }
    for (unsigned t = 0; t < threads_; ++t)
      if (*reinterpret_cast<uint64_t*>(stacks_ + t * kStackStride) != kStackMark) {
        error_ = "thread " + std::to_string(t) + " needs more stack than the emulator has";
        return;
      }
  }

  // Ends the block: its fibers are left where they stand, which own nothing.
  [[noreturn]] void leave() {
    void* unused;
    switch_stack(&unused, main_);
    std::abort();
  }
  [[noreturn]] void fail(std::string text) {
    error_ = std::move(text);
    leave();
  }

  // What the lanes of a warp are doing.
  std::string describe(const Warp& warp) const {
    std::string text = "warp " + std::to_string(&warp - warps_) + ": ";
    const uint32_t returned = warp.absent & warp.members;
    if (returned != 0) text += "lanes " + hexadecimal(returned) + " have returned, ";
    const auto doing = [&](unsigned lane) {
      const bool stands = ((warp.waiting | ~warp.runnable) >> lane & 1u) != 0;
      return stands ? warp.waits_for[lane] : Waiting::no;
    };
    const auto is_collective = [](Waiting kind) {
      return kind != Waiting::no && kind != Waiting::block_barrier && kind != Waiting::first_threads_barrier;
    };
    for (uint32_t rest = warp.members & ~returned; rest != 0;) {
      const unsigned first = static_cast<unsigned>(std::countr_zero(rest));
      const Waiting kind = doing(first);
      uint32_t alike = 0;
      for (uint32_t lanes = rest; lanes != 0; lanes &= lanes - 1) {
        const unsigned i = static_cast<unsigned>(std::countr_zero(lanes));
        if (doing(i) == kind && (!is_collective(kind) || warp.mask_of[i] == warp.mask_of[first])) alike |= 1u << i;
      }
      text += "lanes " + hexadecimal(alike) + " " + words(kind) +
              (is_collective(kind) ? " of lanes " + hexadecimal(warp.mask_of[first]) : std::string()) + ", ";
      rest &= ~alike;
    }
    return text.substr(0, text.size() - 2);
  }
  [[noreturn]] void fail_all_stuck() {
    std::string text = "no thread can go on: ";
    unsigned shown = 0;
    for (unsigned w = 0; w < warps_used_ && shown < 4; ++w)
      if ((warps_[w].members & ~warps_[w].absent) != 0) text += (shown++ > 0 ? "; " : "") + describe(warps_[w]);
    if (returned_ > 0)
      text += "; " + std::to_string(returned_) + " of " + std::to_string(threads_) + " threads have returned";
    fail(text);
  }

  static void vote(Warp& warp, uint32_t mask) {
    uint32_t votes = 0;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      votes |= static_cast<uint32_t>(warp.operand[i]) << i;
    }
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) warp.operand[std::countr_zero(rest)] = votes;
  }

  void shuffle(Warp& warp, uint32_t mask) {
    uint64_t values[kWarpLanes];
    std::memcpy(values, warp.operand, sizeof(values));
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if ((mask >> warp.source[i] & 1u) == 0)
        fail("warp " + std::to_string(&warp - warps_) + ": lane " + std::to_string(i) + " reads lane " +
             std::to_string(warp.source[i]) + " in a shuffle of lanes " + hexadecimal(mask));
      warp.operand[i] = values[warp.source[i]];
    }
  }

  Lane lanes_[kMostThreads];
  Warp warps_[kMostThreads / kWarpLanes];
  Block block_;
  const Launch* launch_ = nullptr;
  const Unit* unit_ = nullptr;
  std::byte *stacks_ = nullptr, *shared_ = nullptr, *static_shared_ = nullptr, *signal_stack_ = nullptr;
  size_t static_shared_bytes_ = 0;
  void* main_ = nullptr;  // where the host's thread waits for the block
  unsigned threads_ = 0, warps_used_ = 0, at_barrier_ = 0, at_first_ = 0, first_ = 0, returned_ = 0;
  uint32_t ready_ = 0;  // warps with a thread that can run
  std::string error_;
};

void fiber_main() { running->run_thread(); }

// --- faults -----------------------------------------------------------------------------------------------------------

struct sigaction handlers_before[NSIG];

// A fault in a kernel ends its block; any other is handled as it was before.
void handle_signal(int signal, siginfo_t* info, void* context) {
  if (current != nullptr) running->fault(signal, *info);
  const struct sigaction& before = handlers_before[signal];
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  sigaction(signal, &before, nullptr);  // and the instruction runs again
}

void catch_faults() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = handle_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler does not return from a kernel's fault
    for (const int signal : kCaughtSignals) sigaction(signal, &action, &handlers_before[signal]);
  });
}

// --- blocks over the threads of the host --------------------------------------------------------------------------------

// A launch under way.
struct Work {
  const Launch& launch;
  const uint64_t blocks;
  std::atomic<uint64_t> next{0};
  std::mutex mutex{};
  std::string error{};
  unsigned helpers = 0;  // guarded by the pool

  void run() {
    const Index grid = launch.grid;
    Worker& worker = Worker::of_this_thread();
    for (uint64_t i = next++; i < blocks; i = next++) {
      const Index index{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                        static_cast<unsigned>(i / grid.x / grid.y)};
      std::string text = worker.run_block(launch, index);
      if (text.empty()) continue;
      next = blocks;
      const std::lock_guard lock(mutex);
      if (error.empty()) error = std::move(text);
    }
  }
};

// Threads that help with launches of many blocks. Never destroyed: a process may end while they wait.
class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void run(Work& work) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(&work);
    }
    asked_.notify_all();
    work.run();
    std::unique_lock lock(mutex_);
    std::erase(waiting_, &work);
    done_.wait(lock, [&] { return work.helpers == 0; });
  }
  bool has_helpers() const { return helpers_ > 0; }

 private:
  Pool() {
    const char* text = std::getenv("EMULATED_CUDA_WORKERS");
    const unsigned workers =
        text != nullptr ? static_cast<unsigned>(std::atoi(text)) : std::min(4u, std::thread::hardware_concurrency());
    helpers_ = workers > 1 ? workers - 1 : 0;
    for (unsigned i = 0; i < helpers_; ++i) std::thread([this] { help(); }).detach();
  }

  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      asked_.wait(lock, [&] { return !waiting_.empty(); });
      Work& work = *waiting_.front();
      ++work.helpers;
      lock.unlock();
      work.run();
      lock.lock();
      std::erase(waiting_, &work);
      if (--work.helpers == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable asked_, done_;
  std::vector<Work*> waiting_;
  unsigned helpers_ = 0;
};

}  // namespace

[[gnu::noinline]] void meet(Waiting kind, uint32_t mask) {
  Lane& me = *current;
  Warp& warp = *me.warp;
  warp.waits_for[me.lane] = kind, warp.mask_of[me.lane] = mask;
  if (warp.waiting == 0)
    warp.kind = kind, warp.mask = mask, warp.is_mixed = false;
  else if (warp.kind != kind || warp.mask != mask)
    warp.is_mixed = true;
  if ((mask & me.bit) == 0 || (mask & warp.absent) != 0) running->fail_lonely(me, mask);
  warp.waiting |= me.bit;
  if ((mask & ~warp.waiting) == 0) return running->complete(warp, kind, mask);
  warp.runnable &= ~me.bit;
  running->run_another(me);
}
[[gnu::noinline]] void block_barrier() { running->block_barrier(*current); }
[[gnu::noinline]] void first_threads_barrier(unsigned threads) { running->first_threads_barrier(*current, threads); }

std::string run(const Launch& launch) {
  catch_faults();
  Work work{launch, uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z};
  if (work.blocks >= kBlocksWorthHelp && Pool::instance().has_helpers())
    Pool::instance().run(work);
  else
    work.run();
  return work.error;
}

}  // namespace emulated_cuda

// --- the compiler's checks ----------------------------------------------------------------------------------------------
// Called by the units, whose flags ask for them (build.py); names and structs are the compiler's.

namespace {

struct SourcePlace {
  const char* file;
  uint32_t line, column;
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};
struct AlignmentCheck {
  SourcePlace place;
  const void* type;
  unsigned char log_alignment, kind;
};
struct BoundsCheck {
  SourcePlace place;
  const void *array_type, *index_type;
};
struct ShiftCheck {
  SourcePlace place;
  const void *left_type, *right_type;
};

}  // namespace

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const AlignmentCheck* check, uintptr_t address) {
  emulated_cuda::running->fault(check->place.text(), "an address that is " + std::to_string(address % 16) +
                                                         " modulo 16 is not aligned to " +
                                                         std::to_string(1u << check->log_alignment) + " bytes");
}
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(const BoundsCheck* check, uintptr_t index) {
  emulated_cuda::running->fault(check->place.text(),
                                "index " + std::to_string(static_cast<intptr_t>(index)) + " is outside of its array");
}
[[noreturn]] void __ubsan_handle_shift_out_of_bounds_abort(const ShiftCheck* check, uintptr_t, uintptr_t by) {
  emulated_cuda::running->fault(check->place.text(),
                                "a shift by " + std::to_string(static_cast<intptr_t>(by)) + " bits");
}

}  // extern "C"
