// Which plan a transform of N numbers has, and its table.
#pragma once

#include "row.cuh"

namespace fastattn {

template <int N>
struct PlanOf;
template <>
struct PlanOf<128> {  // of long rows alone
  using P = Plan<128, 16, 16, 512, 512, 16, 8>;
};
template <>
struct PlanOf<256> {
  using P = Plan<256, 16, 16, 512, 512, 16, 16>;
};
template <>
struct PlanOf<512> {
  using P = Plan<512, 16, 16, 512, 512, 8, 8, 8>;
};
template <>
struct PlanOf<1024> {
  using P = Plan<1024, 16, 16, 512, 512, 16, 16, 4>;
};
template <>
struct PlanOf<2048> {
  using P = Plan<2048, 16, 16, 512, 512, 16, 16, 8>;
};
template <>
struct PlanOf<4096> {
  using P = Plan<4096, 16, 16, 512, 512, 16, 16, 16>;
};
template <>
struct PlanOf<8192> {
  using P = Plan<8192, 32, 16, 512, 256, 16, 32, 16>;
};
template <>
struct PlanOf<16384> {
  using P = Plan<16384, 32, 32, 512, 512, 16, 32, 32>;
};
template <int N>
using Short = typename PlanOf<N>::P;

// The numbers of Table<P>, in double precision until they are stored.
template <class P>
void fill_table(float *table) {
  auto put = [&](int at, double angle) {
    table[2 * at] = (float)std::cos(angle);
    table[2 * at + 1] = (float)std::sin(angle);
  };
  for (int stage = 0; stage < P::STAGES; stage++) {
    int nodes = Table<P>::nodes(stage), places = Table<P>::places(stage);
    for (int i = 0; i < P::radix(stage) / 2; i++) {
      double part = 1.0 / (1 << level_of(i));
      // number i of one of `count` nodes or places: two numbers in a float4
      auto at = [&](int begin, int count, int which) {
        return 2 * (begin + i / 2 * count + which) + i % 2;
      };
      for (int node = 0; stage > 0 && node < nodes; node++) {
        double angle = (PI / 2 + 2 * PI * reversed(node, log2_of(nodes))) / nodes;
        put(at(Table<P>::forward(stage), nodes, node), angle * part + turned_by(i, false));
      }
      for (int place = 0; stage < P::STAGES - 1 && place < places; place++) {
        double angle = -2 * PI * place / places;
        put(at(Table<P>::inverse(stage), places, place), angle * part + turned_by(i, true));
      }
    }
  }
  for (int t = 0; t < P::T; t++) put(2 * Table<P>::TWIST + t, -PI * t / (2 * P::N));
}

}  // namespace fastattn
