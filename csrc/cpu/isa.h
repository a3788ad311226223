// Which instruction set the CPU kernels use: the best that this machine has and this build holds, or what PEARL_CPU_ISA says.
#pragma once

#include <string>
#include <vector>

namespace pearl::cpu {

enum class Isa { portable, avx2, avx512, avx512_bf16 };

const char* name(Isa isa);

// Those that were built and that this machine can run, the plainest first.
const std::vector<Isa>& supported_isas();

// The one in use, chosen at the first call. Throws std::invalid_argument if PEARL_CPU_ISA is not the name of a supported one.
Isa isa();

// Takes another one from now on, and returns the one before. For tests: nothing may be running. Throws like isa().
Isa use_isa(const std::string& wanted);

}  // namespace pearl::cpu
