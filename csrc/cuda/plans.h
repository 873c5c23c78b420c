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
  using P = Plan<256, 16, 16, 768, 512, 16, 16>;
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
  using P = Plan<2048, 16, 16, 768, 512, 16, 16, 8>;
};
template <>
struct PlanOf<4096> {
  using P = Plan<4096, 16, 16, 768, 512, 16, 16, 16>;
};
template <>
struct PlanOf<8192> {
  using P = Plan<8192, 32, 16, 512, 512, 16, 32, 16>;
};
template <>
struct PlanOf<16384> {
  using P = Plan<16384, 32, 32, 512, 512, 16, 32, 32>;
};
template <int N>
using Short = typename PlanOf<N>::P;

// The plan of a part of a row.
template <class P>
using PartOf = Short<P::N / P::PARTS>;

// All numbers that kernels of a plan read, in float4.
template <class P>
ANYWHERE int numbers_of() {
  return Table<P>::COUNT + (P::PARTS > 1 ? P::PARTS * PartTable<PartOf<P>>::COUNT : 0);
}

// exp(i angle) as number `at` of a table of pairs.
inline void put_root(float *table, int at, double angle) {
  table[2 * at] = (float)std::cos(angle);
  table[2 * at + 1] = (float)std::sin(angle);
}

// The angles of the nodes that a stage of R leaves has in a tree whose root's is `angle`.
template <class P>
void fill_nodes(float *table, int begin, int stage, double root) {
  const int nodes = Table<P>::nodes(stage);
  for (int node = 0; node < nodes; node++)
    for (int i = 0; i < P::radix(stage) / 2; i++) {
      double angle = (root + 2 * PI * reversed(node, log2_of(nodes))) / nodes;
      put_root(table, 2 * (begin + i / 2 * nodes + node) + i % 2,
               angle / (1 << level_of(i)) + turned_by(i, false));
    }
}

// The numbers of PartTable<M>.
template <class M>
void fill_part(float *table, double root) {
  for (int q = 0; q < PartTable<M>::POWERS; q++) put_root(table, q, q * root);
  for (int stage = 0; stage < M::STAGES; stage++)
    fill_nodes<M>(table, PartTable<M>::forward(stage), stage, root);
}

// The numbers of Table<P>, in double precision until they are stored, and behind them those of
// parts.
template <class P>
void fill_table(float *table) {
  for (int stage = 1; stage < P::STAGES; stage++)
    fill_nodes<P>(table, Table<P>::forward(stage), stage, PI / 2);
  for (int stage = 0; stage < P::STAGES - 1; stage++) {
    const int places = Table<P>::places(stage), begin = Table<P>::inverse(stage);
    for (int place = 0; place < places; place++)
      for (int i = 0; i < P::radix(stage) / 2; i++)
        put_root(table, 2 * (begin + i / 2 * places + place) + i % 2,
                 -2 * PI * place / places / (1 << level_of(i)) + turned_by(i, true));
  }
  for (int t = 0; t < P::T; t++) put_root(table, 2 * Table<P>::TWIST + t, -PI * t / (2 * P::N));
  if constexpr (P::PARTS > 1)
    for (int part = 0; part < P::PARTS; part++)
      fill_part<PartOf<P>>(table + 4 * (Table<P>::COUNT + part * PartTable<PartOf<P>>::COUNT),
                           (PI / 2 + 2 * PI * reversed(part, log2_of(P::PARTS))) / P::PARTS);
}

}  // namespace fastattn
