// Python names of the instruction sets, the threads, the matrix products and the mixtures of experts. Addresses and sizes are
// checked as far as they can be; the caller owns all memory and keeps it alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "cpu/moe.h"
#include "cpu/register.h"
#include "cpu/threads.h"

namespace py = pybind11;

namespace pearl::cpu {
namespace {

constexpr std::uintptr_t kAlignment = 64;

template <class Value>
Value named(const char* field, const std::string& wanted, const std::map<std::string, Value>& values) {
    const auto found = values.find(wanted);
    if (found != values.end()) return found->second;
    std::string valid;
    for (const auto& [name, value] : values) valid += (valid.empty() ? "" : ", ") + name;
    throw std::invalid_argument(std::string(field) + "=" + wanted + ": must be one of " + valid);
}

DType dtype_named(const std::string& name) {
    return named<DType>("dtype", name, {{"float32", DType::f32}, {"bfloat16", DType::bf16}});
}

void at_least(const char* field, std::int64_t value, std::int64_t low) {
    if (value < low)
        throw std::invalid_argument(std::string(field) + "=" + std::to_string(value) + ": must be >= " + std::to_string(low));
}

void check_aligned(const char* field, std::uintptr_t address) {
    if (address == 0 || address % kAlignment != 0)
        throw std::invalid_argument(std::string(field) + ": must be the address of memory aligned to 64 bytes");
}

void check_given(const char* field, std::uintptr_t address) {
    if (address == 0) throw std::invalid_argument(std::string(field) + ": must be an address, got none");
}

void check_shape(std::int64_t n, std::int64_t k, bool halves) {
    at_least("n", n, 1);
    at_least("k", k, 1);
    if (halves && n % 2 != 0) throw std::invalid_argument("n=" + std::to_string(n) + ": must be even to have two halves");
}

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

PackedMatrix pack_checked(std::uintptr_t weight, std::int64_t n, std::int64_t k, const std::string& dtype, bool halves,
                          std::uintptr_t dst, std::int64_t bytes) {
    const DType type = dtype_named(dtype);
    check_shape(n, k, halves);
    check_given("weight", weight);
    check_aligned("dst", dst);
    at_least("bytes", bytes, static_cast<std::int64_t>(packed_bytes(n, k, type, halves)));
    py::gil_scoped_release unlocked;
    return pack(pointer<const void>(weight), k, n, k, type, halves, pointer<void>(dst));
}

void gemm_checked(std::uintptr_t x, std::int64_t rows, std::int64_t x_stride, const PackedMatrix& weight, std::uintptr_t y,
                  std::int64_t y_stride, const std::string& epilogue, std::uintptr_t bias, std::uintptr_t residual,
                  std::int64_t residual_stride) {
    const auto kind = named<Epilogue>("epilogue", epilogue,
                                      {{"none", Epilogue::none},
                                       {"residual", Epilogue::residual},
                                       {"silu_mul", Epilogue::silu_mul},
                                       {"wide", Epilogue::wide}});
    const bool halves = kind == Epilogue::silu_mul;
    at_least("rows", rows, 0);
    if (rows == 0) return;
    check_given("x", x);
    check_given("y", y);
    at_least("x_stride", x_stride, weight.k);
    at_least("y_stride", y_stride, halves ? weight.n / 2 : weight.n);
    if (halves != weight.halves)
        throw std::invalid_argument("epilogue=" + epilogue + ": must be silu_mul for a weight in halves, and only for one");
    if (kind == Epilogue::residual) {
        check_given("residual", residual);
        at_least("residual_stride", residual_stride, weight.n);
    }
    GemmArguments a{pointer<const void>(x), rows, x_stride, weight, kind};
    a.bias = pointer<const void>(bias);
    a.residual = pointer<const void>(residual);
    a.residual_stride = residual_stride;
    a.y = pointer<void>(y);
    a.y_stride = y_stride;
    py::gil_scoped_release unlocked;
    gemm(a);
}

void check_expert(const PackedMatrix& router, const PackedMatrix& gate_up, const PackedMatrix& down, std::int64_t inner) {
    if (gate_up.dtype != router.dtype || down.dtype != router.dtype || gate_up.k != router.k || down.n != router.k ||
        down.k != inner || gate_up.n != 2 * inner || !gate_up.halves || down.halves)
        throw std::invalid_argument(
            "experts: each must have gate_up [2 inner, hidden] in halves and down [hidden, inner], of the router's dtype and "
            "hidden size and all of one inner size");
}

void moe_checked(std::uintptr_t x, std::int64_t rows, const PackedMatrix& router, const std::vector<PackedMatrix>& gate_up,
                 const std::vector<PackedMatrix>& down, std::int64_t first, std::int64_t top_k, bool normalise,
                 std::uintptr_t y) {
    const auto here = static_cast<std::int64_t>(gate_up.size());
    if (gate_up.size() != down.size()) throw std::invalid_argument("down: must have as many experts as gate_up");
    at_least("rows", rows, 0);
    at_least("first", first, 0);
    at_least("experts of the router", router.n, first + here);
    at_least("top_k", top_k, 1);
    at_least("experts of the router", router.n, top_k);
    for (std::size_t e = 0; e < gate_up.size(); ++e) check_expert(router, gate_up[e], down[e], down[0].k);
    if (router.halves) throw std::invalid_argument("router: must not be packed in halves");
    if (rows == 0) return;
    check_given("x", x);
    check_given("y", y);
    py::gil_scoped_release unlocked;
    MoeArguments a{pointer<const void>(x), rows, router.k, router, gate_up.data(), down.data(), first, here, top_k, normalise};
    a.y = pointer<void>(y);
    a.y_stride = router.k;
    std::vector<char> scratch(moe_scratch_bytes(a) + kAlignment);
    a.scratch = pointer<void>((reinterpret_cast<std::uintptr_t>(scratch.data()) + kAlignment - 1) / kAlignment * kAlignment);
    moe(a);
}

// How often each chunk ran; chunk `fail_at` throws.
std::vector<int> count_chunks(std::int64_t chunks, std::int64_t fail_at) {
    at_least("chunks", chunks, 0);
    std::vector<int> counts(static_cast<std::size_t>(chunks));
    parallel(chunks, [&](std::int64_t chunk) {
        if (chunk == fail_at) throw std::runtime_error("chunk " + std::to_string(chunk) + " failed");
        ++counts[static_cast<std::size_t>(chunk)];
    });
    return counts;
}

void register_machine(py::module_& m) {
    m.def("isa", [] { return name(isa()); }, "Name of the instruction set in use.");
    m.def("use_isa", [](const std::string& wanted) { return name(use_isa(wanted)); }, py::arg("wanted"),
          "Takes another instruction set from now on (for tests; nothing may be running); returns the one before.");
    m.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (const Isa one : supported_isas()) names.emplace_back(name(one));
            return names;
        },
        "Names of those that were built and that this machine can run, the plainest first.");
    m.def("set_threads", &set_threads, py::arg("count"), "Threads that work on a loop, the caller among them.");
    m.def("threads", &threads);
    m.def("count_chunks", &count_chunks, py::arg("chunks"), py::arg("fail_at") = -1,
          py::call_guard<py::gil_scoped_release>(), "Runs an empty loop: how often each chunk ran (a check of the threads).");
}

}  // namespace

void register_gemm(py::module_& m) {
    register_machine(m);
    py::class_<PackedMatrix>(m, "PackedMatrix", "A weight [n, k] in the order that the products read; refers to the memory.")
        .def_readonly("n", &PackedMatrix::n)
        .def_readonly("k", &PackedMatrix::k)
        .def_readonly("halves", &PackedMatrix::halves);
    m.def(
        "packed_bytes",
        [](std::int64_t n, std::int64_t k, const std::string& dtype, bool halves) {
            check_shape(n, k, halves);
            return packed_bytes(n, k, dtype_named(dtype), halves);
        },
        py::arg("n"), py::arg("k"), py::arg("dtype"), py::arg("halves") = false, "Bytes that `pack` writes.");
    m.def("pack", &pack_checked, py::arg("weight"), py::arg("n"), py::arg("k"), py::arg("dtype"), py::arg("halves"),
          py::arg("dst"), py::arg("bytes"), "Packs the contiguous weight [n, k] into dst.");
    m.def("gemm", &gemm_checked, py::arg("x"), py::arg("rows"), py::arg("x_stride"), py::arg("weight"), py::arg("y"),
          py::arg("y_stride"), py::arg("epilogue") = "none", py::arg("bias") = 0, py::arg("residual") = 0,
          py::arg("residual_stride") = 0, "y = x W^T + bias, and what the epilogue says (csrc/cpu/gemm.h).");
    m.def("moe", &moe_checked, py::arg("x"), py::arg("rows"), py::arg("router"), py::arg("gate_up"), py::arg("down"),
          py::arg("first"), py::arg("top_k"), py::arg("normalise"), py::arg("y"),
          "y [rows, hidden]: the sum of the experts' MLPs times their shares (csrc/cpu/moe.h).");
}

}  // namespace pearl::cpu
