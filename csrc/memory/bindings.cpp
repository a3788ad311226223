// Python names of memory that keeps its address. A region lives as long as Python holds it.
#include <pybind11/pybind11.h>

#include "memory/device_region.h"
#include "memory/register.h"

namespace py = pybind11;

namespace pearl::memory {

#ifdef PEARL_CUDA
void register_apis(py::module_& m) {
    using release = py::call_guard<py::gil_scoped_release>;
    m.def("region_refusal", &region_refusal, py::arg("device"), "Why a GPU cannot have a DeviceRegion, empty if it can.");
    py::class_<DeviceRegion>(m, "DeviceRegion",
                             "Memory of a GPU at an address that stays while the memory is given back and taken again.")
        .def(py::init<std::int64_t, int>(), py::arg("bytes"), py::arg("device"), release())
        .def_property_readonly("address", &DeviceRegion::address)
        .def_property_readonly("bytes", &DeviceRegion::bytes)
        .def_property_readonly("mapped", &DeviceRegion::mapped)
        .def("give_back", &DeviceRegion::give_back, release())
        .def("take", &DeviceRegion::take, release())
        .def("export_file", &DeviceRegion::export_file, release(), "A new descriptor, by which others can map its memory.");
    py::class_<OpenedRegion>(m, "OpenedRegion", "Memory of a region, mapped through its descriptor until it is closed.")
        .def(py::init<int, std::int64_t, int>(), py::arg("file"), py::arg("bytes"), py::arg("device"), release())
        .def_property_readonly("address", &OpenedRegion::address)
        .def("close", &OpenedRegion::close, release());
}
#else
void register_apis(py::module_&) {}
#endif

}  // namespace pearl::memory
