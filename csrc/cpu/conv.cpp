// Convolutions on a CPU: the transform of cuda/row.cuh, of LANES rows side by side in vectors.
//
// Rows never meet: a lane is a row. Lanes are channels, which each have taps, or where there are
// few channels samples of one. A block of a tree is transformed whole before the next, so that what
// is small stays in the cache.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "fastattn/fft_conv.h"

#if defined(__x86_64__)  // bindings.cpp asks the processor before it calls anything here
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

// The roots of a transform of N = 2^bits numbers, in stages of radix 16 and a last one.
class Transform {
 public:
  explicit Transform(int64_t n) : n_(n) {
    for (int64_t rest = n; rest > 1;) {
      int radix = rest >= 16 ? 16 : (int)rest;
      radices_.push_back(radix);
      rest /= radix;
    }
    int64_t nodes = 1;
    for (int radix : radices_) {
      int64_t places = n / nodes / radix;
      std::vector<Complex> forward(nodes * radix / 2 + 1), inverse(places * radix / 2 + 1);
      for (int64_t node = 0; node < nodes; node++)
        fill(&forward[node * (radix / 2)], radix, (PI / 2 + 2 * PI * order(node, nodes)) / nodes,
             false);
      for (int64_t place = 0; place < places; place++)
        fill(&inverse[place * (radix / 2)], radix, -2 * PI * place / places, true);
      forward_.push_back(std::move(forward));
      inverse_.push_back(std::move(inverse));
      nodes *= radix;
    }
    twist_.resize(n);
    for (int64_t i = 0; i < n; i++) twist_[i] = unit(-PI * i / (2 * n));
  }

  int64_t size() const { return n_; }
  Complex twist(int64_t i) const { return twist_[i]; }
  void forward(Number *x) const { down(x, 0, 0, n_); }
  void inverse(Number *x) const { up(x, 0, n_); }

 private:
  static Complex unit(double angle) { return {(float)std::cos(angle), (float)std::sin(angle)}; }

  static int64_t order(int64_t node, int64_t nodes) {  // bits reversed
    int64_t found = 0;
    for (; nodes > 1; nodes /= 2, node /= 2) found = 2 * found + node % 2;
    return found;
  }

  static void fill(Complex *c, int radix, double angle, bool inverse) {
    for (int i = 0; i < radix / 2; i++)
      c[i] = unit(angle / (1 << level_of(i)) + turned_by(i, inverse));
  }

  template <int R, bool INVERSE>
  static void butterflies(Number *x, int64_t apart, const Complex *c, int64_t step) {
    for (int64_t place = 0; place < apart; place++) {
      Number each[R];
      for (int r = 0; r < R; r++) each[r] = x[place + apart * r];
      Loaded<R> loaded;
      std::memcpy(loaded.c, c + place * step, sizeof loaded.c);
      stage<R, INVERSE>(each, loaded);
      for (int r = 0; r < R; r++) x[place + apart * r] = each[r];
    }
  }

  template <bool INVERSE>
  static void level(int radix, Number *x, int64_t apart, const Complex *c, int64_t step) {
    if (radix == 16) return butterflies<16, INVERSE>(x, apart, c, step);
    if (radix == 8) return butterflies<8, INVERSE>(x, apart, c, step);
    if (radix == 4) return butterflies<4, INVERSE>(x, apart, c, step);
    return butterflies<2, INVERSE>(x, apart, c, step);
  }

  void down(Number *x, size_t stage, int64_t node, int64_t block) const {
    if (stage == radices_.size()) return;
    int radix = radices_[stage];
    int64_t apart = block / radix;
    level<false>(radix, x, apart, &forward_[stage][node * (radix / 2)], 0);
    if (apart > 1)
      for (int r = 0; r < radix; r++) down(x + r * apart, stage + 1, node * radix + r, apart);
  }

  void up(Number *x, size_t stage, int64_t block) const {
    if (stage == radices_.size()) return;
    int radix = radices_[stage];
    int64_t apart = block / radix;
    if (apart > 1)
      for (int r = 0; r < radix; r++) up(x + r * apart, stage + 1, apart);
    level<true>(radix, x, apart, inverse_[stage].data(), radix / 2);
  }

  int64_t n_;
  std::vector<int> radices_;
  std::vector<std::vector<Complex>> forward_, inverse_;
  std::vector<Complex> twist_;
};

static std::shared_ptr<const Transform> transform_of(int64_t n) {
  static std::mutex mutex;
  static std::map<int64_t, std::shared_ptr<const Transform>> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto &found = known[n];
  if (!found) found = std::make_shared<const Transform>(n);
  return found;
}

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

// Which rows the lanes of one call to the transform are.
struct Lanes {
  int64_t sample[LANES], channel[LANES];
  int count;  // others hold zeros
};

// Element i of every lane's row of x, of `length` there; zero where x is absent and behind the end.
static void load(fa_type type, const fa_tensor &x, const Lanes &lanes, int64_t length, V *to) {
  std::memset(static_cast<void *>(to), 0, length * sizeof(V));
  for (int l = 0; l < lanes.count; l++) {
    int64_t first = lanes.sample[l] * x.b + lanes.channel[l] * x.c;
    if (type == FA_FLOAT32) {
      const float *from = static_cast<const float *>(x.data) + first;
      for (int64_t i = 0; i < length; i++) to[i][l] = from[i * x.n];
    } else {
      for (int64_t i = 0; i < length; i++) to[i][l] = get(type, x.data, first + i * x.n);
    }
  }
}

static void store(fa_type type, const fa_tensor &x, const Lanes &lanes, int64_t length,
                  const V *from) {
  for (int l = 0; l < lanes.count; l++) {
    int64_t first = lanes.sample[l] * x.b + lanes.channel[l] * x.c;
    if (type == FA_FLOAT32) {
      float *to = static_cast<float *>(x.data) + first;
      for (int64_t i = 0; i < length; i++) to[i * x.n] = from[i][l];
    } else {
      for (int64_t i = 0; i < length; i++) put(type, x.data, first + i * x.n, from[i][l]);
    }
  }
}

// Numbers of zero, aligned for vectors, which std::vector's are not.
template <class T>
class Array {
 public:
  explicit Array(int64_t size = 0) { resize(size); }
  Array(const Array &) = delete;
  Array(Array &&other) : at_(std::move(other.at_)), size_(other.size_) {}
  Array &operator=(const Array &other) {
    resize(other.size_);
    if (size_) std::memcpy(static_cast<void *>(at_.get()), other.at_.get(), size_ * sizeof(T));
    return *this;
  }
  void resize(int64_t size) {
    if (size != size_) {
      at_.reset(size ? static_cast<T *>(::operator new(size * sizeof(T), ALIGNED)) : nullptr);
      size_ = size;
      if (size) clear();
    }
  }
  void clear() { std::memset(static_cast<void *>(at_.get()), 0, size_ * sizeof(T)); }
  T &operator[](int64_t i) { return at_.get()[i]; }
  const T &operator[](int64_t i) const { return at_.get()[i]; }
  T *data() { return at_.get(); }
  T *begin() { return at_.get(); }
  T *end() { return at_.get() + size_; }

 private:
  static constexpr std::align_val_t ALIGNED{64};
  struct Delete {
    void operator()(T *x) const { ::operator delete(x, ALIGNED); }
  };
  std::unique_ptr<T, Delete> at_;
  int64_t size_ = 0;
};

// What a thread works with, for one shape.
class Worker {
 public:
  Worker(const fa_conv_shape &shape, const float *taps, const float *skip)
      : s_(shape),
        transform_(transform_of(shape.length)),
        taps_(taps),
        skip_(skip),
        spectrum_(shape.length),
        x_(shape.length),
        line_(shape.length),
        gate_(shape.length) {}

  void set_taps(const Lanes &lanes) {
    int64_t n = s_.length;
    spectrum_.clear();
    skip_lanes_ = V{};
    for (int l = 0; l < lanes.count; l++) {
      const float *taps = taps_ + lanes.channel[l] / s_.group * s_.count;
      for (int64_t t = 0; t < s_.count; t++) {
        int64_t lag = s_.first + t;
        (lag >= 0 ? spectrum_[lag].re : spectrum_[lag + n].im)[l] =
            (lag >= 0 ? taps[t] : -taps[t]) / n;
      }
      if (skip_) skip_lanes_[l] = skip_[lanes.channel[l]];
    }
    transform_->forward(spectrum_.data());
    if (s_.mirrored)
      for (Number &k : spectrum_) k.im = -k.im;
  }

  void convolve(const Lanes &lanes, const fa_tensor &u, const fa_tensor &pre, const fa_tensor &post,
                const fa_tensor &y) {
    gated(lanes, u, pre, s_.n, line_);
    transformed(line_, s_.n, x_);
    convolved(line_);
    if (post.data) {
      load(s_.type, post, lanes, s_.out, gate_.data());
      for (int64_t i = 0; i < s_.out; i++) line_[i] = line_[i] * gate_[i];
    }
    store(s_.type, y, lanes, s_.out, line_.data());
  }

  // As cuda/conv.cuh's; sum_ is added to, and written by put_dtaps.
  void gradients(const Lanes &lanes, const fa_tensor &u, const fa_tensor &pre,
                 const fa_tensor &post, const fa_tensor &dy, const fa_tensor &du,
                 const fa_tensor &dpre, const fa_tensor &dpost, bool dtaps, float *dskip) {
    int64_t n = s_.n, out = s_.out, shared = n < out ? n : out;
    for (Array<V> *array : {&input_, &upstream_, &raw_}) array->resize(s_.length);  // once
    gated(lanes, u, pre, n, input_);
    gated(lanes, dy, post, out, upstream_);
    if (dskip)
      for (int l = 0; l < lanes.count; l++) {
        double sum = 0;
        for (int64_t i = 0; i < shared; i++) sum += (double)input_[i][l] * upstream_[i][l];
        dskip[lanes.channel[l]] += (float)sum;
      }
    if (dtaps || dpost.data) {
      transformed(input_, n, x_);
      if (dtaps) inputs_ = x_;
    }
    if (dpost.data) {
      line_ = input_;
      convolved(line_);
      load(s_.type, dy, lanes, out, raw_.data());
      for (int64_t i = 0; i < out; i++) line_[i] = line_[i] * raw_[i];
      store(s_.type, dpost, lanes, out, line_.data());
    }
    if (!dtaps && !du.data && !dpre.data) return;
    transformed(upstream_, out, x_);
    if (dtaps) {
      sum_.resize(s_.length);
      for (int64_t i = 0; i < s_.length; i++) {
        Number product = conjugate_times(inputs_[i], x_[i]);
        sum_[i] = {sum_[i].re + product.re, sum_[i].im + product.im};
      }
    }
    if (!du.data && !dpre.data) return;
    for (int64_t i = 0; i < s_.length; i++) x_[i] = conjugate_times(spectrum_[i], x_[i]);
    untwisted(n, line_);
    if (skip_)
      for (int64_t i = 0; i < shared; i++) line_[i] = line_[i] + skip_lanes_ * upstream_[i];
    if (dpre.data) {
      load(s_.type, u, lanes, n, raw_.data());
      for (int64_t i = 0; i < n; i++) raw_[i] = raw_[i] * line_[i];
      store(s_.type, dpre, lanes, n, raw_.data());
    }
    if (du.data) {
      if (pre.data) {
        load(s_.type, pre, lanes, n, gate_.data());
        for (int64_t i = 0; i < n; i++) line_[i] = line_[i] * gate_[i];
      }
      store(s_.type, du, lanes, n, line_.data());
    }
  }

  // The sums so far, of every lane to its channel.
  void put_dtaps(const Lanes &lanes, float *dtaps) {
    int64_t n = s_.length;
    float scale = 1.f / n, sign = s_.mirrored ? -scale : scale;
    for (int64_t i = 0; i < n; i++) x_[i] = {scale * sum_[i].re, sign * sum_[i].im};
    transform_->inverse(x_.data());
    for (int64_t t = 0; t < s_.count; t++) {
      int64_t lag = s_.first + t, at = lag >= 0 ? lag : lag + n;
      Complex w = transform_->twist(at);
      V value =
          lag >= 0 ? w.re * x_[at].re - w.im * x_[at].im : -(w.re * x_[at].im + w.im * x_[at].re);
      for (int l = 0; l < lanes.count; l++) dtaps[lanes.channel[l] * s_.count + t] += value[l];
    }
    sum_.clear();  // for the next
  }

 private:
  void gated(const Lanes &lanes, const fa_tensor &x, const fa_tensor &gate, int64_t length,
             Array<V> &to) {
    load(s_.type, x, lanes, length, to.data());
    if (!gate.data) return;
    load(s_.type, gate, lanes, length, gate_.data());
    for (int64_t i = 0; i < length; i++) to[i] = to[i] * gate_[i];
  }

  void transformed(const Array<V> &row, int64_t length, Array<Number> &to) {
    for (int64_t i = 0; i < length; i++) to[i] = {row[i], V{}};
    std::memset(static_cast<void *>(to.data() + length), 0, (s_.length - length) * sizeof(Number));
    transform_->forward(to.data());
  }

  // Of x_, the transform of the row: what it is convolved, and the skip.
  void convolved(Array<V> &row) {
    int64_t shared = s_.n < s_.out ? s_.n : s_.out;
    for (int64_t i = 0; i < s_.length; i++) x_[i] = times(x_[i], spectrum_[i]);
    if (skip_) {
      direct_ = row;
      untwisted(s_.out, row);
      for (int64_t i = 0; i < shared; i++) row[i] = row[i] + skip_lanes_ * direct_[i];
    } else {
      untwisted(s_.out, row);
    }
  }

  void untwisted(int64_t length, Array<V> &row) {
    transform_->inverse(x_.data());
    for (int64_t i = 0; i < length; i++) {
      Complex w = transform_->twist(i);
      row[i] = w.re * x_[i].re - w.im * x_[i].im;
    }
  }

  const fa_conv_shape s_;
  std::shared_ptr<const Transform> transform_;
  const float *taps_, *skip_;
  V skip_lanes_;
  Array<Number> spectrum_, x_, inputs_, sum_;
  Array<V> line_, gate_, input_, upstream_, raw_, direct_;
};

// Whether lanes are channels, which each have taps, or samples of one: by how often a set of lanes
// is transformed.
static bool lanes_are_channels(const fa_conv_shape &s) {
  auto sets = [](int64_t x) { return (x + LANES - 1) / LANES; };
  return sets(s.channels) * (1 + 2 * s.batch) <= s.channels * (1 + 2 * sets(s.batch));
}

// How many sets of lanes have taps of their own, and how many sets of rows each of those has.
static int64_t tap_sets(const fa_conv_shape &s) {
  return lanes_are_channels(s) ? (s.channels + LANES - 1) / LANES : s.channels;
}

static int64_t row_sets(const fa_conv_shape &s) {
  return lanes_are_channels(s) ? s.batch : (s.batch + LANES - 1) / LANES;
}

// The lanes of a set of rows.
static Lanes lanes_of(const fa_conv_shape &s, int64_t taps, int64_t rows) {
  Lanes lanes = {};
  auto add = [&](int64_t b, int64_t c) {
    lanes.sample[lanes.count] = b;
    lanes.channel[lanes.count++] = c;
  };
  if (lanes_are_channels(s))
    for (int64_t c = taps * LANES; c < s.channels && lanes.count < LANES; c++) add(rows, c);
  else
    for (int64_t b = rows * LANES; b < s.batch && lanes.count < LANES; b++) add(b, taps);
  return lanes;
}

// Calls f(worker, sets of rows that share taps, slice) by a number of threads.
template <class F>
static fa_status for_each_item(const fa_conv_shape &s, int threads, F f) {
  const int64_t sets = tap_sets(s), rows = row_sets(s), items = sets * s.slices;
  std::atomic<int64_t> next{0};
  std::atomic<bool> fits{true};
  auto work = [&] {
    try {
      auto worker = f.worker();
      for (int64_t item; (item = next++) < items;) {
        int64_t slice = item / sets;
        std::vector<Lanes> each;
        for (int64_t row = rows * slice / s.slices; row < rows * (slice + 1) / s.slices; row++)
          each.push_back(lanes_of(s, item % sets, row));
        f(worker, each, slice);
      }
    } catch (...) {  // there is nothing but memory to run out of
      fits = false;
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(threads);
    while ((int64_t)others.size() + 1 < std::min<int64_t>(threads, items))
      others.emplace_back(work);
  } catch (...) {  // no more threads: those there are do the work
  }
  work();
  for (std::thread &thread : others) thread.join();
  return fits ? FA_OK : FA_OUT_OF_MEMORY;
}

struct Forward {
  const fa_conv_shape &s;
  fa_tensor u, pre, post, y;
  const float *taps, *skip;
  Worker worker() const { return Worker(s, taps, skip); }
  void operator()(Worker &worker, const std::vector<Lanes> &rows, int64_t) const {
    worker.set_taps(rows[0]);
    for (const Lanes &lanes : rows) worker.convolve(lanes, u, pre, post, y);
  }
};

struct Backward {
  const fa_conv_shape &s;
  fa_tensor u, pre, post, dy, du, dpre, dpost;
  const float *taps, *skip;
  float *dtaps, *dskip;
  Worker worker() const { return Worker(s, taps, skip); }
  void operator()(Worker &worker, const std::vector<Lanes> &rows, int64_t slice) const {
    float *of_taps = dtaps ? dtaps + slice * s.channels * s.count : nullptr;
    float *of_skip = dskip ? dskip + slice * s.channels : nullptr;
    worker.set_taps(rows[0]);
    for (const Lanes &lanes : rows)
      worker.gradients(lanes, u, pre, post, dy, du, dpre, dpost, of_taps != nullptr, of_skip);
    if (of_taps) worker.put_dtaps(rows[0], of_taps);
  }
};

}  // namespace fastattn

using namespace fastattn;

static bool valid(const fa_conv_shape *s) {
  int64_t low = s->mirrored ? -(s->first + s->count - 1) : s->first, high = low + s->count - 1;
  return s->batch > 0 && s->channels > 0 && s->group > 0 && s->channels % s->group == 0 &&
         s->n > 0 && s->out > 0 && s->count > 0 && s->length > 1 && s->slices > 0 &&
         s->slices <= row_sets(*s) && (s->length & (s->length - 1)) == 0 && s->n <= s->length &&
         s->out <= s->length && high < s->length && low > -s->length;
}

extern "C" {

int64_t fa_conv_cpu_slices(const fa_conv_shape *shape, int threads) {
  if (shape->batch < 1 || shape->channels < 1) return 1;
  int64_t sets = tap_sets(*shape), slices = (threads + sets - 1) / sets;
  return std::max<int64_t>(1, std::min(slices, row_sets(*shape)));
}

fa_status fa_conv_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                      fa_tensor y, const float *taps, const float *skip, int threads) {
  if (!valid(shape) || !u.data || !y.data || !taps) return FA_BAD_ARGUMENT;
  return for_each_item(*shape, threads, Forward{*shape, u, pre, post, y, taps, skip});
}

fa_status fa_conv_backward_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre,
                               fa_tensor post, fa_tensor dy, fa_tensor du, fa_tensor dpre,
                               fa_tensor dpost, const float *taps, const float *skip, float *dtaps,
                               float *dskip, int threads) {
  if (!valid(shape) || !u.data || !dy.data || !taps) return FA_BAD_ARGUMENT;
  const fa_conv_shape &s = *shape;
  if (dtaps) std::memset(dtaps, 0, s.slices * s.channels * s.count * sizeof(float));
  if (dskip) std::memset(dskip, 0, s.slices * s.channels * sizeof(float));
  return for_each_item(s, threads,
                       Backward{s, u, pre, post, dy, du, dpre, dpost, taps, skip, dtaps, dskip});
}

}  // extern "C"

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#endif
