// What is written once for a GPU and for a CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DEVICE __device__ __forceinline__
#define ANYWHERE __host__ __device__ constexpr
#define UNROLL _Pragma("unroll")
#else
#define DEVICE inline
#define ANYWHERE constexpr
#define UNROLL
#endif

namespace fastattn {

// a b + c, rounded once.
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

// 16 bytes into shared memory, begun now and there after `copies_have_arrived` and a barrier.
DEVICE void copy_ahead(void *to, const void *from) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
      "l"(from)
      : "memory");
#else
  std::memcpy(to, from, 16);
#endif
}

DEVICE void copies_have_arrived() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

DEVICE float to_float(float x) { return x; }

template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}

#ifdef __CUDACC__
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE float to_float(__half x) { return __half2float(x); }
template <>
DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
DEVICE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
#endif

}  // namespace fastattn
