// Threads of a block as fibers: what emulated kernels see of the executor (executor.cpp).
//
// A block runs on one thread of the host. Its threads run one after the other, each until it comes to something that needs
// others: a warp collective or a barrier of the block. The last that comes does what is to be done for all and goes on.
// A collective that not all lanes named by its mask reach with the same kind and mask, a shuffle that reads a lane outside
// of the mask and a barrier that not all of its threads reach end the launch with an error.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulated_cuda {

constexpr unsigned kWarpLanes = 32;
constexpr unsigned kMostThreads = 1024;  // of a block

struct Index {
  unsigned x, y, z;
};

enum class Waiting : uint8_t { no, shuffle, ballot, sync_warp, mma, block_barrier, first_threads_barrier };

// What the lanes of a warp bring to a collective and take from it.
struct alignas(64) Warp {
  uint64_t operand[kWarpLanes];                 // a shuffled value, or a predicate; afterwards the result
  uint32_t a[kWarpLanes][2], b[kWarpLanes][2];  // fragments of the tensor instruction
  float* c[kWarpLanes];
  uint8_t source[kWarpLanes];  // lane that is read

  Waiting waits_for[kWarpLanes];
  uint32_t mask_of[kWarpLanes];  // of the collective that a lane waits in, or was in

  // Sets of lanes; `waiting` in a collective, `absent` those that have returned or never were.
  uint32_t members, runnable, waiting, absent;
  // Kind and mask of those that wait, if they agree.
  Waiting kind;
  bool is_mixed;
  uint32_t mask;
};

struct Block {
  Index index{}, dimensions{}, grid{};
  std::byte* dynamic_shared = nullptr;
};

// A thread of a block.
struct Lane {
  Index thread{};
  unsigned number = 0;  // in the block
  unsigned lane = 0;    // in the warp
  uint32_t bit = 0;     // of the lane
  Warp* warp = nullptr;
  const Block* block = nullptr;
  void* stack = nullptr;  // where it stands while another runs
};

// The thread that runs. Of the host's thread: a block never moves to another.
extern __thread Lane* current __attribute__((tls_model("initial-exec")));

// Waits for all lanes of the mask; then the result is in the warp.
void meet(Waiting kind, uint32_t mask);
void block_barrier();
// Of the block's first `threads`, whole warps: the others are not waited for.
void first_threads_barrier(unsigned threads);

// --- what a compiled unit tells of itself (build.py) --------------------------------------------------------------------

struct Kernel {
  const char* name;
  size_t parameter_bytes;  // of its one parameter
  unsigned most_threads;   // __launch_bounds__, or 0
  void (*call)(const void* parameter);
};
struct Unit {
  const Kernel* kernels;
  int count;
  void* (*shared_anchor)();  // any address in the unit's static shared memory of the calling host thread
};

}  // namespace emulated_cuda
