// The submodule pearl._C.cpu.
#include "cpu/register.h"

namespace pearl::cpu {

void register_apis(pybind11::module_& m) {
    pybind11::module_ cpu = m.def_submodule("cpu", "Kernels of the engine on CPUs. Addresses and sizes go in.");
    register_gemm(cpu);
    register_attention(cpu);
    register_sampling(cpu);
    register_decoder(cpu);
}

}  // namespace pearl::cpu
