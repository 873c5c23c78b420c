// The gradient of the taps of rows whose sum of spectra would not stay on the chip: in parts.
//
// The first levels of the tree cut a row into P::PARTS polynomials of M = N / PARTS numbers, each
// modulo x^M = c of its own, the remainder being sum_q c^q x_(j + qM). A group of threads has one
// part of a channel, of which it sums conj(U) Y over the samples of a slice: no part needs another
// until the sum is transformed back, which `finish_taps` does. Rows are read PARTS times, by groups
// that run at a time.
#pragma once

#include "conv.cuh"
#include "plans.h"

namespace fastattn {

// A row that all threads of a group read: where elements are of 16 bits by way of shared memory,
// into which it is fetched while they transform another; else where it is.
template <class P, class T>
struct FetchedRow {
  static constexpr bool AHEAD = sizeof(T) == 2;
  static constexpr int BYTES = AHEAD ? P::N * (int)sizeof(T) : 0;
  T *at;
  DEVICE FetchedRow(void *memory) : at(static_cast<T *>(memory)) {}

  // Nobody may be reading the one before.
  DEVICE void fetch(const Line<T, true> &row, int n, int t) {
    if constexpr (AHEAD) {
      constexpr int TOGETHER = 16 / sizeof(T), THREADS = PartOf<P>::T;
      const int whole = (uintptr_t)row.at % 16 == 0 ? n / TOGETHER : 0;
      for (int i = t; i < whole; i += THREADS) copy_ahead(at + i * TOGETHER, row.at + i * TOGETHER);
      for (int i = whole * TOGETHER + t; i < n; i += THREADS) at[i] = row.at[i];
    } else {
      at = row.at;
    }
  }
  template <class Sync>
  DEVICE void wait(Sync sync) const {
    if constexpr (AHEAD) {
      copies_have_arrived();
      sync();
    }
  }
  DEVICE float operator[](int i) const { return to_float(at[i]); }
};

// The remainder that a part is, of a row's n inputs, gated; `table` is the part's.
template <class P, class T>
DEVICE void remainder(Complex *x, const FetchedRow<P, T> &row, const Line<T, true> &gate, int n,
                      const float4 *table, int t) {
  using M = PartOf<P>;
  Complex c[P::PARTS];
  const float2 *powers = reinterpret_cast<const float2 *>(table);
  UNROLL
  for (int q = 1; q < P::PARTS; q++) c[q] = number(powers, q);
  auto add = [&](auto inside) {
    UNROLL
    for (int e = 0; e < M::E; e++) {
      UNROLL
      for (int q = 0; q < P::PARTS; q++) {
        const int i = Row<M>::index(t, e) + q * M::N;
        float value = inside(i) ? row[i] : 0.f;
        if (gate.there()) value *= inside(i) ? gate[i] : 0.f;
        if (q == 0)
          x[e] = {value, 0.f};
        else
          x[e] = {multiply_add(c[q].re, value, x[e].re), multiply_add(c[q].im, value, x[e].im)};
      }
    }
  };
  if (n == P::N)
    add([](int) { return true; });
  else
    add([n](int i) { return i < n; });
}

// One group of PartOf<P>::T threads. `memory` has Row<PartOf<P>>::MEMORY float2; `to` gets N
// numbers of all parts, in the order of the leaves.
template <class P, class T, class Sum, class Numbers, class Sync>
DEVICE void correlate_part(const Gradient &a, int64_t channel, int64_t slice, int part, int t,
                           float2 *memory, float2 *to, Sum sum, Numbers input, FetchedRow<P, T> row,
                           Sync sync) {
  using M = PartOf<P>;
  using L = Line<T, true>;
  const fa_conv_shape &s = a.shape;
  const int n = s.n, out = s.out;
  const float4 *table = a.table + Table<P>::COUNT + part * PartTable<M>::COUNT;
  Complex x[M::E];
  UNROLL
  for (int e = 0; e < M::E; e++) sum.put(e, t, {0.f, 0.f});
  const int low = s.batch * slice / s.slices, high = s.batch * (slice + 1) / s.slices;
  if (low < high) row.fetch(L(a.u, low, channel), n, t);
  for (int b = low; b < high; b++) {
    row.wait(sync);
    remainder<P>(x, row, L(a.pre, b, channel), n, table, t);
    sync();
    row.fetch(L(a.dy, b, channel), out, t);
    Row<M>::template forward<false, true>(x, memory, table, t, sync);
    UNROLL
    for (int e = 0; e < M::E; e++) input.put(e, t, x[e]);
    row.wait(sync);
    remainder<P>(x, row, L(a.post, b, channel), out, table, t);
    sync();
    if (b + 1 < high) row.fetch(L(a.u, b + 1, channel), n, t);
    Row<M>::template forward<false, true>(x, memory, table, t, sync);
    UNROLL
    for (int e = 0; e < M::E; e++) {
      Complex product = conjugate_times(input.get(e, t), x[e]), total = sum.get(e, t);
      sum.put(e, t, {total.re + product.re, total.im + product.im});
    }
  }
  to += part * M::N;
  UNROLL
  for (int e = 0; e < M::E; e++) {
    Complex total = sum.get(e, t);
    to[Row<M>::leaf(t, e)] = make_float2(total.re, total.im);
  }
}

// Numbers in the order of the leaves.
template <class P>
struct InOrder {
  const float2 *at;
  DEVICE Complex get(int e, int t) const { return number(at, Row<P>::leaf(t, e)); }
};

// One group of P::T threads: the taps of a slice of a channel from the sum of all parts.
template <class P, class Sync>
DEVICE void finish_taps(const Gradient &a, int64_t channel, int64_t slice, int t, float2 *memory,
                        const float2 *from, Sync sync) {
  const fa_conv_shape &s = a.shape;
  Complex x[P::E];
  store_taps<P>(x, s, InOrder<P>{from}, a.dtaps + (slice * s.channels + channel) * s.count,
                (int)s.count, memory, a.table, t, sync);
}

}  // namespace fastattn
