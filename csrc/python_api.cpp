// The Python module pearl._C. Each domain registers its own functions; this file only lists them.
#include <pybind11/pybind11.h>

#include "migration/register.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native parts of PEARL. Pointers and sizes go in, checked before use; no torch, no GPU needed to load.";
    pearl::migration::register_apis(m);
}
