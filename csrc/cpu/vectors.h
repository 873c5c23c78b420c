// Vectors whose lanes are rows, and complex numbers of them. Everything from here on is compiled
// for AVX2 where there is x86-64; what calls it has asked the processor.
#pragma once

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC target("avx2,fma")
#endif
#endif

#include "device.h"

namespace fastattn {

#if defined(__GNUC__)
constexpr int LANES = 8;
typedef float V __attribute__((vector_size(4 * LANES)));
#else
constexpr int LANES = 1;
struct V {
  float x;
  float &operator[](int) { return x; }
  float operator[](int) const { return x; }
};
inline V operator+(V a, V b) { return {a.x + b.x}; }
inline V operator-(V a, V b) { return {a.x - b.x}; }
inline V operator-(V a) { return {-a.x}; }
inline V operator*(V a, V b) { return {a.x * b.x}; }
inline V operator*(float a, V b) { return {a * b.x}; }
#endif

// a b + c; a compiler may round it once.
inline V multiply_add(float a, V b, V c) { return a * b + c; }

}  // namespace fastattn

#include "fft.h"

namespace fastattn {

using Number = ComplexOf<V>;

inline Number times(Number a, Number b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

inline Number conjugate_times(Number a, Number b) {
  return {a.re * b.re + a.im * b.im, a.re * b.im - a.im * b.re};
}

}  // namespace fastattn
