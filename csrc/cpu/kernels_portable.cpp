// The CPU kernels for one instruction set; setup.py has the flags.
#define PEARL_ISA_NAMESPACE portable
#define PEARL_ISA_PORTABLE 1
#include "cpu/kernels.inl"
