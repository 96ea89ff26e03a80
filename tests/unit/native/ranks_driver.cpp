// Cases for test_rank_threads.py: meetings of rank threads, and ranks that fail. Exit status 0: as it should be.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/rank_threads.h"

namespace {

using namespace v100;
using Clock = std::chrono::steady_clock;

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
  std::exit(1);
}

std::vector<std::string> names(int32_t n) {
  std::vector<std::string> result;
  for (int32_t i = 0; i < n; ++i) result.push_back("CPU" + std::to_string(i));
  return result;
}

// Of very different sizes, so that the order of a sum shows.
float value(int32_t rank, int64_t i, int32_t round) {
  uint32_t hash = static_cast<uint32_t>(rank * 7919 + i * 31 + round * 104729) * 2654435761u;
  hash ^= hash >> 15, hash *= 2246822519u, hash ^= hash >> 13;
  return std::ldexp(static_cast<float>(hash % 2000003) - 1000001.0f, static_cast<int>(hash >> 27) - 30);
}

// Sums are the f32 sums in the order of ranks, with the same bits everywhere, many times in a row and for any length.
void sums() {
  for (const int32_t n : {1, 2, 3, 5, 8}) {
    RankThreads threads(names(n));
    const std::vector<int64_t> lengths{0, 1, 2, 7, 64, 1000, 4099};
    std::vector<int> wrong(static_cast<size_t>(n), 0);
    threads.run([&](int32_t rank) {
      int32_t round = 0;
      for (int repeat = 0; repeat < 10; ++repeat)
        for (const int64_t length : lengths) {
          ++round;
          std::vector<float> x(static_cast<size_t>(length));
          for (int64_t i = 0; i < length; ++i) x[static_cast<size_t>(i)] = value(rank, i, round);
          threads.group().all_reduce(rank, x.data(), length);
          for (int64_t i = 0; i < length; i += 1 + length / 50) {
            float expected = value(0, i, round);
            for (int32_t r = 1; r < n; ++r) expected += value(r, i, round);
            wrong[static_cast<size_t>(rank)] += std::memcmp(&expected, &x[static_cast<size_t>(i)], 4) != 0;
          }
        }
    });
    for (const int count : wrong) require(count == 0, std::to_string(n) + " ranks: sums in their order");
  }
}

void broadcasts() {
  const int32_t n = 4;
  RankThreads threads(names(n));
  std::vector<int> wrong(n, 0);
  threads.run([&](int32_t rank) {
    for (int32_t round = 0; round < 200; ++round) {
      std::vector<float> x(17, static_cast<float>(rank * 1000 + round));
      threads.group().broadcast(rank, round % n, x.data(), 17);
      for (const float v : x) wrong[static_cast<size_t>(rank)] += v != static_cast<float>(round % n * 1000 + round);
    }
  });
  for (const int count : wrong) require(count == 0, "everyone has the root's data");
}

std::string error_of(RankThreads& threads, const std::function<void(int32_t)>& work) {
  try {
    threads.run(work);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

// Whatever rank throws, and wherever the others are (waiting, working, done): one error, soon, and the next call works.
void throws() {
  for (const int32_t n : {2, 3, 8})
    for (int32_t thrower = 0; thrower < n; ++thrower)
      for (int when = 0; when < 4; ++when) {
        RankThreads threads(names(n));
        const auto begin = Clock::now();
        const std::string error = error_of(threads, [&](int32_t rank) {
          std::vector<float> x(100, 1.0f);
          for (int round = 0; round < 4; ++round) {
            if (rank == thrower && round == when) throw std::runtime_error("the cause");
            threads.group().all_reduce(rank, x.data(), 100);
          }
          if (when % 2 == 1)  // and working, not waiting
            for (;;) threads.group().beat(rank), std::this_thread::yield();
        });
        const std::string expected =
            "rank " + std::to_string(thrower) + " (CPU" + std::to_string(thrower) + "): the cause";
        require(error == expected, "the error is '" + expected + "', found '" + error + "'");
        require(Clock::now() - begin < std::chrono::seconds(2), "within two seconds");
        require(threads.is_usable(), "usable after a throw");
        std::vector<float> last(static_cast<size_t>(n));
        threads.run([&](int32_t rank) {
          float x = 1;
          threads.group().all_reduce(rank, &x, 1);
          last[static_cast<size_t>(rank)] = x;
        });
        for (const float x : last) require(x == static_cast<float>(n), "the next call meets again");
      }
}

// A rank that is silent for longer than the limit and comes back in time for the grace: an error, and usable again.
void hangs_and_returns() {
  RankThreads threads(names(3));
  threads.set_stall_limit(std::chrono::duration<double>(0.2));
  const std::string error = error_of(threads, [&](int32_t rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    float x = 1;
    threads.group().all_reduce(rank, &x, 1);
  });
  require(error.find("rank 1 (CPU1): no sign of life for 0.2") == 0, "the silent rank is named, found '" + error + "'");
  require(threads.is_usable(), "usable: it came back");
}

// A rank that does not come back: the call returns all the same, the set is lost, and its end waits for nobody.
void hangs_for_long() {
  const auto begin = Clock::now();
  {
    RankThreads threads(names(3));
    threads.set_stall_limit(std::chrono::duration<double>(0.2));
    const std::string error = error_of(threads, [](int32_t rank) {
      if (rank == 2) std::this_thread::sleep_for(std::chrono::seconds(20));
    });
    require(error.find("rank 2 (CPU2): no sign of life") == 0, "the lost rank is named, found '" + error + "'");
    require(!threads.is_usable(), "lost");
    require(error_of(threads, [](int32_t) {}).find("load the model again") != std::string::npos, "refused meanwhile");
  }
  require(Clock::now() - begin < std::chrono::seconds(5), "within five seconds");
  std::_Exit(0);  // the lost thread still sleeps
}

// A lost rank that comes back after all: the next call works.
void comes_back() {
  RankThreads threads(names(2));
  threads.set_stall_limit(std::chrono::duration<double>(0.2));
  const std::string error = error_of(threads, [](int32_t rank) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1900));
  });
  require(error.find("rank 1 (CPU1): no sign of life") == 0, "the lost rank is named, found '" + error + "'");
  require(!threads.is_usable(), "lost");
  for (int i = 0; i < 20 && !threads.is_usable(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(250));
  threads.run([&](int32_t rank) {
    float x = 1;
    threads.group().all_reduce(rank, &x, 1);
  });
}

// A rank that works for longer than the limit but shows life is not disturbed, nor are those that wait for it.
void slow_is_not_silent() {
  RankThreads threads(names(2));
  threads.set_stall_limit(std::chrono::duration<double>(1));
  threads.run([&](int32_t rank) {
    for (int i = 0; rank == 0 && i < 40; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      threads.group().beat(rank);
    }
    float x = 1;
    threads.group().all_reduce(rank, &x, 1);
  });
}

// Ranks that do not come to the same meetings: an error, not a wait for ever.
void different_meetings() {
  RankThreads threads(names(2));
  threads.set_stall_limit(std::chrono::duration<double>(0.2));
  const std::string lengths = error_of(threads, [&](int32_t rank) {
    std::vector<float> x(10);
    threads.group().all_reduce(rank, x.data(), 5 + rank);
  });
  require(lengths.find("met for different things") != std::string::npos, "other lengths, found '" + lengths + "'");
  const std::string left = error_of(threads, [&](int32_t rank) {
    float x = 1;
    if (rank == 0) threads.group().all_reduce(rank, &x, 1);
  });
  require(left.find("others have left") != std::string::npos, "one that has left, found '" + left + "'");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> cases{
      {"sums", sums},
      {"broadcasts", broadcasts},
      {"throws", throws},
      {"hangs_and_returns", hangs_and_returns},
      {"hangs_for_long", hangs_for_long},
      {"comes_back", comes_back},
      {"slow_is_not_silent", slow_is_not_silent},
      {"different_meetings", different_meetings},
  };
  const auto found = cases.find(argc > 1 ? argv[1] : "");
  if (found == cases.end()) return 2;
  found->second();
  return 0;
}
