// The kernels of one instruction set, as function pointers. Each kernels_<isa>.cpp fills one table; the rest of the code is
// built for any machine and calls through `kernels()`.
#pragma once

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/moe.h"
#include "cpu/norm_rope.h"
#include "cpu/sampling.h"

namespace pearl::cpu {

struct KernelTable {
    GemmKernels gemm;
    MoeKernels moe;
    AttentionKernels attention;
    NormRopeKernels norm_rope;
    SamplingKernels sampling;
};

// Of the instruction set in use (isa.h).
const KernelTable& kernels();

namespace portable {
KernelTable table();
}
namespace avx2 {
KernelTable table();
}
namespace avx512 {
KernelTable table();
}
namespace avx512_bf16 {
KernelTable table();
}

}  // namespace pearl::cpu
