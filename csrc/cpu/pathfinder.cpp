// Pathfinder images on a CPU; lra/tasks/pathfinder_numpy.py is the same, step by step.
//
// What is kept free is a picture of its own, the mask, with grey edges. Two are kept: the mask, and
// the same, wider by a margin, since the maximum over a disc of what is written is the maximum of
// what is written wider. Outside the image nothing is written, and it is no obstacle: the border
// inside already is.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "fastattn/pathfinder.h"

namespace fastattn {
namespace {

constexpr int TRIES = 3;          // of a first segment, and of a further one
constexpr int CONTOUR_TRIES = 5;  // of a distractor
constexpr int ATTEMPTS = 1 << 22;
constexpr uint8_t TAKEN = 77;  // of 255: no first segment on what is kept free from here on
constexpr int CLASH = 459;     // 1.8 · 255: two segments' margins may overlap where they are grey
constexpr uint32_t LEAST = 255 * FA_UNIT / 10000;  // sum of weights; below, there is no way on

uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// SplitMix64 (Steele et al. 2014), begun at word `index` of the stream of `key`.
class Stream {
 public:
  Stream(uint64_t key, uint64_t index) : state_(mix(key + GAMMA * index)) {}
  uint32_t below(uint32_t n) {
    return static_cast<uint32_t>((mix(state_ += GAMMA) >> 32) * n >> 32);
  }

 private:
  static constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
  uint64_t state_;
};

struct Point {
  int y, x;
};

Point operator+(Point a, const int32_t *offset) { return {a.y + offset[0], a.x + offset[1]}; }

// A picture of a sprite, without the black around it.
struct Picture {
  int y, x, height, width;  // from the segment's start
  std::vector<uint8_t> pixels;

  Picture(const uint8_t *from, int side) {
    int y0 = side, y1 = 0, x0 = side, x1 = 0;
    for (int i = 0; i < side; i++)
      for (int j = 0; j < side; j++)
        if (from[i * side + j]) {
          y0 = std::min(y0, i), y1 = std::max(y1, i + 1);
          x0 = std::min(x0, j), x1 = std::max(x1, j + 1);
        }
    height = std::max(0, y1 - y0), width = std::max(0, x1 - x0);
    y = y0 - side / 2, x = x0 - side / 2;
    for (int i = 0; i < height; i++)
      pixels.insert(pixels.end(), from + (y0 + i) * side + x0, from + (y0 + i) * side + x1);
  }
};

// The sprites of one margin.
struct Sprites {
  struct Sprite {
    Picture ink, kept_free, wider;
  };
  std::vector<Sprite> all;

  explicit Sprites(const fa_pathfinder_tables &t) {
    int area = t.width * t.width;
    for (int s = 0; s < t.sprites; s++) {
      const uint8_t *from = t.pictures + s * 3 * area;
      all.push_back({{from, t.width}, {from + area, t.width}, {from + 2 * area, t.width}});
    }
  }
};

struct Segment {
  Point start;
  int sprite;
};

// A chain of segments; the last of them is not yet in the mask.
struct Contour {
  Point pivot;
  int direction;
  std::vector<Segment> segments;
};

// What a thread draws with: one image after another.
class Scene {
 public:
  Scene(const fa_pathfinder &settings, const std::vector<Sprites> &sprites)
      : s_(settings),
        n_(settings.size),
        sprites_(sprites),
        blank_mask_(n_ * n_),
        blank_wide_(n_ * n_),
        mask_(n_ * n_),
        wide_(n_ * n_),
        mask_before_(n_ * n_),
        wide_before_(n_ * n_),
        taken_(n_ * n_),
        covered_(n_ * n_),
        ink_(n_ * n_) {
    int places = 0;
    for (int i = 0; i < s_.margins; i++) places = std::max(places, s_.tables[i].places);
    sums_.resize(places);
    draw_border(s_.padding, blank_mask_);
  }

  void draw(uint64_t key, int64_t index, uint8_t *image, uint8_t &label, int32_t &margin,
            int32_t &attempts, int32_t &found) {
    Stream stream(key, static_cast<uint64_t>(index));
    stream_ = &stream;
    label = static_cast<uint8_t>(stream.below(2));
    int set = static_cast<int>(stream.below(s_.margins));
    t_ = &s_.tables[set];
    sprite_ = sprites_[set].all.data();
    margin = t_->margin;
    draw_border(s_.padding + t_->margin, blank_wide_);
    int end = static_cast<int>(stream.below(2));  // which contour the disc at a start marks

    std::memset(image, 0, n_ * n_);
    attempts = draw_pair();
    found = 0;
    if (!attempts) return;
    std::fill(ink_.begin(), ink_.end(), 0);
    for (const Contour &contour : pair_) put_ink(contour, s_.contour_ink);
    put_disc(pair_[end].segments.front().start);
    put_disc(pair_[label ? end : 1 - end].segments.back().start);
    for (int i = 0; i < s_.distractors; i++)
      if (draw_distractor()) {
        put_ink(distractor_, s_.distractor_ink);
        found++;
      }
    uint64_t top = *std::max_element(ink_.begin(), ink_.end());
    for (int i = 0; i < n_ * n_; i++)
      if (ink_[i]) image[i] = static_cast<uint8_t>((ink_[i] * uint64_t{510} + top) / (2 * top));
  }

 private:
  bool inside(Point p) const { return p.y >= 0 && p.x >= 0 && p.y < n_ && p.x < n_; }

  void draw_border(int width, std::vector<uint8_t> &image) const {
    for (int y = 0; y < n_; y++)
      for (int x = 0; x < n_; x++) {
        int from_edge = std::min(std::min(y, x), n_ - 1 - std::max(y, x));
        image[y * n_ + x] = from_edge < width ? 255 : 0;
      }
  }

  int draw_pair() {
    for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
      mask_ = blank_mask_;
      wide_ = blank_wide_;
      if (begin_first() && begin_second() && grow_pair()) {
        keep_free(pair_[1].segments.back());
        return attempt;
      }
    }
    return 0;
  }

  bool grow_pair() {
    for (int i = 1; i < s_.contour_length; i++)
      for (Contour &contour : pair_)
        if (!grow(contour)) return false;
    return true;
  }

  bool begin_first() {
    for (int i = 0; i < TRIES; i++) {
      int degree = static_cast<int>(stream_->below(FA_DEGREES));
      const int32_t *start = t_->starts + 4 * degree;
      int area = start[2] * start[3];
      if (area == 0) return false;
      int at = static_cast<int>(stream_->below(area));
      if (begin({start[0] + at / start[3], start[1] + at % start[3]}, degree, pair_[0]))
        return true;
    }
    return false;
  }

  bool begin_second() {
    for (int i = 0; i < TRIES; i++) {
      int degree = static_cast<int>(stream_->below(FA_DEGREES));
      int around = static_cast<int>(stream_->below(FA_DEGREES));
      Point start = pair_[0].segments[0].start + (s_.ring + 2 * around);
      if (begin(start, degree, pair_[1])) return true;
    }
    return false;
  }

  // A contour's first segment, if its end and its pivot are inside.
  bool begin(Point start, int degree, Contour &contour) const {
    Point pivot = start + (t_->pivots + 2 * degree);
    if (!inside(pivot) || !inside(start + (t_->heads + 2 * degree))) return false;
    contour.pivot = pivot;
    contour.direction = degree;
    contour.segments.assign(1, {start, t_->sprite_of[degree]});
    return true;
  }

  bool draw_distractor() {
    for (int i = 0; i < CONTOUR_TRIES; i++) {
      if (!begin_distractor()) continue;
      mask_before_ = mask_;
      wide_before_ = wide_;
      int length = 1;
      while (length < s_.distractor_length && grow(distractor_)) length++;
      if (length == s_.distractor_length) {
        keep_free(distractor_.segments.back());
        return true;
      }
      mask_.swap(mask_before_);
      wide_.swap(wide_before_);
    }
    return false;
  }

  bool begin_distractor() {
    int free = 0;
    for (int i = 0; i < n_ * n_; i++) {
      taken_[i] = mask_[i] >= TAKEN;
      free += !taken_[i];
    }
    if (free * 100 < n_ * n_) return false;
    for (int i = 0; i < n_; i++)
      for (int at : {i, (n_ - 1) * n_ + i, i * n_, i * n_ + n_ - 1}) taken_[at] = 1;
    for (int i = 0; i < TRIES; i++) {
      int degree = static_cast<int>(stream_->below(FA_DEGREES));
      int from = t_->footprint_at[degree], to = t_->footprint_at[degree + 1];
      if (from == to) return false;
      cover(t_->footprint + 2 * from, to - from);
      free = static_cast<int>(std::count(covered_.begin(), covered_.end(), 0));
      if (free == 0) return false;
      int left = static_cast<int>(stream_->below(free)), at = 0;
      while (covered_[at] || left--) at++;
      if (begin({at / n_, at % n_}, degree, distractor_)) return true;
    }
    return false;
  }

  // Where the footprint would lie on a pixel that is taken; outside there are none.
  void cover(const int32_t *footprint, int count) {
    std::fill(covered_.begin(), covered_.end(), 0);
    for (const int32_t *f = footprint; f < footprint + 2 * count; f += 2) {
      int dy = f[0], dx = f[1];
      int first = std::max(0, -dx), count = std::min(n_, n_ - dx) - first;
      for (int y = std::max(0, -dy); y < std::min(n_, n_ - dy); y++) {
        const uint8_t *from = taken_.data() + (y + dy) * n_ + first + dx;
        uint8_t *to = covered_.data() + y * n_ + first;
        for (int x = 0; x < count; x++) to[x] |= from[x];
      }
    }
  }

  // Adds a segment; only then the one before it is kept free.
  bool grow(Contour &contour) {
    Point pivot = contour.pivot + (t_->steps + 2 * contour.direction);
    const uint32_t *weights = t_->weights + contour.direction * t_->places;
    uint32_t sum = 0;
    for (int k = 0; k < t_->places; k++) {
      Point place = pivot + (t_->around + 2 * k);
      if (inside(place)) sum += weights[k] * (255u - wide_[place.y * n_ + place.x]);
      sums_[k] = sum;
    }
    if (sum < LEAST) return false;
    for (int i = 0; i < TRIES; i++) {
      uint32_t at = stream_->below(sum);
      int k = 0;
      while (sums_[k] <= at) k++;
      int direction = FA_DEGREES + k;
      Segment segment{pivot + (t_->around + 2 * k), t_->sprite_of[direction]};
      if (!clear(segment)) continue;
      keep_free(contour.segments.back());
      contour.segments.push_back(segment);
      contour.pivot = pivot;
      contour.direction = direction;
      return true;
    }
    return false;
  }

  // Calls f(pixel of the image, of the picture, how many) for each row of a picture that is inside.
  template <class F>
  void for_each_row(Point at, const Picture &picture, F f) const {
    int y = at.y + picture.y, x = at.x + picture.x;
    int first = std::max(0, -x), stop = std::min(picture.width, n_ - x);
    if (first >= stop) return;
    for (int i = std::max(0, -y); i < std::min(picture.height, n_ - y); i++)
      f((y + i) * n_ + x + first, &picture.pixels[i * picture.width + first], stop - first);
  }

  bool clear(const Segment &segment) const {
    bool clash = false;
    const Picture &picture = sprite_[segment.sprite].kept_free;
    for_each_row(segment.start, picture, [&](int at, const uint8_t *from, int count) {
      for (int x = 0; x < count; x++) clash |= mask_[at + x] + from[x] >= CLASH;
    });
    return !clash;
  }

  void keep_free(const Segment &segment) {
    raise(segment.start, sprite_[segment.sprite].kept_free, mask_);
    raise(segment.start, sprite_[segment.sprite].wider, wide_);
  }

  void raise(Point start, const Picture &picture, std::vector<uint8_t> &image) const {
    for_each_row(start, picture, [&](int at, const uint8_t *from, int count) {
      uint8_t *to = &image[at];
      for (int x = 0; x < count; x++) to[x] = std::max(to[x], from[x]);
    });
  }

  void put_ink(const Contour &contour, uint32_t ink) {
    for (const Segment &segment : contour.segments)
      put_ink(segment.start, sprite_[segment.sprite].ink, ink);
  }

  void put_ink(Point start, const Picture &picture, uint32_t ink) {
    for_each_row(start, picture, [&](int at, const uint8_t *from, int count) {
      for (int x = 0; x < count; x++) ink_[at + x] = std::max(ink_[at + x], from[x] * ink);
    });
  }

  void put_disc(Point centre) { put_ink(centre, disc_, FA_UNIT); }

  const fa_pathfinder &s_;
  const int n_;
  const std::vector<Sprites> &sprites_;
  const Picture disc_{s_.disc, s_.disc_width};
  std::vector<uint8_t> blank_mask_, blank_wide_, mask_, wide_, mask_before_, wide_before_;
  std::vector<uint8_t> taken_, covered_;
  std::vector<uint32_t> ink_, sums_;
  Contour pair_[2], distractor_;
  Stream *stream_ = nullptr;
  const fa_pathfinder_tables *t_ = nullptr;  // of the image's margin
  const Sprites::Sprite *sprite_ = nullptr;
};

bool valid(const fa_pathfinder &s) {
  if (s.size < 1 || s.padding < 1 || s.contour_length < 2 || s.distractor_length < 1 ||
      s.distractors < 0 || s.margins < 1 || s.disc_width < 1 || !s.disc || !s.ring || !s.tables ||
      s.contour_ink > 256 * FA_UNIT || s.distractor_ink > 256 * FA_UNIT)
    return false;
  return std::all_of(s.tables, s.tables + s.margins, [](const fa_pathfinder_tables &t) {
    // The sum of an image's weights fits 32 bits.
    return t.margin > 0 && t.places > 0 && t.places < 257 && t.width > 0 && t.sprites > 0;
  });
}

}  // namespace
}  // namespace fastattn

using namespace fastattn;

extern "C" fa_status fa_pathfinder_draw(const fa_pathfinder *settings, uint64_t key, int64_t first,
                                        int64_t count, int threads, uint8_t *images,
                                        uint8_t *labels, int32_t *margins, int32_t *attempts,
                                        int32_t *found) {
  if (!valid(*settings) || first < 0 || count < 0 || threads < 1) return FA_BAD_ARGUMENT;
  int64_t area = int64_t{settings->size} * settings->size;
  std::atomic<int64_t> next{0};
  std::atomic<bool> fits{true};
  try {
    std::vector<Sprites> sprites(settings->tables, settings->tables + settings->margins);
    auto work = [&] {
      try {
        Scene scene(*settings, sprites);
        for (int64_t i; (i = next++) < count;)
          scene.draw(key, first + i, images + i * area, labels[i], margins[i], attempts[i],
                     found[i]);
      } catch (const std::bad_alloc &) {
        fits = false;
      }
    };
    std::vector<std::thread> others;
    try {
      for (int64_t i = 1; i < std::min<int64_t>(threads, count); i++) others.emplace_back(work);
    } catch (...) {  // fewer threads, then
    }
    work();
    for (std::thread &thread : others) thread.join();
  } catch (const std::bad_alloc &) {
    fits = false;
  }
  return fits ? FA_OK : FA_OUT_OF_MEMORY;
}
