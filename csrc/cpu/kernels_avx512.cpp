// The CPU kernels for one instruction set; setup.py has the flags.
#define PEARL_ISA_NAMESPACE avx512
#define PEARL_ISA_AVX512 1
#include "cpu/kernels.inl"
