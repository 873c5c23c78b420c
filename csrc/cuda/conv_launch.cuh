// The kernels of conv.cuh for one length of transform, and how they are launched.
#pragma once

#include <algorithm>

#include "conv_parts.cuh"

namespace fastattn {

// Bytes of shared memory that a block may have, by the generation that code was compiled for.
ANYWHERE int shared_of(int arch) {
  if (arch == 860 || arch == 890 || arch >= 1200) return 99 * 1024;
  return arch >= 900 ? 227 * 1024 : 163 * 1024;
}

#ifdef __CUDA_ARCH__
constexpr int HERE = shared_of(__CUDA_ARCH__);
#else
constexpr int HERE = 227 * 1024;
#endif

// The barrier of a group of threads.
template <bool IN_A_WARP>
struct Sync {
  DEVICE void operator()() const {
    if (IN_A_WARP)
      __syncwarp();
    else
      __syncthreads();
  }
};

// What a block has: groups of threads for four warps, or one group. Where channels are side by side
// instead of a row's numbers, more groups, lanes having one channel each, so that they read whole
// sectors; what one has in shared memory begins so far behind the other's that those of a half of a
// warp are in different banks.
//
// Beside the row are arrays of N numbers: the spectrum of the taps; of gradients the sum over
// samples, the inputs, and that spectrum, or that alone where taps have theirs in parts. The first
// is in registers where threads have room for three times their numbers and what else they need;
// others that would leave less room than for AT_ONCE blocks are in a workspace, one for every block
// that runs.
template <class P, bool BACKWARD, bool UNIT, int SHARED>
struct Block {
  static constexpr int LANES = 512 / P::T < 16 ? 512 / P::T : 16;
  static constexpr int GROUPS = !UNIT ? LANES : P::T < 64 ? 128 / P::T : 1;
  static constexpr int THREADS = GROUPS * P::T;
  static constexpr int AT_ONCE = (BACKWARD ? P::BACKWARD : P::FORWARD) / THREADS;
  static constexpr bool HELD = 65536 / (AT_ONCE * THREADS) >= 7 * P::E;
  static constexpr int ROW = Row<P>::MEMORY + (UNIT ? 0 : 16 / GROUPS);
  static constexpr int ALL = (BACKWARD && P::PARTS == 1 ? 3 : 1) - HELD;
  static_assert(UNIT || Row<P>::MEMORY % 16 == 0);
  using Barrier = Sync<UNIT && P::T <= 32>;
  static ANYWHERE int blocks_with(int arrays) {
    return (SHARED + 1024) / (GROUPS * (ROW + arrays * P::N) * 8 + 1024);
  }
  static constexpr bool FITS = blocks_with(0) > 0;
  static ANYWHERE int fitting() {
    const int most = blocks_with(0), wanted = AT_ONCE < most ? AT_ONCE : most;
    int count = ALL;
    while (count > 0 && blocks_with(count) < wanted) count--;
    return count;
  }
  static constexpr int SHARES = fitting(), ELSEWHERE = ALL - SHARES;
  static constexpr int EACH = ROW + SHARES * P::N;  // float2 of a group
  static constexpr int BYTES = GROUPS * EACH * 8;

  int group, t;
  float2 *memory, *workspace;
  DEVICE Block(float2 *shared, float2 *workspace)
      : group(UNIT ? threadIdx.x / P::T : threadIdx.x % GROUPS),
        t(UNIT ? threadIdx.x % P::T : threadIdx.x / GROUPS),
        memory(shared + group * EACH),
        workspace(workspace) {}

  template <int WHICH>
  DEVICE auto numbers() const {
    constexpr int AT = WHICH - HELD;
    if constexpr (AT < 0) {
      return InRegisters<P>();
    } else if constexpr (AT < SHARES) {
      return InMemory<P>{memory + ROW + AT * P::N};
    } else {
      int64_t of = (int64_t)blockIdx.x * GROUPS + group;
      return InMemory<P>{workspace + (of * ELSEWHERE + AT - SHARES) * P::N};
    }
  }

  // What there is to do: a slice of the samples of as many channels as there are groups, each.
  static ANYWHERE int64_t tiles(const fa_conv_shape &shape) {
    return (shape.channels + GROUPS - 1) / GROUPS;
  }
  static ANYWHERE int64_t items(const fa_conv_shape &shape) { return tiles(shape) * shape.slices; }
  DEVICE int64_t channel(const fa_conv_shape &shape, int64_t item) const {
    return item % tiles(shape) * GROUPS + group;
  }
  static DEVICE int64_t slice(const fa_conv_shape &shape, int64_t item) {
    return item / tiles(shape);
  }
};

// A sum over a group of threads, for its first, by way of its shared memory.
template <class P, class Barrier>
struct Add {
  float2 *memory;
  int t;
  DEVICE float operator()(float x) const {
    Barrier sync;
    sync();
    memory[t].x = x;
    sync();
    float sum = 0.f;
    if (t == 0)
      for (int i = 0; i < P::T; i++) sum += memory[i].x;
    sync();
    return sum;
  }
};

template <class P, bool BACKWARD, bool UNIT>
using Here = Block<P, BACKWARD, UNIT, HERE>;

template <class P, class T, bool UNIT>
__global__ void __launch_bounds__(Here<P, false, UNIT>::THREADS, Here<P, false, UNIT>::AT_ONCE)
    convolve_kernel(const __grid_constant__ Convolution a) {
  extern __shared__ float2 shared[];
  using B = Here<P, false, UNIT>;
  const B at(shared, a.workspace);
  for (int64_t item = blockIdx.x; item < B::items(a.shape); item += gridDim.x) {
    convolve<P, T, UNIT>(a, at.channel(a.shape, item), at.slice(a.shape, item), at.t, at.memory,
                         at.template numbers<0>(), typename B::Barrier());
    typename B::Barrier()();
  }
}

template <class P, class T, bool UNIT>
__global__ void __launch_bounds__(Here<P, true, UNIT>::THREADS, Here<P, true, UNIT>::AT_ONCE)
    gradient_kernel(const __grid_constant__ Gradient a) {
  extern __shared__ float2 shared[];
  using B = Here<P, true, UNIT>;
  const B at(shared, a.workspace);
  for (int64_t item = blockIdx.x; item < B::items(a.shape); item += gridDim.x) {
    auto run = [&](auto sum, auto input, auto spectrum) {
      gradients<P, T, UNIT>(a, at.channel(a.shape, item), at.slice(a.shape, item), at.t, at.memory,
                            sum, input, spectrum, typename B::Barrier(),
                            Add<P, typename B::Barrier>{at.memory, at.t});
    };
    if constexpr (P::PARTS == 1)
      run(at.template numbers<0>(), at.template numbers<1>(), at.template numbers<2>());
    else
      run(Nothing(), Nothing(), at.template numbers<0>());
    typename B::Barrier()();
  }
}

// The gradient of taps in parts; from slice and channel number `first` on, counted together.
template <class P, class T>
__global__ void __launch_bounds__(PartOf<P>::T, PartOf<P>::BACKWARD / PartOf<P>::T)
    parts_kernel(const __grid_constant__ Gradient a, int64_t first) {
  extern __shared__ __align__(16) float2 shared[];
  using M = PartOf<P>;
  const int64_t row = first + blockIdx.x / P::PARTS;
  correlate_part<P, T>(a, row % a.shape.channels, row / a.shape.channels, blockIdx.x % P::PARTS,
                       threadIdx.x, shared, a.workspace + (row - first) * P::N, InRegisters<M>(),
                       InMemory<M>{shared + Row<M>::MEMORY},
                       FetchedRow<P, T>(shared + Row<M>::MEMORY + M::N), Sync<false>());
}

template <class P>
__global__ void __launch_bounds__(P::T)
    finish_kernel(const __grid_constant__ Gradient a, int64_t first) {
  extern __shared__ float2 shared[];
  const int64_t row = first + blockIdx.x;
  finish_taps<P>(a, row % a.shape.channels, row / a.shape.channels, threadIdx.x, shared,
                 a.workspace + (row - first) * P::N, Sync<false>());
}

// What the host has to know of a device.
struct Device {
  int index, processors;
  int shared;  // as the code that runs there was compiled for
};

// How many blocks run: one for every item, or, where they have a workspace, as many as fit.
template <class B>
int64_t grid_of(const fa_conv_shape &shape, const Device &device) {
  int64_t items = B::items(shape);
  int64_t most = B::ELSEWHERE ? (int64_t)device.processors * B::AT_ONCE : (int64_t)INT32_MAX;
  return items < most ? items : most;
}

template <class B>
struct Tag {
  using Type = B;
};

// f(Tag<Block>()) for the block that a device's code has.
template <class P, bool BACKWARD, bool UNIT, class R, class F>
R with_block(const Device &device, R none, F f) {
  auto run = [&](auto tag) {
    if constexpr (decltype(tag)::Type::FITS) return f(tag);
    return none;
  };
  if (device.shared == 227 * 1024) return run(Tag<Block<P, BACKWARD, UNIT, 227 * 1024>>());
  if (device.shared == 163 * 1024) return run(Tag<Block<P, BACKWARD, UNIT, 163 * 1024>>());
  return run(Tag<Block<P, BACKWARD, UNIT, 99 * 1024>>());
}

// An error that is returned is not to be reported once more by who launches next.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Slices and channels of which the parts' sums are in the workspace at a time: four waves or two.
inline int64_t rows_in_parts(const fa_conv_shape &shape, const Device &device) {
  return std::min(shape.slices * shape.channels, (int64_t)2 * device.processors);
}

template <class P, class T>
cudaError_t start_parts(const Gradient &a, const Device &device, cudaStream_t stream) {
  using M = PartOf<P>;
  constexpr int PART_BYTES = (Row<M>::MEMORY + M::N) * 8 + FetchedRow<P, T>::BYTES,
                BYTES = Row<P>::MEMORY * 8;
  auto allow = [](auto kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  cudaError_t error = allow(parts_kernel<P, T>, PART_BYTES);
  if (error == cudaSuccess) error = allow(finish_kernel<P>, BYTES);
  const int64_t all = a.shape.slices * a.shape.channels, most = rows_in_parts(a.shape, device);
  for (int64_t first = 0; first < all && error == cudaSuccess; first += most) {
    const unsigned rows = (unsigned)std::min(most, all - first);
    parts_kernel<P, T><<<rows * P::PARTS, M::T, PART_BYTES, stream>>>(a, first);
    error = cudaGetLastError();
    if (error != cudaSuccess) break;
    finish_kernel<P><<<rows, P::T, BYTES, stream>>>(a, first);
    error = cudaGetLastError();
  }
  return taken(error);
}

template <class P, bool BACKWARD, bool UNIT, class Kernel, class Arguments>
cudaError_t start(Kernel kernel, const Arguments &arguments, const Device &device,
                  cudaStream_t stream) {
  return with_block<P, BACKWARD, UNIT>(device, cudaErrorInvalidConfiguration, [&](auto tag) {
    using B = typename decltype(tag)::Type;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, B::BYTES);
    if (error != cudaSuccess) return taken(error);
    kernel<<<(unsigned)grid_of<B>(arguments.shape, device), B::THREADS, B::BYTES, stream>>>(
        arguments);
    return taken(cudaGetLastError());
  });
}

// Of rows in windows of 1024 or 4096: the convolution, and the gradient of its taps.
cudaError_t start_windows(const Convolution &a, const Device &device, cudaStream_t stream);
cudaError_t start_windows(const Gradient &a, const Device &device, cudaStream_t stream);

// Of rows that are longer than one block transforms, shape.slices channels at a time; gradients of
// inputs, their gate, and taps. Sizes are 0 and statuses FA_BAD_ARGUMENT for other lengths.
constexpr int64_t MOST_LONG_ROWS = 16383;  // at a time
cudaError_t start_long(const Convolution &a, cudaStream_t stream);
cudaError_t start_long(const Gradient &a, cudaStream_t stream);
int64_t long_workspace(const fa_conv_shape &shape, bool backward);
int64_t long_length(const fa_conv_shape &shape);
int64_t long_table_size(int64_t length);
fa_status long_table(int64_t length, float *table);

// For one length; defined where FA_LENGTH is that.
template <int N>
struct Length {
  using P = Short<N>;
  static constexpr bool ANY_STRIDE = N <= 2048;  // beyond it the caller lays rows out side by side
  static cudaError_t convolve(const Convolution &a, bool unit, const Device &device,
                              cudaStream_t stream);
  static cudaError_t gradients(const Gradient &a, bool unit, const Device &device,
                               cudaStream_t stream);
  // What generation its code was compiled for that runs on the current device.
  static cudaError_t generation(int *arch);
  static bool fits(const Device &device) {
    return with_block<P, true, true>(device, false, [](auto) { return true; });
  }
  // Enough for any strides.
  static int64_t workspace(const fa_conv_shape &shape, bool backward, const Device &device) {
    auto floats = [&](auto tag) {
      using B = typename decltype(tag)::Type;
      return grid_of<B>(shape, device) * B::GROUPS * B::ELSEWHERE * N * 2;
    };
    int64_t most = backward ? with_block<P, true, true>(device, (int64_t)0, floats)
                            : with_block<P, false, true>(device, (int64_t)0, floats);
    if (backward && P::PARTS > 1) most = std::max(most, rows_in_parts(shape, device) * N * 2);
    if constexpr (ANY_STRIDE)
      most = std::max(most, backward ? with_block<P, true, false>(device, (int64_t)0, floats)
                                     : with_block<P, false, false>(device, (int64_t)0, floats));
    return most;
  }
};

}  // namespace fastattn
