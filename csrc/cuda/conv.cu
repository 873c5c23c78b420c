// Which length of transform a convolution takes, its table, and the calls that launch it.
#include <atomic>
#include <initializer_list>

#include "conv_launch.cuh"
#include "device_guard.h"

using namespace fastattn;

static const int64_t LENGTHS[] = {256, 512, 1024, 2048, 4096, 8192, 16384};

// f(Length<N>()) for the N that `length` is; otherwise `none`.
template <class R, class F>
static R by_length(int64_t length, R none, F f) {
  switch (length) {
    case 256:
      return f(Length<256>());
    case 512:
      return f(Length<512>());
    case 1024:
      return f(Length<1024>());
    case 2048:
      return f(Length<2048>());
    case 4096:
      return f(Length<4096>());
    case 8192:
      return f(Length<8192>());
    case 16384:
      return f(Length<16384>());
    default:
      return none;
  }
}

// Whether outputs, indices modulo 2 * length, are those of the convolution.
static bool does(const fa_conv_shape &s, int64_t length) {
  int64_t low = s.mirrored ? -(s.first + s.count - 1) : s.first;
  int64_t high = low + s.count - 1;
  return s.n <= length && s.out <= length && high < length && low > -length;
}

static bool is_long(const fa_conv_shape *s) { return long_table_size(s->length) > 0; }

static bool valid(const fa_conv_shape *s) {
  return s->batch > 0 && s->channels > 0 && s->group > 0 && s->channels % s->group == 0 &&
         s->n > 0 && s->out > 0 && s->count > 0 && s->slices > 0 && s->type >= FA_FLOAT32 &&
         s->type <= FA_FLOAT16 &&
         (is_long(s) ? s->n <= s->length && s->out <= s->length
                     : s->slices <= s->batch && does(*s, s->length));
}

// The same of rows in windows, which a length's plan decides on.
static bool valid_in_windows(const fa_conv_shape *s) {
  if (s->valid < 1 || s->out < 1) return false;
  fa_conv_shape one = *s;  // a row that is whole has the same lags
  one.n = one.out = 1, one.batch *= (s->out + s->valid - 1) / s->valid;
  return s->n > 0 && s->n <= INT32_MAX && s->out <= INT32_MAX && s->valid <= fa_conv_valid(s) &&
         (s->length == 1024 || s->length == 4096) && valid(&one);
}

static bool unit(std::initializer_list<fa_tensor> all) {
  for (const fa_tensor &x : all)
    if (x.data && x.n != 1) return false;
  return true;
}

// What is known of a device, asked for once.
static fa_status device_of(int index, Device *device) {
  constexpr int MOST = 64;
  static std::atomic<uint64_t> known[MOST];  // processors, and above them shared memory
  uint64_t found = index >= 0 && index < MOST ? known[index].load() : 0;
  if (!found) {
    OnDevice on(index);
    int processors = 0, arch = 0;
    cudaError_t error = on.error;
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
    if (error == cudaSuccess) error = Length<256>::generation(&arch);
    if (error != cudaSuccess) return taken(error);
    found = (uint64_t)shared_of(arch) << 32 | processors;
    if (index >= 0 && index < MOST) known[index] = found;
  }
  *device = {index, (int)(uint32_t)found, (int)(found >> 32)};
  return FA_OK;
}

extern "C" {

const char *fa_status_string(fa_status status) {
  switch (status) {
    case FA_OK:
      return "no error";
    case FA_BAD_ARGUMENT:
      return "an argument of a convolution is out of its range";
    case FA_NO_CUDA:
      return "built without CUDA";
    case FA_OUT_OF_MEMORY:
      return "not enough memory";
    default:
      return cudaGetErrorString((cudaError_t)status);
  }
}

fa_status fa_cuda_available(void) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess && count == 0 ? cudaErrorNoDevice : taken(error);
}

fa_status fa_conv_longest(int index, int64_t *longest) {
  Device device;
  fa_status status = device_of(index, &device);
  if (status != FA_OK) return status;
  *longest = 0;
  for (int64_t length : LENGTHS)
    if (by_length(length, false, [&](auto of) { return decltype(of)::fits(device); }))
      *longest = length;
  return FA_OK;
}

int64_t fa_conv_length(const fa_conv_shape *shape) {
  for (int64_t length : LENGTHS)
    if (does(*shape, length)) return length;
  return long_length(*shape);
}

int64_t fa_conv_table_size(int64_t length) {
  return by_length(length, long_table_size(length),
                   [](auto of) { return (int64_t)4 * numbers_of<typename decltype(of)::P>(); });
}

fa_status fa_conv_table(int64_t length, float *table) {
  if (long_table_size(length)) return long_table(length, table);
  return by_length(length, (fa_status)FA_BAD_ARGUMENT, [&](auto of) {
    fill_table<typename decltype(of)::P>(table);
    return (fa_status)FA_OK;
  });
}

int64_t fa_conv_workspace(const fa_conv_shape *shape, int backward, int index) {
  Device device;
  if (!(shape->valid ? valid_in_windows(shape) : valid(shape)) ||
      device_of(index, &device) != FA_OK)
    return 0;
  if (is_long(shape)) return long_workspace(*shape, backward);
  return by_length(shape->length, (int64_t)0,
                   [&](auto of) { return decltype(of)::workspace(*shape, backward, device); });
}

fa_status fa_conv_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                       fa_tensor y, const float *taps, const float *skip, const float *table,
                       float *workspace, int index, void *stream) {
  if (!(shape->valid ? valid_in_windows(shape) && unit({u, pre, post, y}) : valid(shape)) ||
      !u.data || !y.data || !taps || !table)
    return FA_BAD_ARGUMENT;
  Device device;
  fa_status status = device_of(index, &device);
  if (status != FA_OK) return status;
  OnDevice on(index);
  if (on.error != cudaSuccess) return taken(on.error);
  Convolution a = {*shape,
                   u,
                   pre,
                   post,
                   y,
                   taps,
                   skip,
                   reinterpret_cast<const float4 *>(table),
                   reinterpret_cast<float2 *>(workspace)};
  if (shape->valid) return start_windows(a, device, (cudaStream_t)stream);
  bool side_by_side = unit({u, pre, post, y});
  if (is_long(shape))
    return side_by_side ? (fa_status)start_long(a, (cudaStream_t)stream) : FA_BAD_ARGUMENT;
  return by_length(shape->length, (fa_status)FA_BAD_ARGUMENT, [&](auto of) {
    return (fa_status) decltype(of)::convolve(a, side_by_side, device, (cudaStream_t)stream);
  });
}

fa_status fa_correlate_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                            fa_tensor dy, float *dtaps, const float *table, float *workspace,
                            int index, void *stream) {
  if (!valid_in_windows(shape) || !unit({u, pre, post, dy}) || !u.data || !dy.data || !dtaps ||
      !table)
    return FA_BAD_ARGUMENT;
  Device device;
  fa_status status = device_of(index, &device);
  if (status != FA_OK) return status;
  OnDevice on(index);
  if (on.error != cudaSuccess) return taken(on.error);
  Gradient a = {};
  a.shape = *shape;
  a.u = u, a.pre = pre, a.post = post, a.dy = dy;
  a.dtaps = dtaps;
  a.table = reinterpret_cast<const float4 *>(table);
  a.workspace = reinterpret_cast<float2 *>(workspace);
  return start_windows(a, device, (cudaStream_t)stream);
}

fa_status fa_conv_backward_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre,
                                fa_tensor post, fa_tensor dy, fa_tensor du, fa_tensor dpre,
                                fa_tensor dpost, const float *taps, const float *skip, float *dtaps,
                                float *dskip, const float *table, float *workspace, int index,
                                void *stream) {
  if (!valid(shape) || shape->valid || !u.data || !dy.data || !taps || !table)
    return FA_BAD_ARGUMENT;
  Device device;
  fa_status status = device_of(index, &device);
  if (status != FA_OK) return status;
  OnDevice on(index);
  if (on.error != cudaSuccess) return taken(on.error);
  Gradient a = {*shape,
                u,
                pre,
                post,
                dy,
                du,
                dpre,
                dpost,
                taps,
                skip,
                dtaps,
                dskip,
                reinterpret_cast<const float4 *>(table),
                reinterpret_cast<float2 *>(workspace)};
  bool side_by_side = unit({u, pre, post, dy, du, dpre, dpost});
  if (is_long(shape)) {
    if (!side_by_side || dpost.data || dskip) return FA_BAD_ARGUMENT;
    return (fa_status)start_long(a, (cudaStream_t)stream);
  }
  return by_length(shape->length, (fa_status)FA_BAD_ARGUMENT, [&](auto of) {
    return (fa_status) decltype(of)::gradients(a, side_by_side, device, (cudaStream_t)stream);
  });
}

}  // extern "C"
