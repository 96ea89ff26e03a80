// Threads of a block as fibers: what the emulated kernels see of the executor (executor.cpp), and what the driver library
// launches with.
//
// A block runs on one thread of the host. Its threads run one after the other, each until it comes to something that needs
// others: a warp collective or a barrier of the block. The last that comes does what is to be done for all and goes on.
// A collective that not all lanes named by its mask reach with the same kind and mask, a shuffle that reads a lane outside
// of the mask and a barrier that not all threads of the block reach end the launch with an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulated_cuda {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kMostThreads = 1024;  // of a block

struct Index {
  unsigned x, y, z;
};

enum class Waiting : uint8_t { no, shuffle, ballot, sync_warp, mma, block_barrier };

struct Block;

// A thread of a block.
struct Lane {
  Index thread{};
  unsigned number = 0;  // in the block
  const Block* block = nullptr;
  void* stack = nullptr;  // where it stands while another runs

  Waiting waiting = Waiting::no;
  uint32_t mask = 0;        // of the collective it waits for
  uint64_t operand = 0;     // a shuffled value, or a predicate; afterwards the result
  uint32_t source = 0;      // lane that is read
  uint32_t a[2]{}, b[2]{};  // fragments of the tensor instruction
  float* c = nullptr;
};

struct Block {
  Index index{}, dimensions{}, grid{};
  std::byte* dynamic_shared = nullptr;
};

// The thread that runs. Of the host's thread: a block never moves to another.
extern __thread Lane* current __attribute__((tls_model("initial-exec")));

// Waits for all lanes of the mask; then `operand` of the current lane holds the result.
void meet(Waiting kind, uint32_t mask);
void block_barrier();

// --- for the driver library -------------------------------------------------------------------------------------------

// What a compiled unit exports as emulated_kernels(&count).
struct Kernel {
  const char* name;
  size_t parameter_bytes;  // of its one parameter
  unsigned most_threads;   // __launch_bounds__
  void (*call)(const void* parameter);
};
struct Unit {
  const Kernel* kernels;
  int count;
  void* (*shared_anchor)();  // any address in the unit's static shared memory of the calling host thread
};

struct Launch {
  const Kernel* kernel;
  const Unit* unit;
  const void* parameter;
  Index grid, block;
  unsigned shared_bytes;
};

// Where an address lies that a kernel may not touch. Of the driver library, which knows the allocations.
std::string describe_address(const void* address);

// Runs all blocks. The text of what went wrong, empty for success.
std::string run(const Launch& launch);

}  // namespace emulated_cuda
