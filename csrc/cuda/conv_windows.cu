// The kernels of conv_windows.cuh, for the two lengths of transform that windows take.
#include "conv_windows.cuh"

#include "conv_launch.cuh"
#include "device_guard.h"

namespace fastattn {

template <class P, class T>
__global__ void __launch_bounds__(Block<P, false, HERE>::THREADS, Block<P, false, HERE>::AT_ONCE)
    convolve_windows_kernel(const __grid_constant__ Convolution a) {
  extern __shared__ float2 shared[];
  using B = Block<P, false, HERE>;
  const int group = threadIdx.x / P::T, t = threadIdx.x % P::T;
  float2 *memory = shared + group * B::EACH;
  auto spectrum = B::template numbers<0>(memory, a.workspace, group);
  const int64_t tiles = (a.shape.channels + B::GROUPS - 1) / B::GROUPS;
  for (int64_t item = blockIdx.x; item < tiles * a.shape.slices; item += gridDim.x) {
    convolve_windows<P, T>(a, item % tiles * B::GROUPS + group, item / tiles, t, memory, spectrum,
                           Sync<P>());
    Sync<P>()();
  }
}

template <class P, class T>
__global__ void __launch_bounds__(Block<P, true, HERE>::THREADS, Block<P, true, HERE>::AT_ONCE)
    correlate_windows_kernel(const __grid_constant__ Gradient a) {
  extern __shared__ float2 shared[];
  using B = Block<P, true, HERE>;
  const int group = threadIdx.x / P::T, t = threadIdx.x % P::T;
  float2 *memory = shared + group * B::EACH;
  auto sum = B::template numbers<0>(memory, a.workspace, group);
  auto input = B::template numbers<1>(memory, a.workspace, group);
  const int64_t tiles = (a.shape.channels + B::GROUPS - 1) / B::GROUPS;
  for (int64_t item = blockIdx.x; item < tiles * a.shape.slices; item += gridDim.x) {
    correlate_windows<P, T>(a, item % tiles * B::GROUPS + group, item / tiles, t, memory, sum,
                            input, Sync<P>());
    Sync<P>()();
  }
}

// f(plan, zero of the type); windows of other lengths are cudaErrorInvalidValue.
template <class F>
static cudaError_t by_length_and_type(const fa_conv_shape &s, F f) {
  auto typed = [&](auto plan) {
    if (s.type == FA_BFLOAT16) return f(plan, __nv_bfloat16());
    if (s.type == FA_FLOAT16) return f(plan, __half());
    return f(plan, 0.f);
  };
  if (s.length == 1024) return typed(Short<1024>());
  if (s.length == 4096) return typed(Short<4096>());
  return cudaErrorInvalidValue;
}

cudaError_t start_windows(const Convolution &a, const Device &device, cudaStream_t stream) {
  return by_length_and_type(a.shape, [&](auto plan, auto zero) {
    using P = decltype(plan);
    return start<P, false>(convolve_windows_kernel<P, decltype(zero)>, a, device, stream);
  });
}

cudaError_t start_windows(const Gradient &a, const Device &device, cudaStream_t stream) {
  return by_length_and_type(a.shape, [&](auto plan, auto zero) {
    using P = decltype(plan);
    return start<P, true>(correlate_windows_kernel<P, decltype(zero)>, a, device, stream);
  });
}

}  // namespace fastattn
