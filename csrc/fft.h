// The stages of a Fourier transform, in registers: of numbers (a GPU) or of vectors (a CPU).
//
// A row of N complex numbers is a polynomial; its transform is its value at the N roots of
// x^N = i. The forward transform goes down a tree: the remainder modulo x^2M - c^2 leaves those
// modulo x^M - c and x^M + c, which is a butterfly a + cb, a - cb, six multiply-adds, with a c that
// every pair of a node shares. What would be a twist of the input by exp(i pi n / 2N) is part of
// the c. Values come out in the order of the leaves, which the inverse, decimation in time,
// takes as they are; it leaves the row times exp(i pi n / 2N), which `untwisted` takes away.
//
// A stage is a tree of R leaves in registers. R - 1 different c are R / 2 and their products with
// i: of a node's angle a, exp(i a / 2), then exp(i a / 4), then exp(i a / 8) times 2 constants, and
// so on. The first stage of each direction has constants alone, of others a table has R / 2
// numbers a node (forward), or a place in a node (inverse).
#pragma once

#include "device.h"

namespace fastattn {

constexpr double PI = 3.14159265358979323846;

// Of an angle below 2 pi, by Taylor's series.
ANYWHERE double sine(double x) {
  double term = x, sum = x;
  for (int i = 1; i < 30; i++) {
    term *= -x * x / ((2 * i) * (2 * i + 1));
    sum += term;
  }
  return sum;
}

ANYWHERE double cosine(double x) {
  double term = 1, sum = 1;
  for (int i = 1; i < 30; i++) {
    term *= -x * x / ((2 * i - 1) * (2 * i));
    sum += term;
  }
  return sum;
}

ANYWHERE int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

ANYWHERE int reversed(int bits, int count) {
  int found = 0;
  for (int i = 0; i < count; i++) found |= (bits >> i & 1) << (count - 1 - i);
  return found;
}

// What c number `index` of a stage is times exp(i a / 2^level), as an angle. Number 0 is level 1's,
// number 2^(level - 2) + q level's from 2 on.
ANYWHERE int level_of(int index) { return index == 0 ? 1 : 2 + log2_of(index); }

ANYWHERE double turned_by(int index, bool inverse) {
  if (index < 2) return 0;
  int level = level_of(index), q = index - (1 << (level - 2));
  int of_level = 1 << level;  // of a whole turn
  return 2 * PI * (inverse ? -q : reversed(q, level - 2)) / of_level;
}

template <class F>
struct ComplexOf {
  F re, im;
};
using Complex = ComplexOf<float>;

// a + wb and a - wb; w is 1 where ONE.
template <bool ONE, class F>
DEVICE void butterfly(ComplexOf<F> &a, ComplexOf<F> &b, Complex w) {
  ComplexOf<F> sum;
  if (ONE) {
    sum = {a.re + b.re, a.im + b.im};
    b = {a.re - b.re, a.im - b.im};
  } else {
    sum.re = multiply_add(-w.im, b.im, multiply_add(w.re, b.re, a.re));
    sum.im = multiply_add(w.im, b.re, multiply_add(w.re, b.im, a.im));
    b = {multiply_add(2.f, a.re, -sum.re), multiply_add(2.f, a.im, -sum.im)};
  }
  a = sum;
}

// The c of a stage: constants, of the angle 90 degrees (forward) or 0 (inverse) ...
template <bool INVERSE>
struct Constants {
  static constexpr bool CONSTANT = true;
};

// ... or R / 2 loaded numbers.
template <int R>
struct Loaded {
  static constexpr bool CONSTANT = false;
  Complex c[R / 2];
};

template <int INDEX, bool INVERSE>
struct Constant {
  static constexpr double ANGLE =
      (INVERSE ? 0 : PI / 2 / (1 << level_of(INDEX))) + turned_by(INDEX, INVERSE);
  static constexpr float RE = (float)cosine(ANGLE), IM = (float)sine(ANGLE);
  static constexpr bool ONE = INVERSE && INDEX < 2;
};

// One level of a stage: pairs of a node are R / 2^LEVEL apart (forward), of a place 2^(LEVEL - 1).
template <int R, int LEVEL, bool INVERSE, int PAIR, class F, class C>
DEVICE void pair_of(ComplexOf<F> *x, const C &c) {
  constexpr int APART = INVERSE ? 1 << (LEVEL - 1) : R >> LEVEL;
  constexpr int BLOCK = PAIR / APART, PLACE = PAIR % APART;
  constexpr int FIRST = BLOCK * 2 * APART + PLACE;
  constexpr int WHICH = INVERSE ? PLACE : BLOCK;  // of 2^(LEVEL - 1) numbers
  constexpr int HALF = LEVEL == 1 ? 1 : 1 << (LEVEL - 2);
  constexpr bool TURNED = LEVEL > 1 && (INVERSE ? WHICH >= HALF : WHICH % 2 == 1);
  constexpr int Q = LEVEL == 1 ? 0 : INVERSE ? WHICH % HALF : WHICH / 2;
  constexpr int INDEX = LEVEL == 1 ? 0 : HALF + Q;
  Complex w;
  constexpr bool ONE = C::CONSTANT && Constant<INDEX, INVERSE>::ONE;
  if constexpr (C::CONSTANT)
    w = {Constant<INDEX, INVERSE>::RE, Constant<INDEX, INVERSE>::IM};
  else
    w = c.c[INDEX];
  if (TURNED && ONE) {  // a - ib and a + ib
    ComplexOf<F> b = x[FIRST + APART];
    x[FIRST + APART] = {b.im, -b.re};
    butterfly<true>(x[FIRST], x[FIRST + APART], w);
  } else {
    if (TURNED) w = INVERSE ? Complex{w.im, -w.re} : Complex{-w.im, w.re};
    butterfly<ONE>(x[FIRST], x[FIRST + APART], w);
  }
}

template <int R, int LEVEL, bool INVERSE, int PAIR, class F, class C>
DEVICE void level_of_stage(ComplexOf<F> *x, const C &c) {
  if constexpr (PAIR < R / 2) {
    pair_of<R, LEVEL, INVERSE, PAIR>(x, c);
    level_of_stage<R, LEVEL, INVERSE, PAIR + 1>(x, c);
  }
}

// The first level of a row of real numbers.
template <int R, class F>
DEVICE void level_of_reals(ComplexOf<F> *x) {
  constexpr float RE = Constant<0, false>::RE, IM = Constant<0, false>::IM;
  UNROLL
  for (int i = 0; i < R / 2; i++) {
    F a = x[i].re, b = x[i + R / 2].re;
    x[i] = {multiply_add(RE, b, a), IM * b};
    x[i + R / 2] = {multiply_add(-RE, b, a), -IM * b};
  }
}

template <int R, bool INVERSE, int LEVEL = 1, class F, class C>
DEVICE void stage(ComplexOf<F> *x, const C &c) {
  if constexpr ((1 << LEVEL) <= R) {
    level_of_stage<R, LEVEL, INVERSE, 0>(x, c);
    stage<R, INVERSE, LEVEL + 1>(x, c);
  }
}

}  // namespace fastattn
