// See isa.h. PEARL_CPU_AVX2 and its like are defined by setup.py for what the compiler could build.
#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>

#include "cpu/table.h"

namespace pearl::cpu {
namespace {

std::vector<Isa> find_supported() {
    std::vector<Isa> found{Isa::portable};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    (void)avx512;
#ifdef PEARL_CPU_AVX2
    if (avx2) found.push_back(Isa::avx2);
#endif
#ifdef PEARL_CPU_AVX512
    if (avx512) found.push_back(Isa::avx512);
#endif
#ifdef PEARL_CPU_AVX512_BF16
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(Isa::avx512_bf16);
#endif
#endif
    return found;
}

Isa parse(const std::string& source, const std::string& wanted) {
    std::string valid;
    for (const Isa candidate : supported_isas()) {
        if (wanted == name(candidate)) return candidate;
        valid += (valid.empty() ? "" : ", ") + std::string(name(candidate));
    }
    throw std::invalid_argument(source + "=" + wanted + ": must be one of those this build and this machine have: " + valid);
}

Isa choose() {
    const char* wanted = std::getenv("PEARL_CPU_ISA");
    return wanted == nullptr || *wanted == '\0' ? supported_isas().back() : parse("PEARL_CPU_ISA", wanted);
}

KernelTable table_of(Isa isa) {
    switch (isa) {
#ifdef PEARL_CPU_AVX2
        case Isa::avx2: return avx2::table();
#endif
#ifdef PEARL_CPU_AVX512
        case Isa::avx512: return avx512::table();
#endif
#ifdef PEARL_CPU_AVX512_BF16
        case Isa::avx512_bf16: return avx512_bf16::table();
#endif
        default: return portable::table();
    }
}

struct Choice {
    Isa isa;
    KernelTable table;
    explicit Choice(Isa chosen) : isa(chosen), table(table_of(chosen)) {}
};

Choice& choice() {
    static Choice one(choose());  // made again at the next call if this throws
    return one;
}

}  // namespace

const char* name(Isa isa) {
    switch (isa) {
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
        default: return "portable";
    }
}

const std::vector<Isa>& supported_isas() {
    static const std::vector<Isa> found = find_supported();
    return found;
}

Isa isa() { return choice().isa; }

Isa use_isa(const std::string& wanted) {
    const Isa before = isa();
    choice() = Choice(parse("isa", wanted));
    return before;
}

const KernelTable& kernels() { return choice().table; }

}  // namespace pearl::cpu
