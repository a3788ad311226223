// The Python module pearl._C. Each domain registers its own functions; this file only lists them.
#include <pybind11/pybind11.h>

#include "cpu/register.h"
#include "memory/register.h"
#include "migration/register.h"
#include "weights/register.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native parts of PEARL. Pointers and sizes go in, checked before use; no torch, no GPU needed to load.";
    pearl::cpu::register_apis(m);
    pearl::memory::register_apis(m);
    pearl::migration::register_apis(m);
    pearl::weights::register_apis(m);
}
