// A row's transform by a group of T threads, E numbers each: which thread has which numbers when.
//
// Stage s of a plan takes blocks of B numbers, one node each, and leaves R blocks of B / R. Its
// units are R numbers S = B / R apart; thread t has the units t, t + T, ... In memory numbers stand
// in their order, with a gap behind every PAD. A thread writes where it has read, so that a stage
// costs one barrier.
#pragma once

#ifndef __CUDACC__
#include "emulated.h"
#endif
#include "fft.h"

namespace fastattn {

// Radices multiply to N and divide E. FORWARD and BACKWARD: how many threads shall run on a
// multiprocessor at a time, which is to say how many registers each of them has.
template <int N_, int E_, int PAD_, int FORWARD_, int BACKWARD_, int... RADICES>
struct Plan {
  static constexpr int N = N_, E = E_, PAD = PAD_, T = N / E;
  static constexpr int FORWARD = FORWARD_, BACKWARD = BACKWARD_;
  static constexpr int STAGES = sizeof...(RADICES);
  static constexpr int PARTS = N > 4096 ? N / 4096 : 1;  // of the taps' gradient: conv_parts.cuh
  static ANYWHERE int radix(int stage) {
    const int all[] = {RADICES...};
    return all[stage];
  }
};

template <class P, int STAGE>
struct Stage {
  static ANYWHERE int block() {
    int size = P::N;
    for (int i = 0; i < STAGE; i++) size /= P::radix(i);
    return size;
  }
  static constexpr int R = P::radix(STAGE), B = block(), S = B / R, GROUPS = P::E / R,
                       NODES = P::N / B;
  static_assert(P::E % R == 0 && (S % P::PAD == 0 || P::PAD % S == 0), "see Stage::at");

  static ANYWHERE int unit(int t, int g) { return t + P::T * g; }
  static DEVICE int node(int unit) { return unit / S; }
  static DEVICE int place(int unit) { return unit % S; }
  // Where number r of a unit stands: `first` and a constant.
  static DEVICE int first(int unit) {
    int at = node(unit) * B + place(unit);
    return at + at / P::PAD;
  }
  static ANYWHERE int behind(int r) { return S * r + S * r / P::PAD; }

  template <bool INVERSE>
  static DEVICE Loaded<R> load(const float4 *table, int unit) {
    constexpr int COUNT = INVERSE ? S : NODES;
    int at = INVERSE ? place(unit) : node(unit);
    Loaded<R> c;
    UNROLL
    for (int v = 0; v < R / 4; v++) {
      [[maybe_unused]] float4 two = table[v * COUNT + at];
      c.c[2 * v] = {two.x, two.y};
      c.c[2 * v + 1] = {two.z, two.w};
    }
    return c;
  }

  static DEVICE void write(const Complex *x, float2 *memory, int t) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      float2 *to = memory + first(unit(t, g));
      UNROLL
      for (int r = 0; r < R; r++) to[behind(r)] = make_float2(x[g * R + r].re, x[g * R + r].im);
    }
  }

  static DEVICE void read(Complex *x, const float2 *memory, int t) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      const float2 *from = memory + first(unit(t, g));
      UNROLL
      for (int r = 0; r < R; r++) {
        float2 both = from[behind(r)];
        x[g * R + r] = {both.x, both.y};
      }
    }
  }

  template <bool INVERSE, bool PART = false>
  static DEVICE void run(Complex *x, const float4 *table, int t) {
    UNROLL
    for (int g = 0; g < GROUPS; g++) {
      if constexpr (INVERSE ? STAGE == P::STAGES - 1 : STAGE == 0 && !PART)
        stage<R, INVERSE>(x + g * R, Constants<INVERSE>());
      else
        stage<R, INVERSE>(x + g * R, load<INVERSE>(table, unit(t, g)));
    }
  }
};

// Where the numbers of a plan's stages begin in its table, in float4, and how many there are: first
// those of forward stages, then of inverse ones, then exp(-i pi t / 2N) for every thread, two in
// each.
template <class P>
struct Table {
  static ANYWHERE int nodes(int stage) {
    int count = 1;
    for (int i = 0; i < stage; i++) count *= P::radix(i);
    return count;
  }
  static ANYWHERE int places(int stage) { return P::N / nodes(stage + 1); }
  static ANYWHERE int forward(int stage) {
    int at = 0;
    for (int i = 1; i < stage; i++) at += P::radix(i) / 4 * nodes(i);
    return at;
  }
  static ANYWHERE int inverse(int stage) {
    int at = forward(P::STAGES);
    for (int i = 0; i < stage; i++) at += P::radix(i) / 4 * places(i);
    return at;
  }
  static constexpr int TWIST = inverse(P::STAGES - 1), COUNT = TWIST + P::T / 2;
};

// The table of a part of a row, P being the part's plan: powers of the c that x^N is, then the
// numbers of all forward stages.
template <class P>
struct PartTable {
  static constexpr int POWERS = 4;
  static ANYWHERE int forward(int stage) {
    return POWERS / 2 + (stage > 0 ? P::radix(0) / 4 + Table<P>::forward(stage) : 0);
  }
  static constexpr int COUNT = forward(P::STAGES);
};

template <class P>
struct Row {
  static constexpr int N = P::N, E = P::E, T = P::T, STAGES = P::STAGES;
  static constexpr int MEMORY = N + N / P::PAD;  // float2

  // Number e of thread t: which of the row before the forward and after the inverse transform.
  static ANYWHERE int index(int t, int e) {
    using First = Stage<P, 0>;
    return First::unit(t, e / First::R) + First::S * (e % First::R);
  }

  // Which leaf number e of thread t is after the forward and before the inverse transform.
  static ANYWHERE int leaf(int t, int e) {
    using Last = Stage<P, STAGES - 1>;
    return Last::unit(t, e / Last::R) * Last::R + e % Last::R;
  }

  // Of a PART `table` is a PartTable.
  template <bool REAL, bool PART = false, int STAGE = 0, class Sync>
  static DEVICE void forward(Complex *x, float2 *memory, const float4 *table, int t, Sync sync) {
    using S = Stage<P, STAGE>;
    if constexpr (STAGE > 0) {
      sync();
      S::read(x, memory, t);
    }
    if constexpr (STAGE == 0 && REAL) {
      UNROLL
      for (int g = 0; g < S::GROUPS; g++) {
        level_of_reals<S::R>(x + g * S::R);
        fastattn::stage<S::R, false, 2>(x + g * S::R, Constants<false>());
      }
    } else {
      constexpr int AT = PART ? PartTable<P>::forward(STAGE) : Table<P>::forward(STAGE);
      S::template run<false, PART>(x, table + AT, t);
    }
    if constexpr (STAGE + 1 < STAGES) {
      S::write(x, memory, t);
      forward<REAL, PART, STAGE + 1>(x, memory, table, t, sync);
    }
  }

  template <int STAGE = STAGES - 1, class Sync>
  static DEVICE void inverse(Complex *x, float2 *memory, const float4 *table, int t, Sync sync) {
    using S = Stage<P, STAGE>;
    if constexpr (STAGE + 1 < STAGES) {
      sync();
      S::read(x, memory, t);
    }
    S::template run<true>(x, table + Table<P>::inverse(STAGE), t);
    if constexpr (STAGE > 0) {
      S::write(x, memory, t);
      inverse<STAGE - 1>(x, memory, table, t, sync);
    }
  }

  // f(e, exp(-i pi n / 2N)) for every number e of thread t, whose index is n: that of t, times
  // constants.
  template <class F>
  static DEVICE void twists(const float4 *table, int t, F f) {
    const float2 of_t = reinterpret_cast<const float2 *>(table + Table<P>::TWIST)[t];
    twists<0>(Complex{of_t.x, of_t.y}, f);
  }

 private:
  template <int e, class F>
  static DEVICE void twists(Complex of_t, F f) {
    if constexpr (e < E) {
      constexpr double ANGLE = PI / 2 * index(0, e) / N;
      constexpr float RE = (float)cosine(ANGLE), IM = -(float)sine(ANGLE);
      if constexpr (e == 0)
        f(0, of_t);
      else
        f(e, Complex{multiply_add(-IM, of_t.im, RE * of_t.re),
                     multiply_add(RE, of_t.im, IM * of_t.re)});
      twists<e + 1>(of_t, f);
    }
  }
};

}  // namespace fastattn
