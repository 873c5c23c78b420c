// The kernels of conv.cuh for one length of transform, and how they are launched.
#pragma once

#include "conv.cuh"
#include "plans.h"

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

// What a block has: groups of threads for four warps, or one group. Beside the row are arrays of N
// numbers: the spectrum of the taps; of gradients the sum over samples, the inputs, and that
// spectrum. The first is in registers where threads have room for three times their numbers and
// what else they need; others that would leave less room than for AT_ONCE blocks are in a
// workspace, one for every block that runs.
template <class P, bool BACKWARD, int SHARED>
struct Block {
  static constexpr int GROUPS = P::T < 64 ? 128 / P::T : 1, THREADS = GROUPS * P::T;
  static constexpr int AT_ONCE = (BACKWARD ? P::BACKWARD : P::FORWARD) / THREADS;
  static constexpr bool HELD = 65536 / (AT_ONCE * THREADS) >= 7 * P::E;
  static constexpr int ROW = Row<P>::MEMORY, ALL = (BACKWARD ? 3 : 1) - HELD;
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

  // One of the arrays, of the group whose shared memory this is.
  template <int WHICH>
  static DEVICE auto numbers(float2 *memory, float2 *workspace, int group) {
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
};

// The barrier of a group of threads.
template <class P>
struct Sync {
  DEVICE void operator()() const {
    if (P::T <= 32)
      __syncwarp();
    else
      __syncthreads();
  }
};

// A sum over a group of threads, for its first, by way of its shared memory.
template <class P>
struct Add {
  float2 *memory;
  int t;
  DEVICE float operator()(float x) const {
    Sync<P> sync;
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

template <class P, class T, bool UNIT>
__global__ void __launch_bounds__(Block<P, false, HERE>::THREADS, Block<P, false, HERE>::AT_ONCE)
    convolve_kernel(const __grid_constant__ Convolution a) {
  extern __shared__ float2 shared[];
  using B = Block<P, false, HERE>;
  const int group = threadIdx.x / P::T, t = threadIdx.x % P::T;
  float2 *memory = shared + group * B::EACH;
  auto spectrum = B::template numbers<0>(memory, a.workspace, group);
  const int64_t tiles = (a.shape.channels + B::GROUPS - 1) / B::GROUPS;
  for (int64_t item = blockIdx.x; item < tiles * a.shape.slices; item += gridDim.x) {
    convolve<P, T, UNIT>(a, item % tiles * B::GROUPS + group, item / tiles, t, memory, spectrum,
                         Sync<P>());
    Sync<P>()();
  }
}

template <class P, class T, bool UNIT>
__global__ void __launch_bounds__(Block<P, true, HERE>::THREADS, Block<P, true, HERE>::AT_ONCE)
    gradient_kernel(const __grid_constant__ Gradient a) {
  extern __shared__ float2 shared[];
  using B = Block<P, true, HERE>;
  const int group = threadIdx.x / P::T, t = threadIdx.x % P::T;
  float2 *memory = shared + group * B::EACH;
  auto sum = B::template numbers<0>(memory, a.workspace, group);
  auto input = B::template numbers<1>(memory, a.workspace, group);
  auto spectrum = B::template numbers<2>(memory, a.workspace, group);
  const int64_t tiles = (a.shape.channels + B::GROUPS - 1) / B::GROUPS;
  for (int64_t item = blockIdx.x; item < tiles * a.shape.slices; item += gridDim.x) {
    gradients<P, T, UNIT>(a, item % tiles * B::GROUPS + group, item / tiles, t, memory, sum, input,
                          spectrum, Sync<P>(), Add<P>{memory, t});
    Sync<P>()();
  }
}

// What the host has to know of a device.
struct Device {
  int index, processors;
  int shared;  // as the code that runs there was compiled for
};

// How many blocks run: one for every item, or, where they have a workspace, as many as fit.
template <class B>
int64_t grid_of(const fa_conv_shape &shape, const Device &device) {
  int64_t items = (shape.channels + B::GROUPS - 1) / B::GROUPS * shape.slices;
  int64_t most = B::ELSEWHERE ? (int64_t)device.processors * B::AT_ONCE : (int64_t)INT32_MAX;
  return items < most ? items : most;
}

// f(Block) for the block that a device's code has.
template <class P, bool BACKWARD, class R, class F>
R with_block(const Device &device, R none, F f) {
  auto run = [&](auto block) {
    if constexpr (decltype(block)::FITS) return f(block);
    return none;
  };
  if (device.shared == 227 * 1024) return run(Block<P, BACKWARD, 227 * 1024>());
  if (device.shared == 163 * 1024) return run(Block<P, BACKWARD, 163 * 1024>());
  return run(Block<P, BACKWARD, 99 * 1024>());
}

// An error that is returned is not to be reported once more by who launches next.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

template <class P, bool BACKWARD, class Kernel, class Arguments>
cudaError_t start(Kernel kernel, const Arguments &arguments, const Device &device,
                  cudaStream_t stream) {
  return with_block<P, BACKWARD>(device, cudaErrorInvalidConfiguration, [&](auto block) {
    using B = decltype(block);
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

// Of rows that are longer than one block transforms; 0 and FA_BAD_ARGUMENT for other lengths.
int64_t long_table_size(int64_t length);
fa_status long_table(int64_t length, float *table);

// For one length; defined where FA_LENGTH is that.
template <int N>
struct Length {
  using P = Short<N>;
  static cudaError_t convolve(const Convolution &a, bool unit, const Device &device,
                              cudaStream_t stream);
  static cudaError_t gradients(const Gradient &a, bool unit, const Device &device,
                               cudaStream_t stream);
  // What generation its code was compiled for that runs on the current device.
  static cudaError_t generation(int *arch);
  static bool fits(const Device &device) {
    return with_block<P, true>(device, false, [](auto) { return true; });
  }
  static int64_t workspace(const fa_conv_shape &shape, bool backward, const Device &device) {
    auto floats = [&](auto block) {
      using B = decltype(block);
      return grid_of<B>(shape, device) * B::GROUPS * B::ELSEWHERE * N * 2;
    };
    return backward ? with_block<P, true>(device, (int64_t)0, floats)
                    : with_block<P, false>(device, (int64_t)0, floats);
  }
};

}  // namespace fastattn
