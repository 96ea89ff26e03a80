// Loads with a caching policy. `stream` is for data that is read once (weights): it does not displace what L1 holds.
// `shared_between_devices` is for what other devices read or write meanwhile: every access goes to memory, word by word whole.
#pragma once

#include "base.cuh"

namespace v100::cuda {

#ifdef V100_EMULATED
__device__ __forceinline__ uint4 stream_16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ uint2 stream_8(const void* p) { return *static_cast<const uint2*>(p); }
__device__ __forceinline__ uint32_t stream_4(const void* p) { return *static_cast<const uint32_t*>(p); }
__device__ __forceinline__ uint32_t stream_2(const void* p) { return *static_cast<const uint16_t*>(p); }
__device__ __forceinline__ uint32_t stream_1(const void* p) { return *static_cast<const uint8_t*>(p); }
__device__ __forceinline__ uint4 load_shared_between_devices(const uint32_t* p) {
  return {__atomic_load_n(p, __ATOMIC_SEQ_CST), __atomic_load_n(p + 1, __ATOMIC_SEQ_CST),
          __atomic_load_n(p + 2, __ATOMIC_SEQ_CST), __atomic_load_n(p + 3, __ATOMIC_SEQ_CST)};
}
__device__ __forceinline__ void store_shared_between_devices(uint32_t* p, uint4 v) {
  __atomic_store_n(p, v.x, __ATOMIC_SEQ_CST), __atomic_store_n(p + 1, v.y, __ATOMIC_SEQ_CST);
  __atomic_store_n(p + 2, v.z, __ATOMIC_SEQ_CST), __atomic_store_n(p + 3, v.w, __ATOMIC_SEQ_CST);
}
__device__ __forceinline__ void prefetch(const void*) {}
#else
__device__ __forceinline__ uint4 load_shared_between_devices(const uint32_t* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_between_devices(uint32_t* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 stream_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 stream_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t stream_4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t stream_2(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t stream_1(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// Into L2: takes no register, and the load that comes later waits a third as long.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#endif

// Shared by the warps of a block: stays in L1.
__device__ __forceinline__ uint4 cached_16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }

}  // namespace v100::cuda
