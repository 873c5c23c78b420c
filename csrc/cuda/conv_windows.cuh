// Rows much longer than their taps, in windows (overlap-save): see fa_conv_valid.
//
// A window of 2N inputs is a polynomial modulo x^2N = -1, so one modulo x^N = i whose number j is
// x_j + i x_(j + N). Real parts of a product are outputs up to N, imaginary parts those from N on.
// A group of threads has a channel and walks its slice of the windows of all samples.
#pragma once

#include "conv.cuh"

namespace fastattn {

// How many inputs of a window stand before its first output.
DEVICE int leading(const fa_conv_shape &s) {
  int64_t back = s.mirrored ? -s.first : s.first + s.count - 1;
  return back > 0 ? (int)back : 0;
}

// f(part, e, i) for every element of a window that is within [low, high), which thread t has as the
// real (part 0) or imaginary part of its number e.
template <class P, class F>
DEVICE void for_each_of_window(int t, int low, int high, F f) {
  if (low <= 0 && high >= 2 * P::N) {
    UNROLL
    for (int e = 0; e < P::E; e++) {
      int i = Row<P>::index(t, e);
      f(0, e, i), f(1, e, i + P::N);
    }
  } else {
    UNROLL
    for (int e = 0; e < P::E; e++) {
      int i = Row<P>::index(t, e), j = i + P::N;
      if (i >= low && i < high) f(0, e, i);
      if (j >= low && j < high) f(1, e, j);
    }
  }
}

DEVICE float &part_of(Complex &x, int part) { return part ? x.im : x.re; }

// The transform of a window: elements [low, high) of it are those from `begin` on of a row, gated.
template <class P, class L, class Sync>
DEVICE void load_window(Complex *x, L row, L gate, int64_t begin, int low, int high, float2 *memory,
                        const float4 *table, int t, Sync sync) {
  UNROLL
  for (int e = 0; e < P::E; e++) x[e] = {0.f, 0.f};
  row.at += begin;
  for_each_of_window<P>(t, low, high,
                        [&](int part, int e, int i) { part_of(x[e], part) = row[i]; });
  if (gate.there()) {
    gate.at += begin;
    for_each_of_window<P>(t, low, high,
                          [&](int part, int e, int i) { part_of(x[e], part) *= gate[i]; });
  }
  Row<P>::template forward<false>(x, memory, table, t, sync);
}

// The part of a window of 2N from `begin` on that a row of n has.
DEVICE int first_of(int64_t begin) { return begin < 0 ? (int)-begin : 0; }
template <class P>
DEVICE int last_of(int64_t begin, int64_t n) {
  int64_t last = n - begin;
  return last < 2 * P::N ? (int)(last < 0 ? 0 : last) : 2 * P::N;
}

// One group of threads; `memory` as in convolve.
template <class P, class T, class Numbers, class Sync>
DEVICE void convolve_windows(const Convolution &a, int64_t channel, int64_t slice, int t,
                             float2 *memory, Numbers spectrum, Sync sync) {
  using L = Line<T, true>;
  const fa_conv_shape &s = a.shape;
  const bool active = channel < s.channels;  // others keep the barriers company
  if (!active) channel = s.channels - 1;
  Complex x[P::E];
  spectrum_of<P>(x, s, taps_of(s, a.taps, channel), memory, a.table, t, sync);
  UNROLL
  for (int e = 0; e < P::E; e++) spectrum.put(e, t, x[e]);
  sync();

  const float skip = a.skip ? a.skip[channel] : 0.f;
  const int lead = leading(s);
  const int64_t windows = (s.out + s.valid - 1) / s.valid, all = s.batch * windows;
  for (int64_t w = all * slice / s.slices; w < all * (slice + 1) / s.slices; w++) {
    const int64_t b = w / windows, begin = w % windows * s.valid - lead;
    L u(a.u, b, channel), pre(a.pre, b, channel), post(a.post, b, channel), y(a.y, b, channel);
    const int low = first_of(begin), high = last_of<P>(begin, s.n);
    load_window<P>(x, u, pre, begin, low, high, memory, a.table, t, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) x[e] = times(x[e], spectrum.get(e, t));
    Row<P>::inverse(x, memory, a.table, t, sync);
    Row<P>::twists(a.table, t, [&](int e, Complex w) { x[e] = times(x[e], w); });

    int end = last_of<P>(begin, s.out);
    if (end > lead + s.valid) end = lead + (int)s.valid;
    if (!active) end = 0;
    u.at += begin, y.at += begin;
    if (pre.there()) pre.at += begin;
    if (a.skip)
      for_each_of_window<P>(t, lead, end < high ? end : high, [&](int part, int e, int i) {
        float &value = part_of(x[e], part);
        value = multiply_add(skip, pre.there() ? pre[i] * u[i] : u[i], value);
      });
    if (post.there()) {
      post.at += begin;
      for_each_of_window<P>(t, lead, end,
                            [&](int part, int e, int i) { part_of(x[e], part) *= post[i]; });
    }
    for_each_of_window<P>(t, lead, end,
                          [&](int part, int e, int i) { y.put(i, part_of(x[e], part)); });
  }
}

// The taps' gradient alone; dtaps as for Gradient.
template <class P, class T, class Sum, class Numbers, class Sync>
DEVICE void correlate_windows(const Gradient &a, int64_t channel, int64_t slice, int t,
                              float2 *memory, Sum sum, Numbers input, Sync sync) {
  using L = Line<T, true>;
  const fa_conv_shape &s = a.shape;
  const bool active = channel < s.channels;
  if (!active) channel = s.channels - 1;
  Complex x[P::E];
  UNROLL
  for (int e = 0; e < P::E; e++) sum.put(e, t, {0.f, 0.f});

  const int lead = leading(s);
  const int64_t windows = (s.out + s.valid - 1) / s.valid, all = s.batch * windows;
  for (int64_t w = all * slice / s.slices; w < all * (slice + 1) / s.slices; w++) {
    const int64_t b = w / windows, begin = w % windows * s.valid - lead;
    L u(a.u, b, channel), pre(a.pre, b, channel), post(a.post, b, channel), dy(a.dy, b, channel);
    load_window<P>(x, u, pre, begin, first_of(begin), last_of<P>(begin, s.n), memory, a.table, t,
                   sync);
    UNROLL
    for (int e = 0; e < P::E; e++) input.put(e, t, x[e]);
    sync();
    int end = last_of<P>(begin, s.out);
    if (end > lead + s.valid) end = lead + (int)s.valid;
    load_window<P>(x, dy, post, begin, lead, end, memory, a.table, t, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) {
      Complex product = conjugate_times(input.get(e, t), x[e]), total = sum.get(e, t);
      sum.put(e, t, {total.re + product.re, total.im + product.im});
    }
    sync();
  }
  store_taps<P>(x, s, sum, a.dtaps + (slice * s.channels + channel) * s.count,
                active ? (int)s.count : 0, memory, a.table, t, sync);
}

}  // namespace fastattn
