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

// Which rows a launch splits: of inputs, of outputs' gradients behind them, and of taps.
struct Rows {
  int64_t inputs, outputs, taps;
  int64_t all() const { return inputs + outputs + taps; }
};

template <class W, class T>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    split_kernel(const __grid_constant__ Chunk a, const __grid_constant__ Rows rows) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  const int64_t row = blockIdx.y, output = row - rows.inputs, tap = output - rows.outputs;
  if (output < 0)
    split_row<W, T>(a, a.u, a.pre, a.shape.n, a.inputs, row, at.column, at.t, at.memory,
                    Sync<false>());
  else if (tap < 0)
    split_row<W, T>(a, a.y, a.post, a.shape.out, a.outputs, output, at.column, at.t, at.memory,
                    Sync<false>());
  else
    split_taps<W>(a, tap, at.column, at.t, at.memory, Sync<false>());
}

template <class W, class T>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    join_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  join_row<W, T>(a, blockIdx.y, at.column, at.t, at.memory, Sync<false>());
}

// Rows of gradients of inputs, where they are wanted, and behind them those of taps.
template <class W, class T>
__global__ void __launch_bounds__(TileOf<W>::THREADS, TileOf<W>::AT_ONCE)
    join_gradients_kernel(const __grid_constant__ Chunk a, int64_t rows) {
  extern __shared__ float2 shared[];
  const TileOf<W> at(shared);
  const int64_t row = blockIdx.y;
  if (row < rows)
    join_gradient<W, T>(a, row, at.column, at.t, at.memory, Sync<false>());
  else
    join_taps<W>(a, row - rows, at.column, at.t, at.memory, Sync<false>());
}

// Groups of threads, each with a row or a channel at a time, that have one leaf of all of them, and
// its turns; for gradients each also has a leaf's inputs, and the sum over samples in registers.
template <class W, bool GRADIENT>
struct Leaves {
  using P = typename W::Leaf;
  using Barrier = Sync<P::T <= 32>;
  static constexpr int GROUPS = P::T < 64 ? 128 / P::T : 1, THREADS = GROUPS * P::T;
  static constexpr int EACH = Row<P>::MEMORY + (GRADIENT ? P::N : 0);
  static constexpr int BYTES = (P::N + GROUPS * EACH) * 8;
  static constexpr int AT_ONCE = (GRADIENT ? 512 : 768) / THREADS;  // 128 or 80 registers a thread
  int leaf, t;
  int64_t first, step;  // its group's row or channel, and how far the next is
  float2 *turns, *memory;
  DEVICE Leaves(float2 *shared, const float4 *table)
      : leaf(blockIdx.x),
        t(threadIdx.x % P::T),
        first((int64_t)blockIdx.y * GROUPS + threadIdx.x / P::T),
        step((int64_t)gridDim.y * GROUPS),
        turns(shared),
        memory(shared + P::N + threadIdx.x / P::T * EACH) {
    for (int j = threadIdx.x; j < P::N; j += THREADS) turns[j] = turn_of<W>(table, leaf, j);
    __syncthreads();
  }
};

template <class W>
__global__ void __launch_bounds__(Leaves<W, false>::THREADS, Leaves<W, false>::AT_ONCE)
    transform_leaves_kernel(float2 *spectra, int64_t rows, const float4 *table) {
  extern __shared__ float2 shared[];
  const Leaves<W, false> at(shared, table);
  transform_leaves<W>(spectra, at.first, at.step, rows, at.leaf, at.turns, table, at.t, at.memory,
                      typename Leaves<W, false>::Barrier());
}

template <class W>
__global__ void __launch_bounds__(Leaves<W, false>::THREADS, Leaves<W, false>::AT_ONCE)
    convolve_leaves_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  const Leaves<W, false> at(shared, a.table);
  convolve_leaves<W>(a, at.first, at.step, a.shape.batch * a.channels, at.leaf, at.turns, at.t,
                     at.memory, typename Leaves<W, false>::Barrier());
}

template <class W>
__global__ void __launch_bounds__(Leaves<W, true>::THREADS, Leaves<W, true>::AT_ONCE)
    gradients_of_leaves_kernel(const __grid_constant__ Chunk a) {
  extern __shared__ float2 shared[];
  using P = typename W::Leaf;
  const Leaves<W, true> at(shared, a.table);
  gradients_of_leaves<W>(a, at.first, at.step, a.channels, at.leaf, at.turns, at.t, at.memory,
                         InRegisters<P>(), InMemory<P>{at.memory + Row<P>::MEMORY},
                         typename Leaves<W, true>::Barrier());
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

// Eight rows, or a channel, or more for each group, unless there are too few blocks then.
template <class W, bool GRADIENT>
static dim3 leaves_of(int64_t items) {
  constexpr int64_t FEW = 1024 / W::C > 1 ? 1024 / W::C : 1, EACH = GRADIENT ? 1 : 8;
  constexpr int GROUPS = Leaves<W, GRADIENT>::GROUPS;
  const int64_t groups = (items + GROUPS - 1) / GROUPS;
  return dim3(W::C, (unsigned)std::min(groups, std::max(FEW, (groups + EACH - 1) / EACH)));
}

// Rows of taps that `channels` from `channel` on touch.
static int64_t tap_rows(int64_t channel, int64_t channels, int64_t group) {
  return (channel + channels - 1) / group - channel / group + 1;
}

// float2 of a chunk of `channels`, wherever it begins.
static int64_t numbers_of(const fa_conv_shape &s, int64_t channels, bool gradient) {
  int64_t rows = s.batch * channels, taps = (channels + s.group - 2) / s.group + 1;
  return s.length * (gradient ? 2 * rows + taps + channels : rows + taps);
}

// The chunk from `channel` on, within a workspace.
static Chunk chunk_at(Chunk a, int64_t channel, float2 *workspace) {
  const fa_conv_shape &s = a.shape;
  const bool gradient = a.dtaps || a.du.data || a.dpre.data;
  a.channel = channel;
  a.channels = std::min(s.slices, s.channels - channel);
  const int64_t rows = s.batch * a.channels * s.length;
  a.inputs = workspace;
  a.outputs = a.inputs + rows;
  a.spectra = gradient ? a.outputs + rows : a.outputs;
  a.sums = a.spectra + tap_rows(channel, a.channels, s.group) * s.length;
  return a;
}

template <class W>
static void transform_taps(cudaError_t &error, const Chunk &a, int64_t rows, cudaStream_t stream) {
  start<Leaves<W, false>>(error, transform_leaves_kernel<W>, leaves_of<W, false>(rows), stream,
                          a.spectra, rows, a.table);
}

template <class W, class T>
static void convolve_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const Rows rows = {a.shape.batch * a.channels, 0, tap_rows(a.channel, a.channels, a.shape.group)};
  start<TileOf<W>>(error, split_kernel<W, T>, columns_of<W>(rows.all()), stream, a, rows);
  transform_taps<W>(error, a, rows.taps, stream);
  start<Leaves<W, false>>(error, convolve_leaves_kernel<W>, leaves_of<W, false>(rows.inputs),
                          stream, a);
  start<TileOf<W>>(error, join_kernel<W, T>, columns_of<W>(rows.inputs), stream, a);
}

template <class W, class T>
static void gradients_of_chunk(cudaError_t &error, const Chunk &a, cudaStream_t stream) {
  const bool of_input = a.du.data || a.dpre.data;
  const int64_t all = a.shape.batch * a.channels;
  const Rows rows = {a.dtaps ? all : 0, all,
                     of_input ? tap_rows(a.channel, a.channels, a.shape.group) : 0};
  start<TileOf<W>>(error, split_kernel<W, T>, columns_of<W>(rows.all()), stream, a, rows);
  if (of_input) transform_taps<W>(error, a, rows.taps, stream);
  start<Leaves<W, true>>(error, gradients_of_leaves_kernel<W>, leaves_of<W, true>(a.channels),
                         stream, a);
  const int64_t joined = of_input ? all : 0;
  start<TileOf<W>>(error, join_gradients_kernel<W, T>,
                   columns_of<W>(joined + (a.dtaps ? a.channels : 0)), stream, a, joined);
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

// f(error, chunk, plan, zero of the type) for every chunk of shape.slices channels.
template <class F>
static cudaError_t for_each_chunk(const Chunk &a, float2 *workspace, F f) {
  const fa_conv_shape &s = a.shape;
  if (!workspace || s.slices < 1 || s.batch > MOST_LONG_ROWS / s.slices || s.n > s.length ||
      s.out > s.length)
    return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  for (int64_t channel = 0; channel < s.channels && error == cudaSuccess; channel += s.slices) {
    const Chunk chunk = chunk_at(a, channel, workspace);
    bool known = by_long_length(s.length, false, [&](auto plan) {
      if (s.type == FA_BFLOAT16)
        f(error, chunk, plan, __nv_bfloat16());
      else if (s.type == FA_FLOAT16)
        f(error, chunk, plan, __half());
      else
        f(error, chunk, plan, 0.f);
      return true;
    });
    if (!known) return cudaErrorInvalidValue;
  }
  return taken(error);
}

cudaError_t start_long(const Convolution &a, cudaStream_t stream) {
  Chunk all = {};
  all.shape = a.shape;
  all.u = a.u, all.pre = a.pre, all.post = a.post, all.y = a.y;
  all.taps = a.taps, all.skip = a.skip, all.table = a.table;
  return for_each_chunk(all, a.workspace,
                        [&](cudaError_t &error, const Chunk &chunk, auto plan, auto zero) {
                          convolve_chunk<decltype(plan), decltype(zero)>(error, chunk, stream);
                        });
}

cudaError_t start_long(const Gradient &a, cudaStream_t stream) {
  Chunk all = {};
  all.shape = a.shape;
  all.u = a.u, all.pre = a.pre, all.post = a.post, all.y = a.dy, all.du = a.du, all.dpre = a.dpre;
  all.taps = a.taps, all.skip = a.skip, all.dtaps = a.dtaps, all.table = a.table;
  if (!a.dtaps && !a.du.data && !a.dpre.data) return cudaSuccess;
  return for_each_chunk(all, a.workspace,
                        [&](cudaError_t &error, const Chunk &chunk, auto plan, auto zero) {
                          gradients_of_chunk<decltype(plan), decltype(zero)>(error, chunk, stream);
                        });
}

int64_t long_workspace(const fa_conv_shape &shape, bool backward) {
  return 2 * numbers_of(shape, std::min(shape.slices, shape.channels), backward);
}

int64_t long_length(const fa_conv_shape &shape) {
  for (int64_t length = 1 << 15; length <= 1 << 22; length *= 2)
    if (shape.n <= length && shape.out <= length) return length;
  return 0;
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
