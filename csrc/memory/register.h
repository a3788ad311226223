// What python_api.cpp needs of this folder.
#pragma once

#include <pybind11/pybind11.h>

namespace pearl::memory {

void register_apis(pybind11::module_& m);

}  // namespace pearl::memory
