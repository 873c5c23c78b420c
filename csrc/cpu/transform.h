// The Fourier transform of LANES rows, block by block of the tree; see fft.h.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "vectors.h"

namespace fastattn {

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

}  // namespace fastattn
