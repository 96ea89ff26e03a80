// What this machine can do at most: prints one JSON object with the rate of reading memory (GB/s) and of int8 dot
// products (Gop/s, a multiplication and an addition count as two). Usage: ceilings N_THREADS
//
// For x86-64 with AVX-512 VNNI; compile with -O3 -march=native -std=c++20 -pthread. Figures are medians of 5.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Seconds that n_threads need for body(thread), all starting at once.
template <class Body>
double timed(int n_threads, Body&& body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < n_threads; ++t)
    threads.emplace_back([&, t] {
      ++ready;
      while (!go.load(std::memory_order_acquire)) _mm_pause();
      body(t);
    });
  while (ready.load() < n_threads) std::this_thread::yield();
  const auto start = Clock::now();
  go.store(true, std::memory_order_release);
  for (auto& thread : threads) thread.join();
  return seconds_since(start);
}

template <class Measure>
double median_of_5(Measure&& measure) {
  std::vector<double> rates(5);
  for (double& rate : rates) rate = measure();
  std::ranges::nth_element(rates, rates.begin() + 2);
  return rates[2];
}

volatile int64_t sink;

// One stream per thread, four 64-byte loads a round, asked for 2 KiB ahead: the best of the layouts tried.
double read_rate(const std::byte* memory, size_t bytes, int n_threads) {
  const size_t part = bytes / static_cast<size_t>(n_threads) / 256 * 256;
  const double seconds = timed(n_threads, [&](int t) {
    const std::byte* p = memory + static_cast<size_t>(t) * part;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (const std::byte* end = p + part; p < end; p += 256) {
      for (int line = 0; line < 256; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(p) + 2048 + line, _MM_HINT_T0);
      a = _mm512_xor_si512(a, _mm512_load_si512(p));
      b = _mm512_xor_si512(b, _mm512_load_si512(p + 64));
      c = _mm512_xor_si512(c, _mm512_load_si512(p + 128));
      d = _mm512_xor_si512(d, _mm512_load_si512(p + 192));
    }
    alignas(64) int64_t sum[8];
    _mm512_store_si512(sum, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
    sink = sink + sum[0];
  });
  return static_cast<double>(part) * n_threads / seconds / 1e9;
}

double dot_rate(int n_threads) {
  constexpr int64_t kRounds = 8'000'000;
  const double seconds = timed(n_threads, [](int) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    const __m512i x = _mm512_set1_epi8(3);
    for (int64_t i = 0; i < kRounds; ++i)  // eight sums hide the latency; tied operands, or gcc copies them about
      __asm__ volatile(
          "vpdpbusd %8, %8, %0\n\tvpdpbusd %8, %8, %1\n\tvpdpbusd %8, %8, %2\n\tvpdpbusd %8, %8, %3\n\t"
          "vpdpbusd %8, %8, %4\n\tvpdpbusd %8, %8, %5\n\tvpdpbusd %8, %8, %6\n\tvpdpbusd %8, %8, %7"
          : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h)
          : "v"(x));
  });
  return static_cast<double>(kRounds) * 8 * 64 * 2 * n_threads / seconds / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const int n_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  constexpr size_t kBytes = size_t{1} << 30;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (n_threads < 1 || memory == MAP_FAILED) return 1;
  madvise(memory, kBytes, MADV_HUGEPAGE);
  auto* bytes = static_cast<std::byte*>(memory);
  std::fill(bytes, bytes + kBytes, std::byte{1});
  const double read = median_of_5([&] { return read_rate(bytes, kBytes, n_threads); });
  const double dot = median_of_5([&] { return dot_rate(n_threads); });
  std::printf("{\"threads\": %d, \"read_gb_s\": %.1f, \"int8_dot_gop_s\": %.0f}\n", n_threads, read, dot);
}
