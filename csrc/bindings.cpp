// The native part for Python: raw pointers and sizes go in, an error comes out as an exception.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fastattn/fft_conv.h"
#include "fastattn/pathfinder.h"

namespace py = pybind11;

using Tensor = std::optional<std::tuple<uintptr_t, int64_t, int64_t, int64_t>>;

static fa_tensor tensor(const Tensor &x) {
  if (!x) return {nullptr, 0, 0, 0};
  auto [data, b, c, n] = *x;
  return {reinterpret_cast<void *>(data), b, c, n};
}

template <class T>
static T *pointer(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

// Calls f() without the interpreter's lock.
template <class F>
static void check(F f, const char *what = "convolution") {
  fa_status status;
  {
    py::gil_scoped_release released;
    status = f();
  }
  if (status == FA_OUT_OF_MEMORY) throw std::bad_alloc();
  if (status != FA_OK)
    throw std::runtime_error(std::string(what) + ": " + fa_status_string(status));
}

static bool has_instructions() {
#if defined(__GNUC__) && defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastattn's native part; see csrc/include/fastattn.";
  m.def("cpu_refusal", [] {
    return has_instructions() ? std::string() : std::string("the processor has no AVX2");
  });
  m.def("cuda_refusal", [] {
    fa_status status = fa_cuda_available();
    return status == FA_OK ? std::string() : std::string(fa_status_string(status));
  });

  py::class_<fa_conv_shape>(m, "ConvShape")
      .def(py::init([](int64_t batch, int64_t channels, int64_t group, int64_t n, int64_t out,
                       int64_t first, int64_t count, bool mirrored, int type) {
             return fa_conv_shape{batch, channels, group,         n, out, first,
                                  count, mirrored, (fa_type)type, 0, 1,   0};
           }),
           py::arg("batch"), py::arg("channels"), py::arg("group"), py::arg("n"), py::arg("out"),
           py::arg("first"), py::arg("count"), py::arg("mirrored"), py::arg("type"))
      .def_readwrite("length", &fa_conv_shape::length)
      .def_readwrite("slices", &fa_conv_shape::slices)
      .def_readwrite("valid", &fa_conv_shape::valid);
  m.def("conv_valid", [](const fa_conv_shape &shape) { return fa_conv_valid(&shape); });
  m.def("conv_cpu_slices", [](const fa_conv_shape &shape, int threads) {
    return fa_conv_cpu_slices(&shape, threads);
  });
  m.def("conv_longest", [](int device) {
    int64_t longest = 0;
    check([&] { return fa_conv_longest(device, &longest); });
    return longest;
  });
  m.def("conv_length", [](const fa_conv_shape &shape) { return fa_conv_length(&shape); });
  m.def("conv_table_size", &fa_conv_table_size);
  m.def("conv_table", [](int64_t length, uintptr_t table) {
    check([&] { return fa_conv_table(length, pointer<float>(table)); });
  });
  m.def("conv_workspace", [](const fa_conv_shape &shape, bool backward, int device) {
    return fa_conv_workspace(&shape, backward, device);
  });

  m.def("conv_cuda",
        [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post, Tensor y, uintptr_t taps,
           uintptr_t skip, uintptr_t table, uintptr_t workspace, int device, uintptr_t stream) {
          check([&] {
            return fa_conv_cuda(&shape, tensor(u), tensor(pre), tensor(post), tensor(y),
                                pointer<float>(taps), pointer<float>(skip), pointer<float>(table),
                                pointer<float>(workspace), device, pointer<void>(stream));
          });
        });
  m.def("conv_backward_cuda", [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post,
                                 Tensor dy, Tensor du, Tensor dpre, Tensor dpost, uintptr_t taps,
                                 uintptr_t skip, uintptr_t dtaps, uintptr_t dskip, uintptr_t table,
                                 uintptr_t workspace, int device, uintptr_t stream) {
    check([&] {
      return fa_conv_backward_cuda(&shape, tensor(u), tensor(pre), tensor(post), tensor(dy),
                                   tensor(du), tensor(dpre), tensor(dpost), pointer<float>(taps),
                                   pointer<float>(skip), pointer<float>(dtaps),
                                   pointer<float>(dskip), pointer<float>(table),
                                   pointer<float>(workspace), device, pointer<void>(stream));
    });
  });
  m.def("correlate_cuda",
        [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post, Tensor dy,
           uintptr_t dtaps, uintptr_t table, uintptr_t workspace, int device, uintptr_t stream) {
          check([&] {
            return fa_correlate_cuda(&shape, tensor(u), tensor(pre), tensor(post), tensor(dy),
                                     pointer<float>(dtaps), pointer<float>(table),
                                     pointer<float>(workspace), device, pointer<void>(stream));
          });
        });
  m.def("conv_cpu", [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post, Tensor y,
                       uintptr_t taps, uintptr_t skip, int threads) {
    check([&] {
      return fa_conv_cpu(&shape, tensor(u), tensor(pre), tensor(post), tensor(y),
                         pointer<float>(taps), pointer<float>(skip), threads);
    });
  });
  m.def("correlate_cpu", [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post,
                            Tensor dy, uintptr_t dtaps, int threads) {
    check([&] {
      return fa_correlate_cpu(&shape, tensor(u), tensor(pre), tensor(post), tensor(dy),
                              pointer<float>(dtaps), threads);
    });
  });
  m.def("conv_backward_cpu", [](const fa_conv_shape &shape, Tensor u, Tensor pre, Tensor post,
                                Tensor dy, Tensor du, Tensor dpre, Tensor dpost, uintptr_t taps,
                                uintptr_t skip, uintptr_t dtaps, uintptr_t dskip, int threads) {
    check([&] {
      return fa_conv_backward_cpu(&shape, tensor(u), tensor(pre), tensor(post), tensor(dy),
                                  tensor(du), tensor(dpre), tensor(dpost), pointer<float>(taps),
                                  pointer<float>(skip), pointer<float>(dtaps),
                                  pointer<float>(dskip), threads);
    });
  });

  py::class_<fa_pathfinder_tables>(m, "PathfinderTables")
      .def(py::init([](int margin, int places, int width, int sprites, uintptr_t around,
                       uintptr_t weights, uintptr_t steps, uintptr_t heads, uintptr_t pivots,
                       uintptr_t starts, uintptr_t footprint, uintptr_t footprint_at,
                       uintptr_t sprite_of, uintptr_t pictures) {
        return fa_pathfinder_tables{margin,
                                    places,
                                    width,
                                    sprites,
                                    pointer<int32_t>(around),
                                    pointer<uint32_t>(weights),
                                    pointer<int32_t>(steps),
                                    pointer<int32_t>(heads),
                                    pointer<int32_t>(pivots),
                                    pointer<int32_t>(starts),
                                    pointer<int32_t>(footprint),
                                    pointer<int32_t>(footprint_at),
                                    pointer<int32_t>(sprite_of),
                                    pointer<uint8_t>(pictures)};
      }));
  m.def("pathfinder_draw",
        [](int size, int padding, int contour_length, int distractor_length, int distractors,
           uint32_t contour_ink, uint32_t distractor_ink, int disc_width, uintptr_t disc,
           uintptr_t ring, const std::vector<fa_pathfinder_tables> &tables, uint64_t key,
           int64_t first, int64_t count, int threads, uintptr_t images, uintptr_t labels,
           uintptr_t margins, uintptr_t attempts, uintptr_t found) {
          fa_pathfinder settings{size,
                                 padding,
                                 contour_length,
                                 distractor_length,
                                 distractors,
                                 contour_ink,
                                 distractor_ink,
                                 disc_width,
                                 pointer<uint8_t>(disc),
                                 pointer<int32_t>(ring),
                                 static_cast<int32_t>(tables.size()),
                                 tables.data()};
          check(
              [&] {
                return fa_pathfinder_draw(&settings, key, first, count, threads,
                                          pointer<uint8_t>(images), pointer<uint8_t>(labels),
                                          pointer<int32_t>(margins), pointer<int32_t>(attempts),
                                          pointer<int32_t>(found));
              },
              "pathfinder");
        });
}
