// Convolution of rows longer than one block transforms: a transform of N = C L numbers in two
// parts.
//
// Going down the tree of fft.h from x^N = i, the first levels see a row as L columns of C numbers,
// L apart, each a polynomial modulo y^C = i: a transform of C. It leaves C leaves of L numbers, the
// remainders modulo x^L = exp(i a), a = 2 pi (1/4 + r) / C where r is the leaf's number with its
// bits reversed. With x = exp(i b) s, b = (a - pi/2) / L, that is s^L = i, a transform of L: so
// number j of a leaf is turned by exp(i b j) before it, and after its inverse by exp(-i a j / L).
//
// A chunk is some channels side by side, of all samples; its rows are numbered sample by sample.
// Spectra take the place of what they are made of. Gradients of the inputs take that of the
// outputs' gradients.
#pragma once

#include "conv.cuh"
#include "plans.h"

namespace fastattn {

template <int C_, int L_>
struct LongPlan {
  static constexpr int C = C_, L = L_, N = C * L;
  using Columns = Short<C>;
  using Leaf = Short<L>;
  static constexpr int FINE = 4096, COARSE = 4 * N / FINE;
  // Its table, in float4: those of the two transforms, then roots of 4N numbers, and of FINE.
  static constexpr int OF_LEAF = Table<Columns>::COUNT, OF_ROOTS = OF_LEAF + Table<Leaf>::COUNT,
                       COUNT = OF_ROOTS + (COARSE + FINE) / 2;
};

template <class W>
void fill_long_table(float *table) {
  fill_table<typename W::Columns>(table);
  fill_table<typename W::Leaf>(table + 4 * W::OF_LEAF);
  float *roots = table + 4 * W::OF_ROOTS;
  for (int i = 0; i < W::COARSE + W::FINE; i++) {
    double turn = i < W::COARSE ? (double)i / W::COARSE : (i - W::COARSE) / (4.0 * W::N);
    roots[2 * i] = (float)std::cos(2 * PI * turn),
              roots[2 * i + 1] = (float)std::sin(2 * PI * turn);
  }
}

struct Chunk {
  fa_conv_shape shape;  // its length is N
  int64_t channel, channels;
  fa_tensor u, pre, post, y;  // y: outputs, or for gradients theirs
  fa_tensor du, dpre;
  const float *taps, *skip;
  float *dtaps;  // (all channels, taps)
  const float4 *table;
  float2 *inputs, *outputs;  // (rows, N); outputs for gradients only
  float2 *spectra;           // (rows of taps, N)
  float2 *sums;              // (channels, N)

  DEVICE int64_t tap_row(int64_t channel_of_chunk) const {
    return (channel + channel_of_chunk) / shape.group - channel / shape.group;
  }
  template <class T>
  DEVICE Line<T, true> line(const fa_tensor &x, int64_t row) const {
    return Line<T, true>(x, row / channels, channel + row % channels);
  }
};

template <class W>
DEVICE void store_leaves(const Complex *z, float2 *row, int column, int t) {
  using P = typename W::Columns;
  UNROLL
  for (int e = 0; e < P::E; e++)
    row[Row<P>::leaf(t, e) * W::L + column] = make_float2(z[e].re, z[e].im);
}

// A column of a row of `length` elements, gated, into its leaves.
template <class W, class T, class Sync>
DEVICE void split_row(const Chunk &a, const fa_tensor &x, const fa_tensor &gate, int64_t length,
                      float2 *spectra, int64_t row, int column, int t, float2 *memory, Sync sync) {
  using P = typename W::Columns;
  const auto line = a.line<T>(x, row), gates = a.line<T>(gate, row);
  Complex z[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int i = column + W::L * Row<P>::index(t, e);
    z[e] = {i < length ? line[i] : 0.f, 0.f};
    if (gates.there() && i < length) z[e].re *= gates[i];
  }
  Row<P>::template forward<true>(z, memory, a.table, t, sync);
  store_leaves<W>(z, spectra + row * W::N, column, t);
}

// The same of a row of taps, those of negative lags being -i times those of N higher. What lies
// between no input and output is left out, since it would wrap around.
template <class W, class Sync>
DEVICE void split_taps(const Chunk &a, int64_t row, int column, int t, float2 *memory, Sync sync) {
  using P = typename W::Columns;
  const fa_conv_shape &s = a.shape;
  const float *taps = a.taps + (a.channel / s.group + row) * s.count;
  const int64_t before = s.mirrored ? s.out : s.n, behind = s.mirrored ? s.n : s.out;
  auto tap = [&](int64_t lag) {
    const int64_t i = lag - s.first;
    return i >= 0 && i < s.count && lag > -before && lag < behind ? taps[i] / W::N : 0.f;
  };
  Complex z[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int lag = column + W::L * Row<P>::index(t, e);
    z[e] = {tap(lag), -tap((int64_t)lag - W::N)};
  }
  Row<P>::template forward<false>(z, memory, a.table, t, sync);
  store_leaves<W>(z, a.spectra + row * W::N, column, t);
}

// exp(i b j) of number j of a leaf, from its roots of 4N numbers.
template <class W>
DEVICE float2 turn_of(const float4 *table, int leaf, int j) {
  uint32_t bits = 0;
  UNROLL
  for (int c = 1; c < W::C; c *= 2) bits = bits << 1 | (leaf / c & 1);
  const uint32_t at = (1u + 4u * bits - W::C) * (uint32_t)j % (4u * W::N);
  const float2 *roots = reinterpret_cast<const float2 *>(table + W::OF_ROOTS);
  const Complex one = number(roots, at / W::FINE), two = number(roots + W::COARSE, at % W::FINE);
  const Complex both = times(one, two);
  return make_float2(both.re, both.im);
}

// A leaf and its spectrum; `turns` has turn_of every number.
template <class W, class Sync>
DEVICE void transform_leaf(Complex *x, const float2 *from, const float2 *turns, const float4 *table,
                           int t, float2 *memory, Sync sync) {
  using P = typename W::Leaf;
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int j = Row<P>::index(t, e);
    x[e] = times(number(from, j), number(turns, j));
  }
  Row<P>::template forward<false>(x, memory, table + W::OF_LEAF, t, sync);
}

template <class W, class Sync>
DEVICE void restore_leaf(Complex *x, float2 *to, const float2 *turns, const float4 *table, int t,
                         float2 *memory, Sync sync) {
  using P = typename W::Leaf;
  Row<P>::inverse(x, memory, table + W::OF_LEAF, t, sync);
  Row<P>::twists(table + W::OF_LEAF, t, [&](int e, Complex w) {
    const int j = Row<P>::index(t, e);
    const Complex found = conjugate_times(number(turns, j), times(x[e], w));
    to[j] = make_float2(found.re, found.im);
  });
}

// Of rows `row`, `row` + `step` and so on below `end`, one leaf: its spectrum.
template <class W, class Sync>
DEVICE void transform_leaves(float2 *spectra, int64_t row, int64_t step, int64_t end, int leaf,
                             const float2 *turns, const float4 *table, int t, float2 *memory,
                             Sync sync) {
  using P = typename W::Leaf;
  for (; row < end; row += step) {
    float2 *at = spectra + (row * W::C + leaf) * W::L;
    Complex x[P::E];
    transform_leaf<W>(x, at, turns, table, t, memory, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) at[e * P::T + t] = make_float2(x[e].re, x[e].im);
    sync();
  }
}

// The same, and what becomes of it by the taps.
template <class W, class Sync>
DEVICE void convolve_leaves(const Chunk &a, int64_t row, int64_t step, int64_t end, int leaf,
                            const float2 *turns, int t, float2 *memory, Sync sync) {
  using P = typename W::Leaf;
  for (; row < end; row += step) {
    float2 *at = a.inputs + (row * W::C + leaf) * W::L;
    const float2 *taps = a.spectra + (a.tap_row(row % a.channels) * W::C + leaf) * W::L;
    Complex x[P::E];
    transform_leaf<W>(x, at, turns, a.table, t, memory, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) {
      const Complex k = number(taps, e * P::T + t);
      x[e] = a.shape.mirrored ? conjugate_times(k, x[e]) : times(k, x[e]);
    }
    restore_leaf<W>(x, at, turns, a.table, t, memory, sync);
  }
}

// One leaf of channels `channel`, `channel` + `step` and so on below `end`: of the gradients of
// inputs, in the place of those of outputs, and of the taps, where they are wanted.
template <class W, class Sum, class Numbers, class Sync>
DEVICE void gradients_of_leaves(const Chunk &a, int64_t channel, int64_t step, int64_t end,
                                int leaf, const float2 *turns, int t, float2 *memory, Sum sum,
                                Numbers input, Sync sync) {
  using P = typename W::Leaf;
  const bool of_input = a.du.data || a.dpre.data, mirrored = a.shape.mirrored;
  Complex x[P::E];
  for (; channel < end; channel += step) {
    const float2 *taps = a.spectra + (a.tap_row(channel) * W::C + leaf) * W::L;
    if (a.dtaps) {
      UNROLL
      for (int e = 0; e < P::E; e++) sum.put(e, t, {0.f, 0.f});
    }
    for (int b = 0; b < a.shape.batch; b++) {
      const int64_t at = ((b * a.channels + channel) * W::C + leaf) * W::L;
      if (a.dtaps) {
        transform_leaf<W>(x, a.inputs + at, turns, a.table, t, memory, sync);
        UNROLL
        for (int e = 0; e < P::E; e++) input.put(e, t, x[e]);
        sync();
      }
      transform_leaf<W>(x, a.outputs + at, turns, a.table, t, memory, sync);
      if (a.dtaps) {
        UNROLL
        for (int e = 0; e < P::E; e++) {
          Complex product = conjugate_times(input.get(e, t), x[e]), total = sum.get(e, t);
          sum.put(e, t, {total.re + product.re, total.im + product.im});
        }
      }
      if (of_input) {
        UNROLL
        for (int e = 0; e < P::E; e++) {
          const Complex k = number(taps, e * P::T + t);
          x[e] = mirrored ? times(k, x[e]) : conjugate_times(k, x[e]);
        }
        restore_leaf<W>(x, a.outputs + at, turns, a.table, t, memory, sync);
      } else {
        sync();
      }
    }
    if (a.dtaps) {
      sync();
      UNROLL
      for (int e = 0; e < P::E; e++) {
        const Complex total = sum.get(e, t);
        x[e] = {total.re / W::N, mirrored ? -total.im / W::N : total.im / W::N};
      }
      restore_leaf<W>(x, a.sums + (channel * W::C + leaf) * W::L, turns, a.table, t, memory, sync);
    }
    sync();
  }
}

// A column from its leaves, turned as an inverse transform leaves it.
template <class W, class Sync>
DEVICE void join_leaves(Complex *z, const float2 *row, int column, const float4 *table, int t,
                        float2 *memory, Sync sync) {
  using P = typename W::Columns;
  UNROLL
  for (int e = 0; e < P::E; e++) z[e] = number(row, Row<P>::leaf(t, e) * W::L + column);
  Row<P>::inverse(z, memory, table, t, sync);
  Row<P>::twists(table, t, [&](int e, Complex w) { z[e] = times(z[e], w); });
}

template <class W, class T, class Sync>
DEVICE void join_row(const Chunk &a, int64_t row, int column, int t, float2 *memory, Sync sync) {
  using P = typename W::Columns;
  const auto u = a.line<T>(a.u, row), pre = a.line<T>(a.pre, row), post = a.line<T>(a.post, row),
             y = a.line<T>(a.y, row);
  Complex z[P::E];
  join_leaves<W>(z, a.inputs + row * W::N, column, a.table, t, memory, sync);
  const float skip = a.skip ? a.skip[a.channel + row % a.channels] : 0.f;
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int i = column + W::L * Row<P>::index(t, e);
    if (i >= a.shape.out) continue;
    float value = z[e].re;
    if (a.skip && i < a.shape.n)
      value = multiply_add(skip, pre.there() ? pre[i] * u[i] : u[i], value);
    y.put(i, post.there() ? post[i] * value : value);
  }
}

// The same of gradients of inputs and their gate.
template <class W, class T, class Sync>
DEVICE void join_gradient(const Chunk &a, int64_t row, int column, int t, float2 *memory,
                          Sync sync) {
  using P = typename W::Columns;
  const auto u = a.line<T>(a.u, row), pre = a.line<T>(a.pre, row), post = a.line<T>(a.post, row),
             dy = a.line<T>(a.y, row), du = a.line<T>(a.du, row), dpre = a.line<T>(a.dpre, row);
  Complex z[P::E];
  join_leaves<W>(z, a.outputs + row * W::N, column, a.table, t, memory, sync);
  const float skip = a.skip ? a.skip[a.channel + row % a.channels] : 0.f;
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int i = column + W::L * Row<P>::index(t, e);
    if (i >= a.shape.n) continue;
    float value = z[e].re;
    if (a.skip && i < a.shape.out)
      value = multiply_add(skip, post.there() ? post[i] * dy[i] : dy[i], value);
    if (dpre.there()) dpre.put(i, u[i] * value);
    if (du.there()) du.put(i, pre.there() ? pre[i] * value : value);
  }
}

template <class W, class Sync>
DEVICE void join_taps(const Chunk &a, int64_t channel, int column, int t, float2 *memory,
                      Sync sync) {
  using P = typename W::Columns;
  const fa_conv_shape &s = a.shape;
  const int64_t before = s.mirrored ? s.out : s.n, behind = s.mirrored ? s.n : s.out;
  float *to = a.dtaps + (a.channel + channel) * s.count;
  auto put = [&](int64_t lag, float x) {
    const int64_t i = lag - s.first;
    if (i >= 0 && i < s.count && lag > -before && lag < behind) to[i] = x;
  };
  Complex z[P::E];
  join_leaves<W>(z, a.sums + channel * W::N, column, a.table, t, memory, sync);
  UNROLL
  for (int e = 0; e < P::E; e++) {
    const int lag = column + W::L * Row<P>::index(t, e);
    put(lag, z[e].re), put((int64_t)lag - W::N, -z[e].im);
  }
}

}  // namespace fastattn
