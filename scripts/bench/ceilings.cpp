// What this machine can do at most: prints one JSON object with the rate of reading memory (GB/s) and of int8 dot
// products (Gop/s, a multiplication and an addition count as two). Usage: ceilings N_THREADS
//
// Compile with -O3 -march=native -pthread. Figures are medians of 7.
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
double median_of_7(Measure&& measure) {
  std::vector<double> rates(7);
  for (double& rate : rates) rate = measure();
  std::ranges::nth_element(rates, rates.begin() + 3);
  return rates[3];
}

volatile int64_t sink;

// Two streams per thread, eight 32-byte loads in flight: the best of the layouts tried on several machines.
double read_rate(const std::byte* memory, size_t bytes, int n_threads) {
  const size_t part = bytes / static_cast<size_t>(2 * n_threads) / 128 * 128;
  const double seconds = timed(n_threads, [&](int t) {
    const auto* a = reinterpret_cast<const __m256i*>(memory + static_cast<size_t>(2 * t) * part);
    const auto* b = reinterpret_cast<const __m256i*>(memory + static_cast<size_t>(2 * t + 1) * part);
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (size_t i = 0; i < part / 32; i += 4) {
      s0 = _mm256_xor_si256(s0, _mm256_load_si256(a + i));
      s1 = _mm256_xor_si256(s1, _mm256_load_si256(a + i + 1));
      s2 = _mm256_xor_si256(s2, _mm256_load_si256(a + i + 2));
      s3 = _mm256_xor_si256(s3, _mm256_load_si256(a + i + 3));
      s4 = _mm256_xor_si256(s4, _mm256_load_si256(b + i));
      s5 = _mm256_xor_si256(s5, _mm256_load_si256(b + i + 1));
      s6 = _mm256_xor_si256(s6, _mm256_load_si256(b + i + 2));
      s7 = _mm256_xor_si256(s7, _mm256_load_si256(b + i + 3));
    }
    s0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_xor_si256(s0, s1), _mm256_xor_si256(s2, s3)),
                          _mm256_xor_si256(_mm256_xor_si256(s4, s5), _mm256_xor_si256(s6, s7)));
    sink = sink + _mm256_extract_epi64(s0, 0);
  });
  return static_cast<double>(part) * 2 * n_threads / seconds / 1e9;
}

#ifdef __AVX512VNNI__
double dot_rate(int n_threads) {
  constexpr int64_t kRounds = 20'000'000;
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
#else
double dot_rate(int) { return 0; }
#endif

}  // namespace

int main(int argc, char** argv) {
  const int n_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  constexpr size_t kBytes = size_t{1} << 30;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (n_threads < 1 || memory == MAP_FAILED) return 1;
  madvise(memory, kBytes, MADV_HUGEPAGE);
  auto* bytes = static_cast<std::byte*>(memory);
  std::fill(bytes, bytes + kBytes, std::byte{1});
  const double read = median_of_7([&] { return read_rate(bytes, kBytes, n_threads); });
  const double dot = median_of_7([&] { return dot_rate(n_threads); });
  std::printf("{\"threads\": %d, \"read_gb_s\": %.1f, \"int8_dot_gop_s\": %.0f}\n", n_threads, read, dot);
}
