// Convolutions on a CPU: the transform of cuda/row.cuh, of LANES rows side by side in vectors.
//
// Rows never meet: a lane is a row. Lanes are channels, which each have taps, or where there are
// few channels samples of one. A block of a tree is transformed whole before the next, so that what
// is small stays in the cache.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "fastattn/fft_conv.h"
#include "transform.h"
#include "elements.h"

namespace fastattn {

// Which rows the lanes of one call to the transform are.
struct Lanes {
  int64_t sample[LANES], channel[LANES];
  int count;  // others hold zeros
};

// Elements [begin, begin + count) of every lane's row of x, which has `length`; zero outside.
static void load(fa_type type, const fa_tensor &x, const Lanes &lanes, int64_t begin, int64_t count,
                 int64_t length, V *to) {
  std::memset(static_cast<void *>(to), 0, count * sizeof(V));
  const int64_t low = std::max<int64_t>(0, -begin), high = std::min(count, length - begin);
  for (int l = 0; l < lanes.count; l++) {
    int64_t first = lanes.sample[l] * x.b + lanes.channel[l] * x.c + begin * x.n;
    if (type == FA_FLOAT32) {
      const float *from = static_cast<const float *>(x.data) + first;
      for (int64_t i = low; i < high; i++) to[i][l] = from[i * x.n];
    } else {
      for (int64_t i = low; i < high; i++) to[i][l] = get(type, x.data, first + i * x.n);
    }
  }
}

static void load(fa_type type, const fa_tensor &x, const Lanes &lanes, int64_t length, V *to) {
  load(type, x, lanes, 0, length, length, to);
}

// Elements [begin, begin + length) of every lane's row.
static void store(fa_type type, const fa_tensor &x, const Lanes &lanes, int64_t begin,
                  int64_t length, const V *from) {
  for (int l = 0; l < lanes.count; l++) {
    int64_t first = lanes.sample[l] * x.b + lanes.channel[l] * x.c + begin * x.n;
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
  int64_t size() const { return size_; }
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

// How many inputs of a window stand before its first output: as far as a tap reaches back.
static int64_t leading(const fa_conv_shape &s) {
  int64_t back = s.mirrored ? -s.first : s.first + s.count - 1;
  return std::max<int64_t>(back, 0);
}

static int64_t windows(const fa_conv_shape &s) {
  return s.valid ? (s.out + s.valid - 1) / s.valid : 1;
}

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
        line_(shape.length * (shape.valid ? 2 : 1)),
        gate_(shape.length * (shape.valid ? 2 : 1)) {}

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
    store(s_.type, y, lanes, 0, s_.out, line_.data());
  }

  // The outputs of window w of a row.
  void convolve_window(const Lanes &lanes, int64_t w, const fa_tensor &u, const fa_tensor &pre,
                       const fa_tensor &post, const fa_tensor &y) {
    const int64_t size = s_.length, lead = leading(s_), begin = w * s_.valid;
    const int64_t count = std::min(s_.valid, s_.out - begin);
    window(lanes, u, pre, begin - lead, 2 * size, s_.n, 0);
    if (skip_) {
      if (direct_.size() == 0) direct_.resize(2 * size);
      std::copy(line_.begin(), line_.end(), direct_.begin());
    }
    for (int64_t i = 0; i < size; i++) x_[i] = times(x_[i], spectrum_[i]);
    transform_->inverse(x_.data());
    for (int64_t i = 0; i < size; i++) {
      Complex turn = transform_->twist(i);
      line_[i] = turn.re * x_[i].re - turn.im * x_[i].im;
      line_[i + size] = turn.re * x_[i].im + turn.im * x_[i].re;
    }
    V *found = line_.data() + lead;
    if (skip_)
      for (int64_t i = 0; i < count; i++) found[i] = found[i] + skip_lanes_ * direct_[lead + i];
    if (post.data) {
      load(s_.type, post, lanes, begin, count, s_.out, gate_.data());
      for (int64_t i = 0; i < count; i++) found[i] = found[i] * gate_[i];
    }
    store(s_.type, y, lanes, begin, count, found);
  }

  // Adds to sum_ what window w of a row has of the taps' gradient.
  void correlate_window(const Lanes &lanes, int64_t w, const fa_tensor &u, const fa_tensor &pre,
                        const fa_tensor &post, const fa_tensor &dy) {
    const int64_t size = s_.length, lead = leading(s_), begin = w * s_.valid;
    window(lanes, u, pre, begin - lead, 2 * size, s_.n, 0);
    if (inputs_.size() == 0) inputs_.resize(size), sum_.resize(size);
    std::copy(x_.begin(), x_.end(), inputs_.begin());
    window(lanes, dy, post, begin, std::min(s_.valid, s_.out - begin), s_.out, lead);
    for (int64_t i = 0; i < size; i++) {
      Number product = conjugate_times(inputs_[i], x_[i]);
      sum_[i] = {sum_[i].re + product.re, sum_[i].im + product.im};
    }
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
      store(s_.type, dpost, lanes, 0, out, line_.data());
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
      store(s_.type, dpre, lanes, 0, n, raw_.data());
    }
    if (du.data) {
      if (pre.data) {
        load(s_.type, pre, lanes, n, gate_.data());
        for (int64_t i = 0; i < n; i++) line_[i] = line_[i] * gate_[i];
      }
      store(s_.type, du, lanes, 0, n, line_.data());
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
  // To x_ the transform of a window, in whose place `at` stand elements [begin, begin + count) of a
  // row of `length`, gated; to line_ the window itself.
  void window(const Lanes &lanes, const fa_tensor &x, const fa_tensor &gate, int64_t begin,
              int64_t count, int64_t length, int64_t at) {
    const int64_t size = s_.length;
    if (count < 2 * size) line_.clear();
    load(s_.type, x, lanes, begin, count, length, line_.data() + at);
    if (gate.data) {
      load(s_.type, gate, lanes, begin, count, length, gate_.data());
      for (int64_t i = 0; i < count; i++) line_[at + i] = line_[at + i] * gate_[i];
    }
    for (int64_t i = 0; i < size; i++) x_[i] = {line_[i], line_[i + size]};
    transform_->forward(x_.data());
  }

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

struct Window {
  Lanes lanes;
  int64_t number;
};

// Calls f(worker, windows of sets of rows that share taps, slice) by a number of threads.
template <class F>
static fa_status for_each_item(const fa_conv_shape &s, int threads, F f) {
  const int64_t each_row = windows(s);
  const int64_t sets = tap_sets(s), rows = row_sets(s) * each_row, items = sets * s.slices;
  std::atomic<int64_t> next{0};
  std::atomic<bool> fits{true};
  auto work = [&] {
    try {
      auto worker = f.worker();
      for (int64_t item; (item = next++) < items;) {
        int64_t slice = item / sets;
        std::vector<Window> each;
        for (int64_t row = rows * slice / s.slices; row < rows * (slice + 1) / s.slices; row++)
          each.push_back({lanes_of(s, item % sets, row / each_row), row % each_row});
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
  void operator()(Worker &worker, const std::vector<Window> &rows, int64_t) const {
    worker.set_taps(rows[0].lanes);
    for (const Window &w : rows)
      if (s.valid)
        worker.convolve_window(w.lanes, w.number, u, pre, post, y);
      else
        worker.convolve(w.lanes, u, pre, post, y);
  }
};

struct Correlate {
  const fa_conv_shape &s;
  fa_tensor u, pre, post, dy;
  float *dtaps;
  Worker worker() const { return Worker(s, nullptr, nullptr); }
  void operator()(Worker &worker, const std::vector<Window> &rows, int64_t slice) const {
    for (const Window &w : rows) worker.correlate_window(w.lanes, w.number, u, pre, post, dy);
    worker.put_dtaps(rows[0].lanes, dtaps + slice * s.channels * s.count);
  }
};

struct Backward {
  const fa_conv_shape &s;
  fa_tensor u, pre, post, dy, du, dpre, dpost;
  const float *taps, *skip;
  float *dtaps, *dskip;
  Worker worker() const { return Worker(s, taps, skip); }
  void operator()(Worker &worker, const std::vector<Window> &rows, int64_t slice) const {
    float *of_taps = dtaps ? dtaps + slice * s.channels * s.count : nullptr;
    float *of_skip = dskip ? dskip + slice * s.channels : nullptr;
    worker.set_taps(rows[0].lanes);
    for (const Window &w : rows)
      worker.gradients(w.lanes, u, pre, post, dy, du, dpre, dpost, of_taps != nullptr, of_skip);
    if (of_taps) worker.put_dtaps(rows[0].lanes, of_taps);
  }
};

}  // namespace fastattn

using namespace fastattn;

static bool valid(const fa_conv_shape *s) {
  int64_t low = s->mirrored ? -(s->first + s->count - 1) : s->first, high = low + s->count - 1;
  return s->batch > 0 && s->channels > 0 && s->group > 0 && s->channels % s->group == 0 &&
         s->n > 0 && s->out > 0 && s->count > 0 && s->length > 1 && s->slices > 0 &&
         s->slices <= row_sets(*s) * windows(*s) && (s->length & (s->length - 1)) == 0 &&
         high < s->length && low > -s->length &&
         (s->valid ? s->valid > 0 && s->valid <= fa_conv_valid(s)
                   : s->n <= s->length && s->out <= s->length);
}

extern "C" {

int64_t fa_conv_valid(const fa_conv_shape *s) {
  int64_t low = s->mirrored ? -(s->first + s->count - 1) : s->first, high = low + s->count - 1;
  return 2 * s->length - std::max<int64_t>(high, 0) + std::min<int64_t>(low, 0);
}

int64_t fa_conv_cpu_slices(const fa_conv_shape *shape, int threads) {
  if (shape->batch < 1 || shape->channels < 1) return 1;
  int64_t sets = tap_sets(*shape), slices = (threads + sets - 1) / sets;
  return std::max<int64_t>(1, std::min(slices, row_sets(*shape) * windows(*shape)));
}

fa_status fa_conv_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                      fa_tensor y, const float *taps, const float *skip, int threads) {
  if (!valid(shape) || !u.data || !y.data || !taps) return FA_BAD_ARGUMENT;
  return for_each_item(*shape, threads, Forward{*shape, u, pre, post, y, taps, skip});
}

fa_status fa_correlate_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre, fa_tensor post,
                           fa_tensor dy, float *dtaps, int threads) {
  if (!valid(shape) || !shape->valid || !u.data || !dy.data || !dtaps) return FA_BAD_ARGUMENT;
  std::memset(dtaps, 0, shape->slices * shape->channels * shape->count * sizeof(float));
  return for_each_item(*shape, threads, Correlate{*shape, u, pre, post, dy, dtaps});
}

fa_status fa_conv_backward_cpu(const fa_conv_shape *shape, fa_tensor u, fa_tensor pre,
                               fa_tensor post, fa_tensor dy, fa_tensor du, fa_tensor dpre,
                               fa_tensor dpost, const float *taps, const float *skip, float *dtaps,
                               float *dskip, int threads) {
  if (!valid(shape) || shape->valid || !u.data || !dy.data || !taps) return FA_BAD_ARGUMENT;
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
