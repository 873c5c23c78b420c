// Elements of rows of any type, to and from float32.
#pragma once

#include <cmath>
#include <cstring>

#include "fastattn/fft_conv.h"

namespace fastattn {

// An element of any type.
static float get(fa_type type, const void *x, int64_t i) {
  if (type == FA_FLOAT32) return static_cast<const float *>(x)[i];
  uint32_t bits = static_cast<const uint16_t *>(x)[i];
  float found;
  if (type == FA_BFLOAT16) {
    bits <<= 16;
  } else {  // float16
    uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 0) {
      found = std::ldexp((float)mantissa, -24);
      return sign ? -found : found;
    }
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
  }
  std::memcpy(&found, &bits, 4);
  return found;
}

// To the nearest, ties to even.
static void put(fa_type type, void *to, int64_t i, float x) {
  if (type == FA_FLOAT32) {
    static_cast<float *>(to)[i] = x;
    return;
  }
  uint32_t bits, found;
  std::memcpy(&bits, &x, 4);
  uint32_t size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (type == FA_BFLOAT16) {
    found = size > 0x7f800000 ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  } else if (size > 0x7f800000) {  // NaN
    found = sign | 0x7e00;
  } else if (size >= 0x477ff000) {  // rounds to infinity
    found = sign | 0x7c00;
  } else if (size < 0x38800000) {  // below the least normal number
    found = sign | (uint32_t)std::nearbyint(std::ldexp(std::fabs(x), 24));
  } else {
    found = sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  }
  static_cast<uint16_t *>(to)[i] = (uint16_t)found;
}

}  // namespace fastattn
