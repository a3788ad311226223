// The body of every kernels_<isa>.cpp: all kernels, built for the instruction set that the file names.
//
// Whatever is in an .inl file, and vec*.h, lives in PEARL_ISA_NAMESPACE and uses no inline function or template of others
// that could be emitted on its own (no containers, no std::function): the linker keeps one copy of such a function, and it
// must not be one that needs AVX-512.
#include "cpu/table.h"
#include "cpu/vec.h"

#include "cpu/attention.inl"
#include "cpu/gemm.inl"
#include "cpu/pack.inl"
#include "cpu/moe.inl"
#include "cpu/norm_rope.inl"
#include "cpu/sampling.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

KernelTable table() {
    KernelTable t{};
    t.gemm = {&pack, &unpack, &run};
    t.moe = moe_kernels();
    t.attention = attention_kernels();
    t.norm_rope = norm_rope_kernels();
    t.sampling = sampling_kernels();
    return t;
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
