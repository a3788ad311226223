// The CPU kernels for one instruction set; setup.py has the flags.
#define PEARL_ISA_NAMESPACE avx2
#define PEARL_ISA_AVX2 1
#include "cpu/kernels.inl"
