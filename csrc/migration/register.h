// What the module entry point needs to know of this domain.
#pragma once

#include <pybind11/pybind11.h>

namespace pearl::migration {

void register_apis(pybind11::module_& m);

}  // namespace pearl::migration
