// The kernels of csrc/cuda/conv.cuh run by threads of a CPU, against sums in double precision.
//
// Prints a line for every case, and exits with 1 if an error is larger than float32 explains.
#include <barrier>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "conv_long.cuh"
#include "conv_parts.cuh"
#include "conv_windows.cuh"

using Values = std::vector<float>;

namespace fastattn {

// The upper half of a float.
struct Half {
  uint16_t bits;
};

inline float to_float(Half x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace fastattn

using namespace fastattn;

static std::mt19937 generator(1);

static Values normal(size_t count) {
  std::normal_distribution<float> normal;
  Values values(count);
  for (float &x : values) x = normal(generator);
  return values;
}

struct Case {
  int64_t batch, channels, group, n, out, first, count;
  bool mirrored, gated, skip;
  int64_t slices;
  bool windows = false, held = true;
};

static fa_tensor tensor(Values &x, int64_t channels, int64_t n) {
  if (x.empty()) return {nullptr, 0, 0, 0};
  return {x.data(), channels * n, n, 1};
}

// Run f(t, sync, add) for every thread t of a group.
template <class F>
static void group(int threads, F f) {
  std::barrier barrier(threads);
  std::vector<float> each(threads);
  std::vector<std::thread> all;
  for (int t = 0; t < threads; t++)
    all.emplace_back([&, t] {
      auto sync = [&] { barrier.arrive_and_wait(); };
      auto add = [&](float x) {
        each[t] = x;
        sync();
        float sum = 0;
        for (float y : each) sum += y;
        return sum;
      };
      f(t, sync, add);
    });
  for (std::thread &thread : all) thread.join();
}

static double worst = 0;

static void compare(const char *what, const Values &got, const std::vector<double> &want,
                    double factor = 1) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); i++) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  std::printf(" %s %.1e", what, relative);
  if (!(relative <= 5e-7 * factor) || norm == 0) worst = 1;
}

// What is expected of a case, as sums in double precision.
struct Wanted {
  std::vector<double> y, du, dpre, dpost, dtaps, dskip;
  Wanted(const Case &c, const Values &u, const Values &pre, const Values &post, const Values &dy,
         const Values &taps, const Values &skip)
      : y(c.batch * c.channels * c.out),
        du(c.batch * c.channels * c.n),
        dpre(du.size()),
        dpost(y.size()),
        dtaps(c.channels * c.count),
        dskip(c.channels) {
    for (int64_t row = 0; row < c.batch * c.channels; row++) {
      int64_t channel = row % c.channels;
      auto x = [&](int64_t i) {
        return (double)u[row * c.n + i] * (c.gated ? pre[row * c.n + i] : 1);
      };
      auto g = [&](int64_t i) {
        return (double)dy[row * c.out + i] * (c.gated ? post[row * c.out + i] : 1);
      };
      std::vector<double> dx(c.n);
      for (int64_t i = 0; i < c.out; i++) {
        double sum = 0;
        for (int64_t t = 0; t < c.count; t++) {
          int64_t lag = c.mirrored ? -(c.first + t) : c.first + t, from = i - lag;
          if (from < 0 || from >= c.n) continue;
          double tap = taps[channel / c.group * c.count + t];
          sum += tap * x(from);
          dx[from] += tap * g(i);
          dtaps[channel * c.count + t] += x(from) * g(i);
        }
        if (c.skip && i < c.n) {
          sum += skip[channel] * x(i);
          dx[i] += skip[channel] * g(i);
          dskip[channel] += x(i) * g(i);
        }
        y[row * c.out + i] = sum * (c.gated ? post[row * c.out + i] : 1);
        dpost[row * c.out + i] = sum * dy[row * c.out + i];
      }
      for (int64_t i = 0; i < c.n; i++) {
        du[row * c.n + i] = dx[i] * (c.gated ? pre[row * c.n + i] : 1);
        dpre[row * c.n + i] = dx[i] * u[row * c.n + i];
      }
    }
  }
};

template <class P>
static void run(Case c) {
  Values table(4 * numbers_of<P>());
  fill_table<P>(table.data());
  const float4 *roots = reinterpret_cast<const float4 *>(table.data());
  int64_t rows = c.batch * c.channels;
  Values u = normal(rows * c.n), dy = normal(rows * c.out),
         taps = normal(c.channels / c.group * c.count);
  Values pre, post, skip;
  if (c.gated) pre = normal(rows * c.n), post = normal(rows * c.out);
  if (c.skip) skip = normal(c.channels);

  const Wanted want(c, u, pre, post, dy, taps, skip);

  // what the kernels make
  fa_conv_shape shape = {c.batch, c.channels, c.group,    c.n,  c.out,    c.first,
                         c.count, c.mirrored, FA_FLOAT32, P::N, c.slices, 0};
  if (c.windows) {
    int64_t low = c.mirrored ? -(c.first + c.count - 1) : c.first, high = low + c.count - 1;
    shape.valid = 2 * P::N - std::max<int64_t>(high, 0) + std::min<int64_t>(low, 0);
  }
  Values got_y(rows * c.out, NAN), got_du(rows * c.n, NAN), got_dpre(c.gated ? rows * c.n : 0),
      got_dpost(c.gated ? rows * c.out : 0);
  Values got_dtaps(c.slices * c.channels * c.count, 0), got_dskip(c.slices * c.channels, NAN);
  std::vector<float2> memory(Row<P>::MEMORY), first(P::N), second(P::N), third(P::N);
  Convolution forward = {shape,
                         tensor(u, c.channels, c.n),
                         tensor(pre, c.channels, c.n),
                         tensor(post, c.channels, c.out),
                         tensor(got_y, c.channels, c.out),
                         taps.data(),
                         c.skip ? skip.data() : nullptr,
                         roots,
                         nullptr};
  Gradient backward = {shape,
                       forward.u,
                       forward.pre,
                       forward.post,
                       tensor(dy, c.channels, c.out),
                       tensor(got_du, c.channels, c.n),
                       tensor(got_dpre, c.channels, c.n),
                       tensor(got_dpost, c.channels, c.out),
                       taps.data(),
                       forward.skip,
                       got_dtaps.data(),
                       got_dskip.data(),
                       roots,
                       nullptr};
  for (int64_t slice = 0; slice < c.slices; slice++)
    for (int64_t channel = 0; channel < c.channels; channel++)
      group(P::T, [&](int t, auto sync, auto add) {
        const InMemory<P> in_memory = {first.data()}, input = {second.data()};
        auto with = [&](auto held) {
          if (c.windows) {
            convolve_windows<P, float>(forward, channel, slice, t, memory.data(), held, sync);
            sync();
            correlate_windows<P, float>(backward, channel, slice, t, memory.data(), held, input,
                                        sync);
            return;
          }
          convolve<P, float, true>(forward, channel, slice, t, memory.data(), held, sync);
          sync();
          gradients<P, float, true>(backward, channel, slice, t, memory.data(), held, input,
                                    InMemory<P>{third.data()}, sync, add);
        };
        c.held ? with(InRegisters<P>()) : with(in_memory);
      });
  if constexpr (P::PARTS > 1) {
    using M = PartOf<P>;
    for (int64_t slice = 0; slice < c.slices; slice++)
      for (int64_t channel = 0; channel < c.channels; channel++) {
        for (int part = 0; part < P::PARTS; part++)
          group(M::T, [&](int t, auto sync, auto) {
            correlate_part<P, float>(backward, channel, slice, part, t, memory.data(), first.data(),
                                     InRegisters<M>(), InMemory<M>{second.data()},
                                     FetchedRow<P, float>(nullptr), sync);
          });
        group(P::T, [&](int t, auto sync, auto) {
          finish_taps<P>(backward, channel, slice, t, memory.data(), first.data(), sync);
        });
      }
  }
  for (int64_t slice = 1; slice < c.slices; slice++) {
    for (int64_t i = 0; i < c.channels * c.count; i++)
      got_dtaps[i] += got_dtaps[slice * c.channels * c.count + i];
    for (int64_t i = 0; i < c.channels; i++) got_dskip[i] += got_dskip[slice * c.channels + i];
  }
  std::printf("%sN=%d E=%d n=%d out=%d first=%d count=%d%s%s%s:", c.windows ? "windows " : "", P::N,
              P::E, (int)c.n, (int)c.out, (int)c.first, (int)c.count, c.mirrored ? " mirrored" : "",
              c.gated ? " gated" : "", c.skip ? " skip" : "");
  compare("y", got_y, want.y);
  if (c.windows) {
    compare("dtaps", got_dtaps, want.dtaps, 2 * std::sqrt((double)c.batch));
    std::printf("\n");
    return;
  }
  compare("du", got_du, want.du);
  compare("dtaps", got_dtaps, want.dtaps, 2 * std::sqrt((double)c.batch));
  if (c.gated) compare("dpre", got_dpre, want.dpre), compare("dpost", got_dpost, want.dpost);
  if (c.skip) compare("dskip", got_dskip, want.dskip, 100);
  std::printf("\n");
}

// The gradient of taps in parts, of elements that are fetched ahead.
template <class P>
static void run_fetched(Case c) {
  using M = PartOf<P>;
  Values table(4 * numbers_of<P>());
  fill_table<P>(table.data());
  const int64_t rows = c.batch * c.channels;
  auto halves = [](Values &values) {  // and what they are
    std::vector<Half> all(values.size());
    for (size_t i = 0; i < all.size(); i++) {
      uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof(bits));
      all[i].bits = (uint16_t)(bits >> 16);
      values[i] = to_float(all[i]);
    }
    return all;
  };
  Values u = normal(rows * c.n), dy = normal(rows * c.out), none, dtaps(c.channels * c.count);
  Values pre, post, taps = normal(c.channels * c.count);
  if (c.gated) pre = normal(rows * c.n), post = normal(rows * c.out);
  auto small_u = halves(u), small_dy = halves(dy), small_pre = halves(pre),
       small_post = halves(post);
  const Wanted want(c, u, pre, post, dy, taps, none);
  auto rows_of = [&](std::vector<Half> &x, int64_t n) {
    return x.empty() ? fa_tensor{} : fa_tensor{x.data(), c.channels * n, n, 1};
  };
  Gradient a = {};
  a.shape = {c.batch, c.channels, 1,           c.n,  c.out, c.first,
             c.count, c.mirrored, FA_BFLOAT16, P::N, 1,     0};
  a.u = rows_of(small_u, c.n), a.pre = rows_of(small_pre, c.n);
  a.dy = rows_of(small_dy, c.out), a.post = rows_of(small_post, c.out);
  a.dtaps = dtaps.data();
  a.table = reinterpret_cast<const float4 *>(table.data());
  std::vector<float2> memory(Row<P>::MEMORY), input(M::N), sums(P::N);
  std::vector<Half> row(P::N + 8);
  const size_t skipped = 8 - (uintptr_t)row.data() / 2 % 8;
  for (int64_t channel = 0; channel < c.channels; channel++) {
    for (int part = 0; part < P::PARTS; part++)
      group(M::T, [&](int t, auto sync, auto) {
        correlate_part<P, Half>(a, channel, 0, part, t, memory.data(), sums.data(),
                                InRegisters<M>(), InMemory<M>{input.data()},
                                FetchedRow<P, Half>(row.data() + skipped), sync);
      });
    group(P::T, [&](int t, auto sync, auto) {
      finish_taps<P>(a, channel, 0, t, memory.data(), sums.data(), sync);
    });
  }
  std::printf("fetched rows of %d in %d parts, n=%d out=%d%s:", P::N, P::PARTS, (int)c.n,
              (int)c.out, c.gated ? " gated" : "");
  compare("dtaps", dtaps, want.dtaps, 2 * std::sqrt((double)c.batch));
  std::printf("\n");
}

// Rows whose transform has two parts.
template <class W>
static void run_long(Case c) {
  constexpr int64_t N = W::N;
  const int64_t rows = c.batch * c.channels, tap_rows = c.channels / c.group;
  Values table(4 * W::COUNT);
  fill_long_table<W>(table.data());
  Values u = normal(rows * c.n), dy = normal(rows * c.out), taps = normal(tap_rows * c.count);
  Values pre, post, skip;
  if (c.gated) pre = normal(rows * c.n), post = normal(rows * c.out);
  if (c.skip) skip = normal(c.channels);
  const Wanted want(c, u, pre, post, dy, taps, skip);

  Values y(rows * c.out, NAN), du(rows * c.n, NAN), dpre(c.gated ? rows * c.n : 0),
      dtaps(c.channels * c.count, 0);
  Chunk a = {};
  a.shape = {c.batch, c.channels, c.group,    c.n, c.out,      c.first,
             c.count, c.mirrored, FA_FLOAT32, N,   c.channels, 0};
  a.channels = c.channels;
  a.u = tensor(u, c.channels, c.n), a.pre = tensor(pre, c.channels, c.n);
  a.post = tensor(post, c.channels, c.out), a.y = tensor(y, c.channels, c.out);
  a.taps = taps.data(), a.skip = c.skip ? skip.data() : nullptr;
  a.table = reinterpret_cast<const float4 *>(table.data());
  std::vector<float2> inputs(rows * N), outputs(rows * N), spectra(tap_rows * N),
      sums(c.channels * N);
  a.inputs = inputs.data(), a.outputs = outputs.data(), a.spectra = spectra.data();
  a.sums = sums.data();
  using Columns = typename W::Columns;
  using Leaf = typename W::Leaf;
  std::vector<float2> memory(std::max(Row<Columns>::MEMORY, Row<Leaf>::MEMORY)), turns(W::L),
      input(W::L);
  auto columns = [&](int64_t count, auto f) {
    for (int64_t row = 0; row < count; row++)
      for (int column = 0; column < W::L; column++)
        group(Columns::T, [&](int t, auto sync, auto) { f(row, column, t, sync); });
  };
  auto leaves = [&](auto f) {
    for (int leaf = 0; leaf < W::C; leaf++) {
      for (int j = 0; j < W::L; j++) turns[j] = turn_of<W>(a.table, leaf, j);
      group(Leaf::T, [&](int t, auto sync, auto) { f(leaf, t, sync); });
    }
  };
  auto split = [&](fa_tensor x, fa_tensor gate, int64_t length, float2 *to) {
    columns(rows, [&](int64_t row, int column, int t, auto sync) {
      split_row<W, float>(a, x, gate, length, to, row, column, t, memory.data(), sync);
    });
  };
  split(a.u, a.pre, c.n, a.inputs);
  columns(tap_rows, [&](int64_t row, int column, int t, auto sync) {
    split_taps<W>(a, row, column, t, memory.data(), sync);
  });
  leaves([&](int leaf, int t, auto sync) {
    transform_leaves<W>(a.spectra, 0, 1, tap_rows, leaf, turns.data(), a.table, t, memory.data(),
                        sync);
    convolve_leaves<W>(a, 0, 1, rows, leaf, turns.data(), t, memory.data(), sync);
  });
  columns(rows, [&](int64_t row, int column, int t, auto sync) {
    join_row<W, float>(a, row, column, t, memory.data(), sync);
  });

  a.y = tensor(dy, c.channels, c.out), a.du = tensor(du, c.channels, c.n);
  a.dpre = tensor(dpre, c.channels, c.n), a.dtaps = dtaps.data();
  split(a.u, a.pre, c.n, a.inputs);
  split(a.y, a.post, c.out, a.outputs);
  leaves([&](int leaf, int t, auto sync) {
    gradients_of_leaves<W>(a, 0, 1, c.channels, leaf, turns.data(), t, memory.data(),
                           InRegisters<Leaf>(), InMemory<Leaf>{input.data()}, sync);
  });
  columns(rows, [&](int64_t row, int column, int t, auto sync) {
    join_gradient<W, float>(a, row, column, t, memory.data(), sync);
  });
  columns(c.channels, [&](int64_t channel, int column, int t, auto sync) {
    join_taps<W>(a, channel, column, t, memory.data(), sync);
  });
  std::printf("long rows of %d by %d, n=%d out=%d first=%d count=%d%s%s%s:", W::C, W::L, (int)c.n,
              (int)c.out, (int)c.first, (int)c.count, c.mirrored ? " mirrored" : "",
              c.gated ? " gated" : "", c.skip ? " skip" : "");
  compare("y", y, want.y);
  compare("du", du, want.du);
  compare("dtaps", dtaps, want.dtaps, 2 * std::sqrt((double)c.batch));
  if (c.gated) compare("dpre", dpre, want.dpre);
  std::printf("\n");
}

int main() {
  run<Short<256>>({3, 4, 2, 256, 256, 0, 256, false, true, true, 2});
  run<Short<512>>({1, 1, 1, 100, 300, 0, 201, false, true, true, 1});
  run<Short<512>>({1, 2, 1, 300, 100, 0, 201, true, true, true, 1});
  run<Short<256>>({2, 2, 1, 200, 200, -199, 399, false, false, false, 1});
  run<Short<256>>({2, 2, 1, 200, 200, -150, 351, true, false, true, 1});
  run<Short<256>>({1, 1, 1, 1, 1, 0, 1, false, false, false, 1});
  run<Short<512>>({2, 1, 1, 500, 500, 0, 500, false, true, false, 2});
  run<Short<512>>({2, 1, 1, 500, 500, 0, 500, false, true, true, 1, false, false});
  run<Short<1024>>({2, 1, 1, 1024, 1024, 0, 1024, false, false, true, 1});
  run<Short<2048>>({2, 1, 1, 2048, 2048, 0, 77, false, true, true, 1});
  run<Short<4096>>({1, 1, 1, 4096, 4096, 0, 4096, false, false, false, 1});
  run<Short<8192>>({1, 1, 1, 8192, 8192, 0, 8192, false, false, false, 1});
  run<Short<8192>>({3, 2, 1, 5000, 6000, -4000, 8000, true, true, true, 2, false, false});
  run<Short<16384>>({1, 1, 1, 16384, 16384, 0, 16384, false, false, false, 1});
  run<Short<16384>>({2, 1, 1, 16384, 16384, 0, 300, false, true, true, 1});
  run<Short<16384>>({3, 2, 1, 9000, 10000, -4000, 5000, true, true, true, 2, false, false});
  run_fetched<Short<16384>>({3, 2, 1, 9001, 12001, -100, 300, true, true, false, 1});
  run_fetched<Short<16384>>({2, 1, 1, 16384, 16384, 0, 300, false, false, false, 1});
  run<Short<256>>({2, 4, 2, 3000, 3000, 0, 20, false, true, true, 3, true});
  run<Short<256>>({1, 2, 1, 1000, 1200, 0, 201, false, false, true, 2, true, false});
  run<Short<256>>({1, 1, 1, 2000, 1700, -60, 101, false, true, false, 1, true});
  run<Short<256>>({1, 1, 1, 2000, 2000, -60, 101, true, true, true, 5, true});
  run<Short<256>>({2, 1, 1, 513, 513, 0, 1, false, false, false, 1, true});
  run<Short<256>>({1, 1, 1, 700, 700, -255, 511, false, false, false, 1, true});
  run<Short<1024>>({1, 2, 1, 5000, 5000, 0, 64, false, true, true, 2, true});
  run<Short<4096>>({1, 1, 1, 20000, 20000, 0, 1000, false, false, true, 1, true});
  run_long<LongPlan<128, 128>>({2, 2, 2, 16384, 16384, 0, 100, false, true, true, 1});
  run_long<LongPlan<128, 128>>({1, 2, 1, 9000, 9000, -8999, 17999, false, false, true, 1});
  run_long<LongPlan<128, 256>>({1, 1, 1, 12000, 20000, -3000, 9001, true, true, false, 1});
  run_long<LongPlan<256, 128>>({1, 1, 1, 20000, 12000, 30, 25000, false, false, false, 1});
  std::printf(worst ? "WRONG\n" : "right\n");
  return worst ? 1 : 0;
}
