// The kernels of conv_long.cuh, and the calls that launch them, chunk by chunk.
#include "conv_long.cuh"

#include <algorithm>

#include "conv_launch.cuh"
#include "device_guard.h"

namespace fastattn {

// Columns side by side that a block has, lanes side by side; one's numbers begin so far behind the
// other's that those of a half of a warp are in different banks.
template <class P>
struct Tile {
  static constexpr int COLUMNS = P::N <= 256 ? 16 : 8, THREADS = COLUMNS * P::T;
  static constexpr int APART = Row<P>::MEMORY + 16 / COLUMNS, BYTES = COLUMNS * APART * 8;
  static constexpr int AT_ONCE = THREADS <= 256 ? 3 : 1;
  static_assert(Row<P>::MEMORY % 16 == 0);
  int column, t;
  float2 *memory;
  DEVICE Tile(float2 *shared)
      : column(blockIdx.x * COLUMNS + threadIdx.x % COLUMNS),
        t(threadIdx.x / COLUMNS),
        memory(shared + threadIdx.x % COLUMNS * APART) {}
};

template <class W>
using TileOf = Tile<typename W::Columns>;

// Rows of inputs, and behind them those of outputs for a gradient, of taps for a convolution.
template <class W, class T>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    split_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  const int64_t rows = a.shape.batch * a.channels, row = blockIdx.y;
  if (row < rows)
    split_row<W, T>(a, a.u, a.shape.n, a.inputs, row, at.column, at.t, at.memory, Sync<false>());
  else if (a.dtaps)
    split_row<W, T>(a, a.y, a.shape.out, a.outputs, row - rows, at.column, at.t, at.memory,
                    Sync<false>());
  else
    split_taps<W>(a, row - rows, at.column, at.t, at.memory, Sync<false>());
}

template <class W, class T>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    join_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  join_row<W, T>(a, blockIdx.y, at.column, at.t, at.memory, Sync<false>());
}

template <class W>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    join_taps_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  join_taps<W>(a, blockIdx.y, at.column, at.t, at.memory, Sync<false>());
}

// Groups of threads, each with a row at a time, that have one leaf of all rows, and its turns.
template <class W>
struct Leaves {
  using P = typename W::Leaf;
  static constexpr int GROUPS = P::T < 64 ? 128 / P::T : 1, THREADS = GROUPS * P::T;
  static constexpr int BYTES = (P::N + GROUPS * Row<P>::MEMORY) * 8;
  using Barrier = Sync<P::T <= 32>;
  static constexpr int AT_ONCE = 768 / THREADS;  // 80 registers a thread
  int leaf, t;
  int64_t row, step;  // its group's first one, and how far the next is
  float2 *turns, *memory;
  DEVICE Leaves(float2 *shared, const float4 *table)
      : leaf(blockIdx.x),
        t(threadIdx.x % P::T),
        row((int64_t)blockIdx.y * GROUPS + threadIdx.x / P::T),
        step((int64_t)gridDim.y * GROUPS),
        turns(shared),
        memory(shared + P::N + threadIdx.x / P::T * Row<P>::MEMORY) {
    for (int j = threadIdx.x; j < P::N; j += THREADS) turns[j] = turn_of<W>(table, leaf, j);
    __syncthreads();
  }
};

template <class W>
__global__ void __launch_bounds__(Leaves<W>::THREADS, Leaves<W>::AT_ONCE)
    transform_leaves_kernel(float2 *spectra, int64_t rows, const float4 *table) {
  extern __shared__ float2 shared[];
  const Leaves<W> at(shared, table);
  transform_leaves<W>(spectra, at.row, at.step, rows, at.leaf, at.turns, table, at.t, at.memory,
                      typename Leaves<W>::Barrier());
}

template <class W>
__global__ void __launch_bounds__(Leaves<W>::THREADS, Leaves<W>::AT_ONCE)
    convolve_leaves_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const Leaves<W> at(shared, a.table);
  convolve_leaves<W>(a, at.row, at.step, a.shape.batch * a.channels, at.leaf, at.turns, at.t,
                     at.memory, typename Leaves<W>::Barrier());
}

template <class W>
__global__ void __launch_bounds__(Leaves<W>::THREADS, Leaves<W>::AT_ONCE)
    correlate_leaves_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const Leaves<W> at(shared, a.table);
  correlate_leaves<W>(a, at.row, at.step, a.channels, at.leaf, at.turns, at.t, at.memory,
                      typename Leaves<W>::Barrier());
}

// kernel<<<grid, threads, bytes>>>(arguments...), unless something failed before.
template <class B, class Kernel, class... Arguments>
static void start(cudaError_t &error, Kernel kernel, dim3 grid, cudaStream_t stream,
                  const Arguments &...arguments) {
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, B::BYTES);
  if (error != cudaSuccess) return;
  kernel<<<grid, B::THREADS, B::BYTES, stream>>>(arguments...);
  error = cudaPeekAtLastError();
}

template <class W>
static dim3 columns_of(int64_t rows) {
  return dim3(W::L / TileOf<W>::COLUMNS, (unsigned)rows);
}

// Eight rows or more for each group, unless there are too few blocks then.
template <class W>
static dim3 leaves_of(int64_t rows) {
  constexpr int64_t FEW = 1024 / W::C > 1 ? 1024 / W::C : 1;
  const int64_t groups = (rows + Leaves<W>::GROUPS - 1) / Leaves<W>::GROUPS;
  return dim3(W::C, (unsigned)std::min(groups, std::max(FEW, (groups + 7) / 8)));
}

static int64_t tap_rows(const Chunk &a) {
  int64_t group = a.shape.group;
  return (a.channel + a.channels - 1) / group - a.channel / group + 1;
}

// The chunk of `channels` channels from `channel` on, within a workspace.
static Chunk chunk_at(const fa_conv_shape &s, int64_t channel, int64_t channels, bool gradient,
                      float *workspace) {
  Chunk a = {};
  a.shape = s;
  a.channel = channel;
  a.channels = std::min(channels, s.channels - channel);
  a.inputs = reinterpret_cast<float2 *>(workspace);
  a.outputs = a.inputs + s.batch * channels * s.length;
  a.spectra = gradient ? a.outputs + s.batch * channels * s.length : a.outputs;
  return a;
}

template <class W, class T>
static void convolve_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const int64_t rows = a.shape.batch * a.channels, taps = tap_rows(a);
  start<TileOf<W>>(error, split_kernel<W, T>, columns_of<W>(rows + taps), stream, a);
  start<Leaves<W>>(error, transform_leaves_kernel<W>, leaves_of<W>(taps), stream, a.spectra, taps,
                   a.table);
  start<Leaves<W>>(error, convolve_leaves_kernel<W>, leaves_of<W>(rows), stream, a);
  start<TileOf<W>>(error, join_kernel<W, T>, columns_of<W>(rows), stream, a);
}

template <class W, class T>
static void correlate_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const int64_t rows = a.shape.batch * a.channels;
  start<TileOf<W>>(error, split_kernel<W, T>, columns_of<W>(2 * rows), stream, a);
  start<Leaves<W>>(error, transform_leaves_kernel<W>, leaves_of<W>(2 * rows), stream, a.inputs,
                   2 * rows, a.table);
  start<Leaves<W>>(error, correlate_leaves_kernel<W>, leaves_of<W>(a.channels), stream, a);
  start<TileOf<W>>(error, join_taps_kernel<W>, columns_of<W>(a.channels), stream, a);
}

// f(plan) for the one of a length; otherwise `none`.
template <class R, class F>
static R by_long_length(int64_t length, R none, F f) {
  switch (length) {
    case 1 << 15:
      return f(LongPlan<256, 128>());
    case 1 << 16:
      return f(LongPlan<256, 256>());
    case 1 << 17:
      return f(LongPlan<256, 512>());
    case 1 << 18:
      return f(LongPlan<256, 1024>());
    case 1 << 19:
      return f(LongPlan<256, 2048>());
    case 1 << 20:
      return f(LongPlan<256, 4096>());
    case 1 << 21:
      return f(LongPlan<1024, 2048>());
    case 1 << 22:
      return f(LongPlan<1024, 4096>());
    default:
      return none;
  }
}

// f(error, chunk, plan, zero of the type) for every chunk.
template <class F>
static fa_status for_each_chunk(const fa_conv_shape &s, int64_t channels, bool gradient,
                                float *workspace, int device, F f) {
  if (s.batch < 1 || s.channels < 1 || s.group < 1 || s.channels % s.group || s.n < 1 ||
      s.out < 1 || s.count < 1 || channels < 1 || s.batch * channels > 32767 || s.n > s.length ||
      s.out > s.length || !workspace)
    return FA_BAD_ARGUMENT;
  OnDevice on(device);
  cudaError_t error = on.error;
  for (int64_t channel = 0; channel < s.channels && error == cudaSuccess; channel += channels) {
    Chunk a = chunk_at(s, channel, channels, gradient, workspace);
    bool known = by_long_length(s.length, false, [&](auto plan) {
      if (s.type == FA_BFLOAT16)
        f(error, a, plan, __nv_bfloat16());
      else if (s.type == FA_FLOAT16)
        f(error, a, plan, __half());
      else
        f(error, a, plan, 0.f);
      return true;
    });
    if (!known) return FA_BAD_ARGUMENT;
  }
  return taken(error);
}

int64_t long_table_size(int64_t length) {
  return by_long_length(length, (int64_t)0,
                        [](auto plan) { return (int64_t)4 * decltype(plan)::COUNT; });
}

fa_status long_table(int64_t length, float *table) {
  return by_long_length(length, (fa_status)FA_BAD_ARGUMENT, [&](auto plan) {
    fill_long_table<decltype(plan)>(table);
    return (fa_status)FA_OK;
  });
}

}  // namespace fastattn

using namespace fastattn;

extern "C" {

int64_t fa_conv_long_workspace(const fa_conv_shape *shape, int64_t channels, int gradient) {
  int64_t rows = shape->batch * channels;
  // rows of taps that a chunk touches, wherever it begins
  int64_t taps = (channels + shape->group - 2) / shape->group + 1;
  return 2 * shape->length * (gradient ? 2 * rows + channels : rows + taps);
}

fa_status fa_conv_long_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor y, const float *taps,
                            const float *table, float *workspace, int64_t channels, int device,
                            void *stream) {
  if (!u.data || !y.data || !taps || !table || u.n != 1 || y.n != 1) return FA_BAD_ARGUMENT;
  auto each = [&](cudaError_t &error, Chunk &a, auto plan, auto zero) {
    a.u = u, a.y = y, a.taps = taps, a.table = reinterpret_cast<const float4 *>(table);
    convolve_chunk<decltype(plan), decltype(zero)>(error, a, (cudaStream_t)stream);
  };
  return for_each_chunk(*shape, channels, false, workspace, device, each);
}

fa_status fa_correlate_long_cuda(const fa_conv_shape *shape, fa_tensor u, fa_tensor y, float *dtaps,
                                 const float *table, float *workspace, int64_t channels, int device,
                                 void *stream) {
  if (!u.data || !y.data || !dtaps || !table || u.n != 1 || y.n != 1) return FA_BAD_ARGUMENT;
  auto each = [&](cudaError_t &error, Chunk &a, auto plan, auto zero) {
    a.u = u, a.y = y, a.dtaps = dtaps, a.table = reinterpret_cast<const float4 *>(table);
    correlate_chunk<decltype(plan), decltype(zero)>(error, a, (cudaStream_t)stream);
  };
  return for_each_chunk(*shape, channels, true, workspace, device, each);
}

}  // extern "C"
