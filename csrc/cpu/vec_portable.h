// See vec.h. The vector types of GCC and clang, which they turn into whatever the machine has (SSE2, NEON, plain code).
#pragma once

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr int W = 4;
using F = float __attribute__((vector_size(W * 4)));
using U = std::uint32_t __attribute__((vector_size(W * 4)));
using Half = std::uint16_t __attribute__((vector_size(W * 2)));

static inline F zero() { return F{}; }
static inline F broadcast(float x) { return F{x, x, x, x}; }
static inline F fma(F a, F b, F c) { return a * b + c; }
static inline F max(F a, F b) { return a > b ? a : b; }
static inline F min(F a, F b) { return a < b ? a : b; }
static inline float hsum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float hmax(F v) {
    const float even = v[0] > v[2] ? v[0] : v[2], odd = v[1] > v[3] ? v[1] : v[3];
    return even > odd ? even : odd;
}

static inline F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline F load(const float* p, int n) {
    F v{};
    std::memcpy(&v, p, static_cast<std::size_t>(n) * sizeof(float));
    return v;
}
static inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
static inline void store(float* p, F v, int n) { std::memcpy(p, &v, static_cast<std::size_t>(n) * sizeof(float)); }

static inline F widen(Half v) { return (F)(__builtin_convertvector(v, U) << 16); }

static inline Half narrow(F v) {
    const U bits = (U)v;
    const U rounded = bits + ((bits >> 16) & 1) + 0x7fff;
    const U nan = (U)(v != v);
    return __builtin_convertvector(((rounded & ~nan) | ((bits | 0x400000) & nan)) >> 16, Half);
}

static inline F load(const bf16* p) {
    Half v;
    std::memcpy(&v, p, sizeof v);
    return widen(v);
}
static inline F load(const bf16* p, int n) {
    Half v{};
    std::memcpy(&v, p, static_cast<std::size_t>(n) * sizeof(bf16));
    return widen(v);
}
static inline void store(bf16* p, F v) {
    const Half narrowed = narrow(v);
    std::memcpy(p, &narrowed, sizeof narrowed);
}
static inline void store(bf16* p, F v, int n) {
    const Half narrowed = narrow(v);
    std::memcpy(p, &narrowed, static_cast<std::size_t>(n) * sizeof(bf16));
}

template <bool stream>
static inline void transpose(const char* rows, std::int64_t stride, char* columns, std::int64_t other) {
    std::uint32_t words[W][W];
    for (int i = 0; i < W; ++i) std::memcpy(words[i], rows + i * stride, sizeof words[i]);
    for (int j = 0; j < W; ++j)
        for (int i = 0; i < W; ++i) std::memcpy(columns + j * other + i * 4, &words[i][j], 4);
}
static inline void streamed() {}

struct P {
    F even, odd;
};
// The first of a pair is the lower half of the 32 bits on a little-endian machine, the upper on a big-endian one.
static inline P widen_pairs(U bits) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return {(F)(bits & 0xffff0000u), (F)(bits << 16)};
#else
    return {(F)(bits << 16), (F)(bits & 0xffff0000u)};
#endif
}
static inline P load_pairs(const bf16* p) {
    U bits;
    std::memcpy(&bits, p, sizeof bits);
    return widen_pairs(bits);
}
static inline P broadcast_pair(const bf16* p) {
    std::uint32_t both;
    std::memcpy(&both, p, sizeof both);
    return widen_pairs(U{both, both, both, both});
}
static inline P zero_pairs() { return {zero(), zero()}; }
static inline F dot(P a, P b, F acc) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
