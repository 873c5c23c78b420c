// The kernels of conv_windows.cuh, for the two lengths of transform that windows take.
#include "conv_windows.cuh"

#include "conv_launch.cuh"
#include "device_guard.h"

namespace fastattn {

template <class P, class T>
__global__ void __launch_bounds__(Here<P, false, true>::THREADS, Here<P, false, true>::AT_ONCE)
    convolve_windows_kernel(const __grid_constant__ Convolution a) {
  extern __shared__ float2 shared[];
  using B = Here<P, false, true>;
  const B at(shared, a.workspace);
  for (int64_t item = blockIdx.x; item < B::items(a.shape); item += gridDim.x) {
    convolve_windows<P, T>(a, at.channel(a.shape, item), at.slice(a.shape, item), at.t, at.memory,
                           at.template numbers<0>(), typename B::Barrier());
    typename B::Barrier()();
  }
}

template <class P, class T>
__global__ void __launch_bounds__(Here<P, true, true>::THREADS, Here<P, true, true>::AT_ONCE)
    correlate_windows_kernel(const __grid_constant__ Gradient a) {
  extern __shared__ float2 shared[];
  using B = Here<P, true, true>;
  const B at(shared, a.workspace);
  for (int64_t item = blockIdx.x; item < B::items(a.shape); item += gridDim.x) {
    correlate_windows<P, T>(a, at.channel(a.shape, item), at.slice(a.shape, item), at.t, at.memory,
                            at.template numbers<0>(), at.template numbers<1>(),
                            typename B::Barrier());
    typename B::Barrier()();
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
    return start<P, false, true>(convolve_windows_kernel<P, decltype(zero)>, a, device, stream);
  });
}

cudaError_t start_windows(const Gradient &a, const Device &device, cudaStream_t stream) {
  return by_length_and_type(a.shape, [&](auto plan, auto zero) {
    using P = decltype(plan);
    return start<P, true, true>(correlate_windows_kernel<P, decltype(zero)>, a, device, stream);
  });
}

}  // namespace fastattn
