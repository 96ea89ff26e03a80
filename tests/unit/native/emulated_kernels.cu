// Kernels for tests of the emulated device: each intrinsic by itself, and each of the mistakes that the device must report.
#include "codecs.cuh"

namespace v100::cuda {

struct TestParams {
  const uint32_t* a;
  const uint32_t* b;
  const uint32_t* c;
  uint32_t* y;
  int32_t n;
  int32_t what;
};

// y[i] of a[i], b[i], c[i].
extern "C" __global__ void __launch_bounds__(256) intrinsics(TestParams p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.n) return;
  const uint32_t a = p.a[i], b = p.b[i], c = p.c[i];
  const float x = __uint_as_float(a);
  uint32_t y = 0;
  switch (p.what) {
    case 0:
      y = as_bits(__hadd2(as_half2(a), as_half2(b)));
      break;
    case 1:
      y = as_bits(__hsub2(as_half2(a), as_half2(b)));
      break;
    case 2:
      y = as_bits(__hmul2(as_half2(a), as_half2(b)));
      break;
    case 3:
      y = as_bits(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
      break;
    case 4:
      y = __half_as_ushort(__float2half_rn(x));
      break;
    case 5:
      y = __float_as_uint(__low2float(as_half2(a)));
      break;
    case 6:
      y = __byte_perm(a, b, c);
      break;
    case 7:
      y = __funnelshift_r(a, b, c);
      break;
    case 8:
      y = static_cast<uint32_t>(__ffs(static_cast<int>(a)));
      break;
    case 9:
      y = static_cast<uint32_t>(__float2int_rn(x));
      break;
    case 10:
      y = static_cast<uint32_t>(__float2int_rz(x));
      break;
    case 11:
      y = static_cast<uint32_t>(__dp4a(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c)));
      break;
  }
  p.y[i] = y;
}

// One warp per tile: a [tiles][4 quadpairs][8 rows][4 k], b [tiles][4][8 columns][4 k] f16, c and y [tiles][4][8][8] f32.
extern "C" __global__ void __launch_bounds__(32) tensor(TestParams p) {
  const int lane = lane_id(), quadpair = lane / 4 % 4, line = lane % 4 + lane / 16 * 4;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * 4 + quadpair;
  const uint2 a = reinterpret_cast<const uint2*>(p.a)[tile * 8 + line];
  const uint2 b = reinterpret_cast<const uint2*>(p.b)[tile * 8 + line];
  float sums[8];
  const auto place = [&](int i) { return tile * 64 + row_of_c(lane, i) * 8 + column_of_c(lane, i) % 8; };
  for (int i = 0; i < 8; ++i) sums[i] = __uint_as_float(p.c[place(i)]);
  mma_8x32x4(sums, a.x, a.y, b.x, b.y);
  for (int i = 0; i < 8; ++i) p.y[place(i)] = __float_as_uint(sums[i]);
}

// y [5][32] of a [32]: what lanes tell each other.
extern "C" __global__ void __launch_bounds__(32) exchanges(TestParams p) {
  const int lane = lane_id();
  const uint32_t a = p.a[lane];
  p.y[lane] = __shfl_xor_sync(kAllLanes, a, 5);
  p.y[32 + lane] = __shfl_sync(kAllLanes, a, 3, 8);
  p.y[64 + lane] = __shfl_up_sync(kAllLanes, a, 3u);
  p.y[96 + lane] = __shfl_down_sync(kAllLanes, a, 3u, 16);
  p.y[128 + lane] = lane < 8 ? __ballot_sync(0xffu, (a & 1u) != 0) : __ballot_sync(0xffffff00u, (a & 1u) != 0);
}

// What shared memory holds at the start of a block: y [blocks][2], the static and the dynamic kind.
extern "C" __global__ void __launch_bounds__(32) fresh_shared(TestParams p) {
  __shared__ uint32_t fixed[64];
  extern __shared__ uint32_t asked_for[];
  if (threadIdx.x == 0) {
    p.y[2 * blockIdx.x] = fixed[17];
    p.y[2 * blockIdx.x + 1] = asked_for[5];
  }
  __syncwarp();
  fixed[threadIdx.x] = asked_for[threadIdx.x] = 1;
}

// Two warps with shared memory and many barriers: y [64], each thread's sum over what all wrote in `n` rounds.
extern "C" __global__ void __launch_bounds__(64) rounds(TestParams p) {
  __shared__ uint32_t values[64];
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t total = 0;
  for (int round = 0; round < p.n; ++round) {
    values[thread] = static_cast<uint32_t>(round * 64 + thread);
    __syncthreads();
    for (int i = 0; i < 64; ++i) total += values[(thread + i) % 64];
    __syncthreads();
  }
  p.y[thread] = total;
}

// Mistakes, by number.
extern "C" __global__ void __launch_bounds__(64) mistakes(TestParams p) {
  extern __shared__ uint32_t asked_for[];
  __shared__ uint32_t fixed[8];
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id();
  uint32_t value = static_cast<uint32_t>(thread);
  switch (p.what) {
    case 0:  // a thread does not come to the barrier
      if (thread != 40) __syncthreads();
      break;
    case 1:  // lanes that left are named
      if (lane >= 16) return;
      value = __shfl_xor_sync(kAllLanes, value, 1);
      break;
    case 2:  // lanes in two places
      if (lane < 16)
        value = __shfl_xor_sync(kAllLanes, value, 1);
      else
        value = __ballot_sync(kAllLanes, true);
      break;
    case 3:  // a lane outside of the mask is read
      if (lane < 16) value = __shfl_sync(0xffffu, value, 20);
      break;
    case 4:  // a lane that is not in its mask
      value = __shfl_sync(0xffffu, value, 0);
      break;
    case 5:  // warps wait for each other
      if (thread < 32)
        __syncthreads();
      else if (thread < 48)
        __syncwarp();
      break;
    case 6:
      asked_for[p.n / 4] = value;
      break;  // a write after the end of shared memory
    case 7:
      p.y[p.n / 4] = value;
      break;  // a write after the end of device memory
    case 8:
      value = p.a[p.n / 4];
      break;  // a read of memory that is not there
    case 9:
      value = *p.c;
      break;    // of a pointer that is not set
    case 10: {  // the tensor instruction without some lanes
      float c[8] = {};
      if (lane != 7) mma_8x32x4(c, value, value, value, value);
      value = __float_as_uint(c[0]);
      break;
    }
    case 11:
      value = reinterpret_cast<const uint2*>(p.a + 1)->y;
      break;
    case 12:
      fixed[p.n] = value, value = fixed[0];
      break;
    case 13:
      value <<= p.n;
      break;
  }
  if (p.what != 7) p.y[thread] = value;
}

}  // namespace v100::cuda
