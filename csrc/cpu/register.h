// What the module entry point needs to know of the CPU kernels.
#pragma once

#include <pybind11/pybind11.h>

namespace pearl::cpu {

// Makes the submodule `cpu` and all that is in it.
void register_apis(pybind11::module_& m);

// Its parts.
void register_gemm(pybind11::module_& cpu);
void register_attention(pybind11::module_& cpu);
void register_sampling(pybind11::module_& cpu);
void register_decoder(pybind11::module_& cpu);

}  // namespace pearl::cpu
