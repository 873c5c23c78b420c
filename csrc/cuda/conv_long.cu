// The kernels of conv_long.cuh, and the calls that launch them, chunk by chunk.
#include "conv_long.cuh"
#include "device_guard.h"
#include "plans.h"

namespace fastattn {

constexpr int TOGETHER = 16;  // blocks of a row that a thread sums in registers

template <class P>
struct BlockSync {
  DEVICE void operator()() const { __syncthreads(); }
};

template <class P>
constexpr int AT_ONCE = P::T >= 512 ? 1 : 512 / P::T;  // 128 registers a thread

template <class P, class T>
__global__ void __launch_bounds__(P::T, AT_ONCE<P>)
    transform_kernel(const __grid_constant__ Chunk a, const __grid_constant__ fa_tensor x,
                     int64_t length, int64_t blocks, float2 *spectra) {
  extern __shared__ float2 memory[];
  transform_block<P, T, true>(a, x, length, blocks, spectra, blockIdx.x, threadIdx.x, memory,
                              BlockSync<P>());
}

template <class P>
__global__ void __launch_bounds__(P::T, AT_ONCE<P>)
    transform_taps_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 memory[];
  transform_taps<P>(a, blockIdx.x, threadIdx.x, memory, BlockSync<P>());
}

__global__ void __launch_bounds__(256) multiply_kernel(const __grid_constant__ Chunk a) {
  const int64_t f = (int64_t)blockIdx.x * 256 + threadIdx.x;
  multiply_blocks<TOGETHER>(a, blockIdx.y, (int64_t)blockIdx.z * TOGETHER, f);
}

template <class P, class T>
__global__ void __launch_bounds__(P::T, AT_ONCE<P>)
    restore_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 memory[];
  restore_block<P, T, true>(a, blockIdx.x, threadIdx.x, memory, BlockSync<P>());
}

__global__ void __launch_bounds__(256) correlate_kernel(const __grid_constant__ Chunk a) {
  const int64_t f = (int64_t)blockIdx.x * 256 + threadIdx.x;
  correlate_blocks<TOGETHER>(a, blockIdx.y, (int64_t)blockIdx.z * TOGETHER, f);
}

template <class P>
__global__ void __launch_bounds__(P::T, AT_ONCE<P>)
    restore_taps_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 memory[];
  restore_taps<P>(a, blockIdx.x, threadIdx.x, memory, BlockSync<P>());
}

// kernel<<<blocks, threads of P>>>(arguments...), unless something failed before.
template <class P, class Kernel, class... Arguments>
static void start(cudaError_t &error, Kernel kernel, int64_t blocks, cudaStream_t stream,
                  const Arguments &...arguments) {
  constexpr int BYTES = Row<P>::MEMORY * 8;
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (error != cudaSuccess) return;
  kernel<<<(unsigned)blocks, P::T, BYTES, stream>>>(arguments...);
  error = cudaPeekAtLastError();
}

template <class Kernel>
static void start_products(cudaError_t &error, Kernel kernel, int64_t rows, int64_t blocks,
                           const Chunk &a, cudaStream_t stream) {
  if (error != cudaSuccess) return;
  dim3 grid((unsigned)(a.shape.length / 256), (unsigned)rows,
            (unsigned)((blocks + TOGETHER - 1) / TOGETHER));
  kernel<<<grid, 256, 0, stream>>>(a);
  error = cudaPeekAtLastError();
}

static int64_t tap_rows(const Chunk &a) {
  int64_t group = a.shape.group;
  return (a.channel + a.channels - 1) / group - a.channel / group + 1;
}

// The chunk of `channels` channels from `channel` on, within a workspace.
static Chunk chunk_at(const fa_conv_shape &s, int64_t channel, int64_t channels, float *workspace) {
  Chunk a = chunk_of(s);
  a.channel = channel;
  a.channels = channels < s.channels - channel ? channels : s.channels - channel;
  a.inputs = reinterpret_cast<float2 *>(workspace);
  a.outputs = a.inputs + s.batch * channels * a.blocks_in * s.length;
  a.spectra = a.outputs + s.batch * channels * a.blocks_out * s.length;
  return a;
}

template <class P, class T>
static void convolve_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const fa_conv_shape &s = a.shape;
  const int64_t rows = s.batch * a.channels;
  start<P>(error, transform_taps_kernel<P>, tap_rows(a) * a.count, stream, a);
  start<P>(error, transform_kernel<P, T>, rows * a.blocks_in, stream, a, a.u, s.n, a.blocks_in,
           a.inputs);
  start_products(error, multiply_kernel, rows, a.blocks_out, a, stream);
  start<P>(error, restore_kernel<P, T>, rows * a.blocks_out, stream, a);
}

template <class P, class T>
static void correlate_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const fa_conv_shape &s = a.shape;
  const int64_t rows = s.batch * a.channels;
  start<P>(error, transform_kernel<P, T>, rows * a.blocks_in, stream, a, a.u, s.n, a.blocks_in,
           a.inputs);
  start<P>(error, transform_kernel<P, T>, rows * a.blocks_out, stream, a, a.y, s.out, a.blocks_out,
           a.outputs);
  start_products(error, correlate_kernel, a.channels, a.count, a, stream);
  start<P>(error, restore_taps_kernel<P>, a.channels * a.count, stream, a);
}

// f(error, chunk) with the plan of the length and the type, for every chunk.
template <class F>
static fa_status for_each_chunk(const fa_conv_shape &s, int64_t channels, float *workspace,
                                int device, F f) {
  if (s.batch < 1 || s.channels < 1 || s.group < 1 || s.channels % s.group || s.n < 1 ||
      s.out < 1 || s.count < 1 || channels < 1 || s.batch * channels > 65535 || !workspace)
    return FA_BAD_ARGUMENT;
  OnDevice on(device);
  cudaError_t error = on.error;
  for (int64_t channel = 0; channel < s.channels && error == cudaSuccess; channel += channels) {
    Chunk a = chunk_at(s, channel, channels, workspace);
    auto with_plan = [&](auto plan) {
      if (s.type == FA_BFLOAT16) return f(error, a, plan, __nv_bfloat16());
      if (s.type == FA_FLOAT16) return f(error, a, plan, __half());
      f(error, a, plan, 0.f);
    };
    switch (s.length) {
      case 4096:
        with_plan(Short<4096>());
        break;
      case 8192:
        with_plan(Short<8192>());
        break;
      case 16384:
        with_plan(Short<16384>());
        break;
      default:
        return FA_BAD_ARGUMENT;
    }
  }
  if (error != cudaSuccess) cudaGetLastError();  // not to be reported by who launches next
  return error;
}

}  // namespace fastattn

using namespace fastattn;

extern "C" {

int64_t fa_conv_long_workspace(const fa_conv_shape *shape, int64_t channels, int gradient) {
  Chunk a = chunk_at(*shape, 0, channels, nullptr);
  a.channels = channels;
  int64_t rows = shape->batch * channels * (a.blocks_in + a.blocks_out);
  // rows of taps that a chunk touches, wherever it begins
  int64_t taps = gradient ? channels : (channels + shape->group - 2) / shape->group + 1;
  return 2 * shape->length * (rows + taps * a.count);
}

fa_status fa_conv_long_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor y, const float *taps,
                            const float *table, float *workspace, int64_t channels, int device,
                            void *stream) {
  if (!u.data || !y.data || !taps || !table || u.n != 1 || y.n != 1) return FA_BAD_ARGUMENT;
  auto each = [&](cudaError_t &error, Chunk &a, auto plan, auto zero) {
    a.u = u, a.y = y, a.taps = taps, a.table = reinterpret_cast<const float4 *>(table);
    convolve_chunk<decltype(plan), decltype(zero)>(error, a, (cudaStream_t)stream);
  };
  return for_each_chunk(*shape, channels, workspace, device, each);
}

fa_status fa_correlate_long_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor y, float *dtaps,
                                 const float *table, float *workspace, int64_t channels, int device,
                                 void *stream) {
  if (!u.data || !y.data || !dtaps || !table || u.n != 1 || y.n != 1) return FA_BAD_ARGUMENT;
  auto each = [&](cudaError_t &error, Chunk &a, auto plan, auto zero) {
    a.u = u, a.y = y, a.dtaps = dtaps, a.table = reinterpret_cast<const float4 *>(table);
    correlate_chunk<decltype(plan), decltype(zero)>(error, a, (cudaStream_t)stream);
  };
  return for_each_chunk(*shape, channels, workspace, device, each);
}

}  // extern "C"
