// Convolution of rows that one block transforms: a group of threads has a channel, makes the
// spectrum of its taps, and walks the samples of its slice.
//
// A row of at most N inputs is a polynomial modulo x^N = i; so are the taps, whose negative lags
// are -i times those of N higher. Real parts of the product are the convolution modulo x^2N = -1,
// which no output that is asked for wraps around.
#pragma once

#include "fastattn/fft_conv.h"
#include "row.cuh"

namespace fastattn {

// One channel at one sample, of any stride, or where UNIT of 1.
template <class T, bool UNIT>
struct Line {
  T *at;
  int64_t n;
  DEVICE Line(const fa_tensor &x, int64_t b, int64_t c)
      : at(x.data ? static_cast<T *>(x.data) + b * x.b + c * x.c : nullptr), n(x.n) {
#ifdef __CUDA_ARCH__
    // Else all i * n are made once for every sample, and fill the registers.
    if (!UNIT) asm volatile("" : "+l"(n));
#endif
  }
  DEVICE bool there() const { return at != nullptr; }
  DEVICE float operator[](int i) const { return to_float(UNIT ? at[i] : at[i * n]); }
  DEVICE void put(int i, float x) const { (UNIT ? at[i] : at[i * n]) = from_float<T>(x); }
};

// The same number, of which a compiler knows nothing: else what follows from it is made once for
// all samples, and fills the registers.
DEVICE int unknown(int x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

struct Convolution {
  fa_conv_shape shape;
  fa_tensor u, pre, post, y;
  const float *taps, *skip;
  const float4 *table;
  float2 *workspace;  // where spectra do not fit into shared memory
};

DEVICE Complex times(Complex a, Complex b) {
  return {multiply_add(-a.im, b.im, a.re * b.re), multiply_add(a.re, b.im, a.im * b.re)};
}

// conj(a) b.
DEVICE Complex conjugate_times(Complex a, Complex b) {
  return {multiply_add(a.im, b.im, a.re * b.re), multiply_add(-a.im, b.re, a.re * b.im)};
}

// A tap by its lag, zero where there is none.
struct Taps {
  const float *at;
  int first, count;
  DEVICE float operator[](int lag) const {
    int t = lag - first;
    return t >= 0 && t < count ? at[t] : 0.f;
  }
};

DEVICE Taps taps_of(const fa_conv_shape &s, const float *taps, int64_t channel) {
  return {taps + channel / s.group * s.count, (int)s.first, (int)s.count};
}

// What a channel's spectrum is over N, as numbers e of thread t; conjugated where mirrored, since
// then x^-lag takes the place of x^lag.
template <class P, class Sync>
DEVICE void spectrum_of(Complex *x, const fa_conv_shape &s, Taps taps, float2 *memory,
                        const float4 *table, int t, Sync sync) {
  using W = Row<P>;
  UNROLL
  for (int e = 0; e < P::E; e++) {
    int i = W::index(t, e);
    x[e] = {taps[i] / P::N, -taps[i - P::N] / P::N};
  }
  W::template forward<false>(x, memory, table, t, sync);
  if (s.mirrored) {
    UNROLL
    for (int e = 0; e < P::E; e++) x[e].im = -x[e].im;
  }
}

// f(e, i) for every number e of thread t, element i of a row, that is there.
template <class P, class F>
DEVICE void for_each(int t, int length, F f) {
  if (length == P::N) {
    UNROLL
    for (int e = 0; e < P::E; e++) f(e, Row<P>::index(t, e));
  } else {
    UNROLL
    for (int e = 0; e < P::E; e++)
      if (int i = Row<P>::index(t, e); i < length) f(e, i);
  }
}

// The transform of a row's n inputs, gated.
template <class P, class L, class Sync>
DEVICE void load_row(Complex *x, L u, L gate, int n, float2 *memory, const float4 *table, int t,
                     Sync sync) {
  UNROLL
  for (int e = 0; e < P::E; e++) x[e] = {0.f, 0.f};
  for_each<P>(t, n, [&](int e, int i) { x[e].re = u[i]; });
  if (gate.there()) for_each<P>(t, n, [&](int e, int i) { x[e].re *= gate[i]; });
  Row<P>::template forward<true>(x, memory, table, t, sync);
}

// The row whose transform x is, in its real parts.
template <class P, class Sync>
DEVICE void restore_row(Complex *x, float2 *memory, const float4 *table, int t, Sync sync) {
  Row<P>::inverse(x, memory, table, t, sync);
  Row<P>::twists(table, t,
                 [&](int e, Complex w) { x[e].re = multiply_add(-x[e].im, w.im, x[e].re * w.re); });
}

DEVICE Complex number(const float2 *of, int64_t at) { return {of[at].x, of[at].y}; }

// An array that has number e of every thread: N in memory, or each thread's in its registers.
template <class P>
struct InMemory {
  float2 *at;
  DEVICE Complex get(int e, int t) const { return number(at, e * P::T + t); }
  DEVICE void put(int e, int t, Complex x) { at[e * P::T + t] = make_float2(x.re, x.im); }
};
template <class P>
struct InRegisters {
  Complex x[P::E];
  DEVICE Complex get(int e, int) const { return x[e]; }
  DEVICE void put(int e, int, Complex y) { x[e] = y; }
};

// What is not there; nothing asks it.
struct Nothing {
  DEVICE Complex get(int, int) const { return {0.f, 0.f}; }
  DEVICE void put(int, int, Complex) {}
};

// One group of threads. `memory` has Row<P>::MEMORY float2.
template <class P, class T, bool UNIT, class Numbers, class Sync>
DEVICE void convolve(const Convolution &a, int64_t channel, int64_t slice, int t, float2 *memory,
                     Numbers spectrum, Sync sync) {
  using L = Line<T, UNIT>;
  const fa_conv_shape &s = a.shape;
  const bool active = channel < s.channels;  // others keep the barriers company
  if (!active) channel = s.channels - 1;
  const int n = s.n, out = active ? s.out : 0;
  Complex x[P::E];
  spectrum_of<P>(x, s, taps_of(s, a.taps, channel), memory, a.table, t, sync);
  UNROLL
  for (int e = 0; e < P::E; e++) spectrum.put(e, t, x[e]);
  sync();

  const int low = s.batch * slice / s.slices, high = s.batch * (slice + 1) / s.slices;
  for (int b = low; b < high; b++) {
    L u(a.u, b, channel), pre(a.pre, b, channel), post(a.post, b, channel), y(a.y, b, channel);
    load_row<P>(x, u, pre, n, memory, a.table, t, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) x[e] = times(x[e], spectrum.get(e, t));
    restore_row<P>(x, memory, a.table, t, sync);
    if (a.skip) {
      const float skip = a.skip[channel];
      for_each<P>(t, n < out ? n : out, [&](int e, int i) {
        x[e].re = multiply_add(skip, pre.there() ? pre[i] * u[i] : u[i], x[e].re);
      });
    }
    if (post.there()) for_each<P>(t, out, [&](int e, int i) { x[e].re *= post[i]; });
    for_each<P>(t, out, [&](int e, int i) { y.put(i, x[e].re); });
  }
}

struct Gradient {
  fa_conv_shape shape;
  fa_tensor u, pre, post, dy, du, dpre, dpost;
  const float *taps, *skip;
  float *dtaps, *dskip;
  const float4 *table;
  float2 *workspace;  // where spectra do not fit into shared memory
};

// The taps whose gradient's spectrum is `sum`, numbers of which a thread has written itself.
template <class P, class Numbers, class Sync>
DEVICE void store_taps(Complex *x, const fa_conv_shape &s, const Numbers &sum, float *to, int count,
                       float2 *memory, const float4 *table, int t, Sync sync) {
  using W = Row<P>;
  UNROLL
  for (int e = 0; e < P::E; e++) {
    Complex total = sum.get(e, t);
    x[e] = {total.re / P::N, s.mirrored ? -total.im / P::N : total.im / P::N};
  }
  W::inverse(x, memory, table, t, sync);
  const int first = s.first;
  W::twists(table, t, [&](int e, Complex w) {
    const Complex tap = times(x[e], w);
    int ahead = W::index(t, e) - first, behind = ahead - P::N;
    if (ahead >= 0 && ahead < count) to[ahead] = tap.re;
    if (behind >= 0 && behind < count) to[behind] = -tap.im;
  });
}

// One group of threads. `memory` as above; `add` sums a number over the group. Of a plan with parts
// the gradient of taps is left out. Between two transforms is a barrier, unless the second is the
// inverse of what the first left, or begins where an inverse has ended.
template <class P, class T, bool UNIT, class Sum, class Input, class Numbers, class Sync, class Add>
DEVICE void gradients(const Gradient &a, int64_t channel, int64_t slice, int thread, float2 *memory,
                      Sum sum, Input input, Numbers spectrum, Sync sync, Add add) {
  using W = Row<P>;
  using L = Line<T, UNIT>;
  const fa_conv_shape &s = a.shape;
  const bool active = channel < s.channels;
  if (!active) channel = s.channels - 1;
  const int n = s.n, out = s.out, written = active ? n : 0, written_out = active ? out : 0;
  const bool of_input = a.du.data || a.dpre.data, of_taps = P::PARTS == 1 && a.dtaps;
  int t = unknown(thread);
  Complex x[P::E];
  if (of_input || a.dpost.data) {
    spectrum_of<P>(x, s, taps_of(s, a.taps, channel), memory, a.table, t, sync);
    UNROLL
    for (int e = 0; e < P::E; e++) spectrum.put(e, t, x[e]);
    sync();
  }
  if (of_taps) {
    UNROLL
    for (int e = 0; e < P::E; e++) sum.put(e, t, {0.f, 0.f});
  }

  const float skip = a.skip ? a.skip[channel] : 0.f;
  float dskip = 0.f;
  const int low = s.batch * slice / s.slices, high = s.batch * (slice + 1) / s.slices;
  for (int b = low; b < high; b++) {
    t = unknown(thread);
    L u(a.u, b, channel), pre(a.pre, b, channel), post(a.post, b, channel), dy(a.dy, b, channel);
    auto gated = [&](int i) { return pre.there() ? pre[i] * u[i] : u[i]; };
    auto upstream = [&](int i) { return post.there() ? post[i] * dy[i] : dy[i]; };

    if (of_taps || a.dpost.data) {
      load_row<P>(x, u, pre, n, memory, a.table, t, sync);
      if (of_taps) {
        UNROLL
        for (int e = 0; e < P::E; e++) input.put(e, t, x[e]);
      }
      if (L dpost(a.dpost, b, channel); dpost.there()) {
        UNROLL
        for (int e = 0; e < P::E; e++) x[e] = times(x[e], spectrum.get(e, t));
        restore_row<P>(x, memory, a.table, t, sync);
        if (a.skip)
          for_each<P>(t, n < written_out ? n : written_out,
                      [&](int e, int i) { x[e].re = multiply_add(skip, gated(i), x[e].re); });
        for_each<P>(t, written_out, [&](int e, int i) { dpost.put(i, dy[i] * x[e].re); });
      } else {
        sync();
      }
    }
    t = unknown(thread);
    if (of_taps || of_input) load_row<P>(x, dy, post, out, memory, a.table, t, sync);
    if (of_taps) {
      UNROLL
      for (int e = 0; e < P::E; e++) {
        Complex product = conjugate_times(input.get(e, t), x[e]), total = sum.get(e, t);
        sum.put(e, t, {total.re + product.re, total.im + product.im});
      }
    }
    if (of_input) {
      UNROLL
      for (int e = 0; e < P::E; e++) x[e] = conjugate_times(spectrum.get(e, t), x[e]);
      restore_row<P>(x, memory, a.table, t, sync);
      if (a.skip)
        for_each<P>(t, written < out ? written : out,
                    [&](int e, int i) { x[e].re = multiply_add(skip, upstream(i), x[e].re); });
      if (L dpre(a.dpre, b, channel); dpre.there())
        for_each<P>(t, written, [&](int e, int i) { dpre.put(i, u[i] * x[e].re); });
      if (L du(a.du, b, channel); du.there()) {
        if (pre.there()) for_each<P>(t, written, [&](int e, int i) { x[e].re *= pre[i]; });
        for_each<P>(t, written, [&](int e, int i) { du.put(i, x[e].re); });
      }
    } else {
      sync();
    }
    if (a.dskip)
      for_each<P>(t, n < out ? n : out,
                  [&](int, int i) { dskip = multiply_add(gated(i), upstream(i), dskip); });
  }

  const int64_t row = slice * s.channels + channel;
  if (of_taps) {
    sync();
    store_taps<P>(x, s, sum, a.dtaps + row * s.count, active ? (int)s.count : 0, memory, a.table, t,
                  sync);
  }
  if (a.dskip) {
    dskip = add(dskip);
    if (t == 0 && active) a.dskip[row] = dskip;
  }
}

}  // namespace fastattn
