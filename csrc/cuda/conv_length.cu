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

static cudaError_t gradients_of_type(const Gradient &a, bool unit, const Device &device,
                                     cudaStream_t stream) {
  return by_type(a.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (ANY_STRIDE)
      if (!unit) return gradients_as<false, T>(a, device, stream);
    return unit ? gradients_as<true, T>(a, device, stream) : cudaErrorInvalidValue;
  });
}

// Where no array fits into shared memory, those of the inputs' and of the taps' gradients would not
// stay in the L2 together: one launch for each.
template <>
cudaError_t Length<FA_LENGTH>::gradients(const Gradient &a, bool unit, const Device &device,
                                         cudaStream_t stream) {
  const bool nothing_fits = with_block<P, true, true>(
      device, false, [](auto tag) { return decltype(tag)::Type::SHARES == 0; });
  if (!nothing_fits || !a.dtaps || !(a.du.data || a.dpre.data))
    return gradients_of_type(a, unit, device, stream);
  Gradient of_inputs = a, of_taps = a;
  of_inputs.dtaps = of_inputs.dskip = nullptr;
  of_taps.du.data = of_taps.dpre.data = of_taps.dpost.data = nullptr;
  cudaError_t error = gradients_of_type(of_inputs, unit, device, stream);
  return error == cudaSuccess ? gradients_of_type(of_taps, unit, device, stream) : error;
}

template <>
cudaError_t Length<FA_LENGTH>::generation(int *arch) {
  cudaFuncAttributes found;
  cudaError_t error = cudaFuncGetAttributes(&found, convolve_kernel<Short<FA_LENGTH>, float, true>);
  *arch = error == cudaSuccess ? 10 * found.ptxVersion : 0;
  return taken(error);
}

}  // namespace fastattn
