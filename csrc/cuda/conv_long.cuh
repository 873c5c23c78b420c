// Convolution of rows longer than one block transforms: blocks of N, and a Toeplitz matrix of
// spectra.
//
// Output block i is what sum over j of K[i - j] U[j] transforms back to, its real part: U[j] is the
// transform of input block j, K[m] that of the taps at lags mN + x, less i times those at mN + x -
// N, which is how taps at all lags between two blocks look to the transform. Gradients of taps at
// lags mN + x are the real part of what D[m] + i D[m + 1] transforms back to, where D[m] = sum over
// j of conj(U[j]) Y[j + m].
//
// A chunk is some channels side by side, of all samples; its rows are numbered sample by sample.
#pragma once

#include "conv.cuh"

namespace fastattn {

struct Chunk {
  fa_conv_shape shape;  // its length is that of a block
  int64_t channel, channels;
  int64_t blocks_in, blocks_out;  // of a row
  int64_t low, count;             // which K there are: low to low + count - 1
  fa_tensor u, y;
  const float *taps;
  float *dtaps;  // (all channels, taps)
  const float4 *table;
  float2 *inputs, *outputs;  // (rows, blocks, N)
  float2 *spectra;           // (rows of taps, or channels where of a gradient, count, N)

  DEVICE int64_t tap_row(int64_t channel_of_chunk) const {
    return (channel + channel_of_chunk) / shape.group - channel / shape.group;
  }
};

// What follows from a shape alone; every channel is in the chunk.
inline Chunk chunk_of(const fa_conv_shape &s) {
  auto floored = [](int64_t x, int64_t by) { return x >= 0 ? x / by : -((-x + by - 1) / by); };
  Chunk a = {};
  a.shape = s;
  a.channels = s.channels;
  a.blocks_in = (s.n + s.length - 1) / s.length;
  a.blocks_out = (s.out + s.length - 1) / s.length;
  // K that taps touch, of those that an input block and an output block ask for; and one lower,
  // whose lags have gradients by the next
  int64_t low = floored(s.first, s.length), high = floored(s.first + s.count - 1, s.length) + 1;
  int64_t before = (s.mirrored ? a.blocks_out : a.blocks_in) - 1;
  int64_t behind = (s.mirrored ? a.blocks_in : a.blocks_out) - 1;
  if (low < -before - 1) low = -before - 1;
  if (high > behind) high = behind;
  a.low = low;
  a.count = high - low + 1;
  return a;
}

// The transform of a block of a row, of `length` elements, into its place among `spectra`.
template <class P, class T, bool UNIT, class Sync>
DEVICE void transform_block(const Chunk &a, const fa_tensor &x, int64_t length, int64_t blocks,
                            float2 *spectra, int64_t item, int t, float2 *memory, Sync sync) {
  const int64_t row = item / blocks, block = item % blocks;
  const int64_t left = length - block * P::N;
  Line<T, UNIT> line(x, row / a.channels, a.channel + row % a.channels), none({}, 0, 0);
  line.at += block * P::N * (UNIT ? 1 : line.n);
  Complex z[P::E];
  load_row<P>(z, line, none, left < P::N ? (int)left : P::N, memory, a.table, t, sync);
  float2 *to = spectra + item * P::N;
  UNROLL
  for (int e = 0; e < P::E; e++) to[e * P::T + t] = make_float2(z[e].re, z[e].im);
}

// K[low + item % count] of a row of taps.
template <class P, class Sync>
DEVICE void transform_taps(const Chunk &a, int64_t item, int t, float2 *memory, Sync sync) {
  const fa_conv_shape &s = a.shape;
  const float *taps = a.taps + (a.channel / s.group + item / a.count) * s.count;
  const int64_t at = (a.low + item % a.count) * P::N - s.first;  // of the tap of x = 0
  auto tap = [&](int64_t i) { return i >= 0 && i < s.count ? taps[i] / P::N : 0.f; };
  Complex z[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) {
    int64_t i = at + Row<P>::index(t, e);
    z[e] = {tap(i), -tap(i - P::N)};
  }
  Row<P>::template forward<false>(z, memory, a.table, t, sync);
  float2 *to = a.spectra + item * P::N;
  UNROLL
  for (int e = 0; e < P::E; e++) to[e * P::T + t] = make_float2(z[e].re, z[e].im);
}

// Number f of C output blocks of a row from `first` on. The window holds the K of one input block;
// the next one's are those moved by one.
template <int C>
DEVICE void multiply_blocks(const Chunk &a, int64_t row, int64_t first, int64_t f) {
  const int64_t n = a.shape.length;
  const bool mirrored = a.shape.mirrored;
  const float2 *inputs = a.inputs + row * a.blocks_in * n + f;
  const float2 *spectra = a.spectra + a.tap_row(row % a.channels) * a.count * n + f;
  const int64_t least = mirrored ? -(a.low + a.count - 1) : a.low;  // of i - j
  const int64_t most = least + a.count - 1;
  auto k = [&](int64_t m) {
    if (m < least || m > most) return Complex{0.f, 0.f};
    Complex found = number(spectra, (int64_t)((mirrored ? -m : m) - a.low) * n);
    return mirrored ? Complex{found.re, -found.im} : found;
  };
  int64_t begin = first - most, end = first + C - least;  // of input blocks that are seen
  if (begin < 0) begin = 0;
  if (end > a.blocks_in) end = a.blocks_in;
  Complex sum[C], window[C];
  UNROLL
  for (int c = 0; c < C; c++) {
    sum[c] = {0.f, 0.f};
    window[c] = k(first + c - begin);
  }
  for (int64_t start = begin; start < end; start += C) {
    UNROLL
    for (int d = 0; d < C; d++) {
      const int64_t j = start + d;
      if (j < end) {
        window[(C - d) % C] = k(first - j);
        const Complex u = number(inputs, j * n);
        UNROLL
        for (int c = 0; c < C; c++) {
          const Complex w = window[(c - d + C) % C];
          sum[c].re = multiply_add(-w.im, u.im, multiply_add(w.re, u.re, sum[c].re));
          sum[c].im = multiply_add(w.re, u.im, multiply_add(w.im, u.re, sum[c].im));
        }
      }
    }
  }
  float2 *to = a.outputs + (row * a.blocks_out + first) * n + f;
  UNROLL
  for (int c = 0; c < C; c++)
    if (first + c < a.blocks_out) to[c * n] = make_float2(sum[c].re, sum[c].im);
}

// Output block item % blocks_out of a row.
template <class P, class T, bool UNIT, class Sync>
DEVICE void restore_block(const Chunk &a, int64_t item, int t, float2 *memory, Sync sync) {
  const int64_t row = item / a.blocks_out, block = item % a.blocks_out;
  const int64_t left = a.shape.out - block * P::N;
  Line<T, UNIT> y(a.y, row / a.channels, a.channel + row % a.channels);
  y.at += block * P::N * (UNIT ? 1 : y.n);
  const float2 *from = a.outputs + item * P::N;
  Complex z[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) z[e] = number(from, e * P::T + t);
  restore_row<P>(z, memory, a.table, t, sync);
  for_each<P>(t, left < P::N ? (int)left : P::N, [&](int e, int i) { y.put(i, z[e].re); });
}

// Number f of D[m] for C of them from low + `first` on, of a channel, summed over the samples: what
// is conjugated are inputs, or outputs where mirrored.
template <int C>
DEVICE void correlate_blocks(const Chunk &a, int64_t channel, int64_t first, int64_t f) {
  const int64_t n = a.shape.length, m = a.low + first;
  const bool mirrored = a.shape.mirrored;
  const int64_t blocks = mirrored ? a.blocks_out : a.blocks_in;
  const int64_t others = mirrored ? a.blocks_in : a.blocks_out;
  Complex sum[C];
  UNROLL
  for (int c = 0; c < C; c++) sum[c] = {0.f, 0.f};
  for (int64_t b = 0; b < a.shape.batch; b++) {
    const int64_t row = b * a.channels + channel;
    const float2 *one = (mirrored ? a.outputs : a.inputs) + row * blocks * n + f;
    const float2 *two = (mirrored ? a.inputs : a.outputs) + row * others * n + f;
    auto other = [&](int64_t i) {
      return i >= 0 && i < others ? number(two, i * n) : Complex{0.f, 0.f};
    };
    int64_t begin = -(m + C - 1), end = others - m;  // of blocks that meet one of the others
    if (begin < 0) begin = 0;
    if (end > blocks) end = blocks;
    Complex window[C];
    UNROLL
    for (int c = 0; c < C; c++) window[c] = other(begin + m + c);
    for (int64_t start = begin; start < end; start += C) {
      UNROLL
      for (int d = 0; d < C; d++) {
        const int64_t j = start + d;
        if (j < end) {
          window[(C - 1 + d) % C] = other(j + m + C - 1);
          const Complex u = number(one, j * n);
          UNROLL
          for (int c = 0; c < C; c++) {
            const Complex w = window[(c + d) % C];
            sum[c].re = multiply_add(u.im, w.im, multiply_add(u.re, w.re, sum[c].re));
            sum[c].im = multiply_add(-u.im, w.re, multiply_add(u.re, w.im, sum[c].im));
          }
        }
      }
    }
  }
  float2 *to = a.spectra + (channel * a.count + first) * n + f;
  UNROLL
  for (int c = 0; c < C; c++)
    if (first + c < a.count) to[c * n] = make_float2(sum[c].re, sum[c].im);
}

// Gradients of the taps at lags from (low + item % count) N on, of a channel.
template <class P, class Sync>
DEVICE void restore_taps(const Chunk &a, int64_t item, int t, float2 *memory, Sync sync) {
  const fa_conv_shape &s = a.shape;
  const int64_t block = item % a.count;
  const float2 *from = a.spectra + item * P::N;
  Complex z[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) {
    Complex one = number(from, e * P::T + t), next = {0.f, 0.f};
    if (block + 1 < a.count) next = number(from + P::N, e * P::T + t);
    z[e] = {(one.re - next.im) / P::N, (one.im + next.re) / P::N};
  }
  float *to = a.dtaps + (a.channel + item / a.count) * s.count;
  const int64_t at = (a.low + block) * P::N - s.first;
  restore_row<P>(z, memory, a.table, t, sync);
  for_each<P>(t, P::N, [&](int e, int i) {
    if (at + i >= 0 && at + i < s.count) to[at + i] = z[e].re;
  });
}

}  // namespace fastattn
