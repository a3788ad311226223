// The CPU kernels for one instruction set; setup.py has the flags.
#define PEARL_ISA_NAMESPACE avx512_bf16
#define PEARL_ISA_AVX512_BF16 1
#include "cpu/kernels.inl"
