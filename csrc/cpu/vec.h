// One vector of floats and what the kernels do with it, for the instruction set of the including file (PEARL_ISA_*).
//
//   F, W                           a vector of W floats; + - * / work on it (nothing is contracted: say fma for an fma)
//   zero() broadcast(x)            fma(a, b, c) = a * b + c    max min    hsum hmax
//   load(p) load(p, n)             from float or bf16, any alignment; n < W: the first n, zeros behind them, nothing else read
//   store(p, v) store(p, v, n)     to float or bf16 (nearest, ties to even)
//   load_some(p, n) store_some(p, v, n)   the same for n <= W, fast where n is W
//   exp(v) silu(v)                 within 2e-7 relative; exp(-inf) = 0, exp(large) = inf, NaN stays
//   P                              W pairs of bf16, in memory [W][2]
//   load_pairs(p) broadcast_pair(p) zero_pairs()
//   dot(a, b, acc)                 acc + a[0] * b[0] + a[1] * b[1] in each lane, the same arithmetic at every use
//   transpose<stream>(p, stride, q, other)   word j of row i of W rows, `stride` bytes apart, becomes word i of row j of W rows
//                                  that are `other` bytes apart; `stream`: past the caches, if q is aligned to a vector
//   streamed()                     whoever sees what is written from now on sees what was streamed
#pragma once

#include "cpu/dtype.h"

#if defined(PEARL_ISA_AVX512_BF16) || defined(PEARL_ISA_AVX512)
#include "cpu/vec_avx512.h"
#elif defined(PEARL_ISA_AVX2)
#include "cpu/vec_avx2.h"
#elif defined(PEARL_ISA_PORTABLE)
#include "cpu/vec_portable.h"
#else
#error "name the instruction set"
#endif

// Before a loop over an array that is to be kept in registers: all its rounds are written out.
#if defined(__clang__)
#define PEARL_UNROLL _Pragma("unroll")
#else
#define PEARL_UNROLL _Pragma("GCC unroll 64")
#endif

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

using I = std::int32_t __attribute__((vector_size(sizeof(F))));

template <class T>
static inline F load_some(const T* p, int n) {
    return n == W ? load(p) : load(p, n);
}

template <class T>
static inline void store_some(T* p, F v, int n) {
    if (n == W)
        store(p, v);
    else
        store(p, v, n);
}

// 2^n, n within -126..127.
static inline F power_of_two(I n) { return (F)((n + 127) << 23); }

// Cody and Waite's reduction to |r| <= ln(2)/2, then the polynomial of Moshier's Cephes expf. The power of two is multiplied
// in two halves, so that results below the normal range, and above all, are right too.
static inline F exp(F x) {
    x = min(broadcast(89.0f), max(broadcast(-105.0f), x));
    const F shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    const F shifted = fma(x, broadcast(1.44269504088896341f), shift);
    const F n = shifted - shift;
    const I whole = (I)shifted - (I)shift;
    F r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r) + broadcast(1.0f);
    const I half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
}

static inline F silu(F x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
