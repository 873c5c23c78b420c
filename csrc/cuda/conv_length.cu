// The kernels for transforms of FA_LENGTH numbers; compiled once for every length.
#include "conv_launch.cuh"

namespace fastattn {

constexpr bool ANY_STRIDE = Length<FA_LENGTH>::ANY_STRIDE;

template <bool UNIT, class T>
static cudaError_t convolve_as(const Convolution &a, const Device &device, cudaStream_t stream) {
  using P = Short<FA_LENGTH>;
  return start<P, false, UNIT>(convolve_kernel<P, T, UNIT>, a, device, stream);
}

template <bool UNIT, class T>
static cudaError_t gradients_as(const Gradient &a, const Device &device, cudaStream_t stream) {
  using P = Short<FA_LENGTH>;
  return start<P, true, UNIT>(gradient_kernel<P, T, UNIT>, a, device, stream);
}

// f(zero of the type).
template <class F>
static cudaError_t by_type(fa_type type, F f) {
  if (type == FA_BFLOAT16) return f(__nv_bfloat16());
  if (type == FA_FLOAT16) return f(__half());
  return f(0.f);
}

template <>
cudaError_t Length<FA_LENGTH>::convolve(const Convolution &a, bool unit, const Device &device,
                                        cudaStream_t stream) {
  return by_type(a.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (ANY_STRIDE)
      if (!unit) return convolve_as<false, T>(a, device, stream);
    return unit ? convolve_as<true, T>(a, device, stream) : cudaErrorInvalidValue;
  });
}

template <>
cudaError_t Length<FA_LENGTH>::gradients(const Gradient &a, bool unit, const Device &device,
                                         cudaStream_t stream) {
  return by_type(a.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (ANY_STRIDE)
      if (!unit) return gradients_as<false, T>(a, device, stream);
    if (!unit) return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    if constexpr (P::PARTS > 1)
      if (a.dtaps) error = start_parts<P, T>(a, device, stream);
    const bool others = P::PARTS == 1 || a.du.data || a.dpre.data || a.dpost.data || a.dskip;
    return error == cudaSuccess && others ? gradients_as<true, T>(a, device, stream) : error;
  });
}

template <>
cudaError_t Length<FA_LENGTH>::generation(int *arch) {
  cudaFuncAttributes found;
  cudaError_t error = cudaFuncGetAttributes(&found, convolve_kernel<Short<FA_LENGTH>, float, true>);
  *arch = error == cudaSuccess ? 10 * found.ptxVersion : 0;
  return taken(error);
}

}  // namespace fastattn
