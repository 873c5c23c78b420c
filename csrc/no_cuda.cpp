// What stands in for csrc/cuda where there is no compiler for it.
#include "fastattn/fft_conv.h"

extern "C" {

const char *fa_status_string(fa_status status) {
  switch (status) {
    case FA_OK:
      return "no error";
    case FA_BAD_ARGUMENT:
      return "an argument of a convolution is out of its range";
    case FA_OUT_OF_MEMORY:
      return "not enough memory";
    default:
      return "built without CUDA";
  }
}

fa_status fa_cuda_available(void) { return FA_NO_CUDA; }
fa_status fa_conv_longest(int, int64_t *) { return FA_NO_CUDA; }
int64_t fa_conv_length(const fa_conv_shape *) { return 0; }
int64_t fa_conv_table_size(int64_t) { return 0; }
fa_status fa_conv_table(int64_t, float *) { return FA_NO_CUDA; }
int64_t fa_conv_workspace(const fa_conv_shape *, int, int) { return 0; }

fa_status fa_conv_cuda(const fa_conv_shape *, fa_tensor, fa_tensor, fa_tensor, fa_tensor,
                       const float *, const float *, const float *, float *, int, void *) {
  return FA_NO_CUDA;
}

fa_status fa_conv_backward_cuda(const fa_conv_shape *, fa_tensor, fa_tensor, fa_tensor, fa_tensor,
                                fa_tensor, fa_tensor, fa_tensor, const float *, const float *,
                                float *, float *, const float *, float *, int, void *) {
  return FA_NO_CUDA;
}

fa_status fa_correlate_cuda(const fa_conv_shape *, fa_tensor, fa_tensor, fa_tensor, fa_tensor,
                            float *, const float *, float *, int, void *) {
  return FA_NO_CUDA;
}

}  // extern "C"
