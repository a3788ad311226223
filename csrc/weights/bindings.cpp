// Python names of the passes over messages of weights. Addresses and sizes in, nothing kept.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "weights/register.h"
#include "weights/seal.h"

namespace py = pybind11;

namespace pearl::weights {
namespace {

using Given = std::tuple<std::uintptr_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;  // address, shape, strides

Tensor tensor_of(Given given) {
    return {std::get<0>(given), std::move(std::get<1>(given)), std::move(std::get<2>(given))};
}

std::vector<Tensor> tensors_of(std::vector<Given> given) {
    std::vector<Tensor> tensors;
    tensors.reserve(given.size());
    for (Given& one : given) tensors.push_back(tensor_of(std::move(one)));
    return tensors;
}

std::vector<Place> places_of(const std::vector<std::int64_t>& offsets, std::vector<Given> given) {
    if (offsets.size() != given.size()) throw std::invalid_argument("offsets and tensors: must be as many");
    std::vector<Place> places;
    places.reserve(given.size());
    for (std::size_t i = 0; i < given.size(); ++i) places.push_back({offsets[i], tensor_of(std::move(given[i]))});
    return places;
}

// Tensors on their way into a message, checked once and put as often as wanted. Refers to the memory of both.
struct Putting {
    std::uintptr_t message;
    std::int64_t bytes;
    std::vector<Place> places;
    Number from, to;

    Totals put() const { return weights::put(message, bytes, places, from, to); }
};

py::tuple told(const Totals& totals) { return py::make_tuple(totals.sum, totals.finite); }

}  // namespace

void register_apis(py::module_& m) {
    using release = py::call_guard<py::gil_scoped_release>;
    py::enum_<Number>(m, "Number", "Kinds of floating-point numbers.")
        .value("float64", Number::f64)
        .value("float32", Number::f32)
        .value("float16", Number::f16)
        .value("bfloat16", Number::bf16);
    py::class_<Putting>(m, "Putting", "Tensors on their way into a message; refers to the memory of both.")
        .def(
            "put",
            [](const Putting& self) {
                Totals totals;
                {
                    py::gil_scoped_release unlocked;
                    totals = self.put();
                }
                return told(totals);
            },
            "Puts what they hold now: (the sum of their 64-bit words, all finite).");
    m.def(
        "putting",
        [](std::uintptr_t message, std::int64_t bytes, const std::vector<std::int64_t>& offsets, std::vector<Given> tensors,
           Number from, Number to) {
            return Putting{message, bytes, places_of(offsets, std::move(tensors)), from, to};
        },
        py::arg("message"), py::arg("bytes"), py::arg("offsets"), py::arg("tensors"), py::arg("source"), py::arg("target"),
        "What puts tensors (address, shape, strides) at the offsets, converted.");
    m.def("seal_message", &seal, py::arg("message"), py::arg("bytes"), py::arg("version"), py::arg("sum"), py::arg("gaps"),
          release(), "The header of a message whose numbers have that sum; the gaps (begin, end) become zero.");
    m.def(
        "take_message",
        [](std::uintptr_t message, std::int64_t bytes, const std::vector<std::int64_t>& offsets, std::vector<Given> tensors,
           Number kind) {
            const std::vector<Place> places = places_of(offsets, std::move(tensors));
            Verdict verdict;
            {
                py::gil_scoped_release unlocked;
                verdict = take(message, bytes, places, kind);
            }
            return py::make_tuple(verdict.intact, verdict.version, verdict.refusal_bytes, verdict.finite);
        },
        py::arg("message"), py::arg("bytes"), py::arg("offsets"), py::arg("tensors"), py::arg("kind"),
        "(intact, version, bytes of a refusal, finite); what lies at the offsets is copied to the tensors.");
    m.def(
        "copy_tensors",
        [](std::vector<Given> targets, std::vector<Given> sources, Number from, Number to) {
            const std::vector<Tensor> into = tensors_of(std::move(targets)), out_of = tensors_of(std::move(sources));
            py::gil_scoped_release unlocked;
            return copy(into, out_of, from, to);
        },
        py::arg("targets"), py::arg("sources"), py::arg("source"), py::arg("target"),
        "Copies each source to its target, converted; whether all is finite.");
    m.def(
        "look_at_tensors",
        [](std::vector<Given> tensors, Number from, Number to) {
            const std::vector<Tensor> seen = tensors_of(std::move(tensors));
            py::gil_scoped_release unlocked;
            return look(seen, from, to);
        },
        py::arg("tensors"), py::arg("source"), py::arg("target"), "Whether all of it would be finite.");
    m.def("converts", &converts, py::arg("source"), py::arg("target"), release(),
          "Whether such numbers can be converted here.");
}

}  // namespace pearl::weights
