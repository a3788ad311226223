// See sampling.h. Included by kernels.inl, once per instruction set.
#pragma once

#include "cpu/sampling.h"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr float kLowest = -__builtin_huge_valf();

static float peak(const float* x, std::int64_t n, bool* finite) {
    F best[4], product[4];
    for (int k = 0; k < 4; ++k) {
        best[k] = broadcast(kLowest);
        product[k] = zero();
    }
    std::int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const F v = load(x + i + k * W);
            best[k] = max(best[k], v);
            product[k] = fma(v, zero(), product[k]);  // NaN and infinity times 0 are NaN
        }
    float greatest = hmax(max(max(best[0], best[1]), max(best[2], best[3])));
    float products = hsum((product[0] + product[1]) + (product[2] + product[3]));
    for (; i < n; ++i) {
        greatest = x[i] > greatest ? x[i] : greatest;
        products += x[i] * 0.0f;
    }
    *finite = products == 0.0f;
    return greatest;
}

static void peaks(const float* x, std::int64_t n, float* greatest) {
    std::int64_t i = 0;
    for (; i + kPeakBlock <= n; i += kPeakBlock) {
        F best = load(x + i);
        for (int k = W; k < kPeakBlock; k += W) best = max(best, load(x + i + k));
        *greatest++ = hmax(best);
    }
    if (i == n) return;
    *greatest = kLowest;
    for (; i < n; ++i) *greatest = x[i] > *greatest ? x[i] : *greatest;
}

static double mass(const float* x, std::int64_t n, float shift, double* sums, float* shares) {
    const F by = broadcast(shift);
    double all = 0.0;
    for (std::int64_t begin = 0; begin < n; begin += kSumBlock) {
        const std::int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
        F part = zero();
        std::int64_t i = begin;
        for (; i + W <= end; i += W) {
            const F share = exp(load(x + i) - by);
            if (shares != nullptr) store(shares + i, share);
            part = part + share;
        }
        double sum = hsum(part);
        if (i < end) {
            const int rest = static_cast<int>(end - i);
            alignas(64) float last[W];
            store(last, exp(load(x + i, rest) - by));
            for (int k = 0; k < rest; ++k) {
                if (shares != nullptr) shares[i + k] = last[k];
                sum += last[k];
            }
        }
        *sums++ = sum;
        all += sum;
    }
    return all;
}

static void scale(const float* x, std::int64_t n, float shift, float by, float* y) {
    const F down = broadcast(shift), divisor = broadcast(by);
    std::int64_t i = 0;
    for (; i + W <= n; i += W) store(y + i, (load(x + i) - down) / divisor);
    for (; i < n; ++i) y[i] = (x[i] - shift) / by;
}

// Two vectors' worth of doubles for one of floats.
using Doubles = double __attribute__((vector_size(sizeof(F))));
using Longs = std::int64_t __attribute__((vector_size(sizeof(F))));
using HalfF = float __attribute__((vector_size(sizeof(F) / 2)));
constexpr int kDoubles = W / 2;

// exp(x[0 .. kDoubles-1]) for x <= 0, below e^-700 zero: the Taylor polynomial after Cody and Waite's reduction, within 1e-15.
static inline __attribute__((always_inline)) void exp_doubles(const float* x, double* y) {
    constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, which is then in the low bits
    HalfF narrow;
    std::memcpy(&narrow, x, sizeof narrow);
    const Doubles v = __builtin_convertvector(narrow, Doubles);
    const Doubles shifted = v * 1.4426950408889634074 + shift, whole = shifted - shift;
    Doubles r = v - whole * 6.93145751953125e-1;
    r = r - whole * 1.42860682030941723212e-6;
    Doubles p = r * (1.0 / 479001600.0) + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const Longs power = ((Longs)shifted << 52) + (std::int64_t{1023} << 52);
    const Doubles result = (Doubles)((Longs)(p * (Doubles)power) & (Longs)(v > -700.0));
    std::memcpy(y, &result, sizeof result);
}

static void block_sums(const float* x, std::int64_t n, float shift, float log_mass, double* sums, double* shares) {
    const F down = broadcast(shift), further = broadcast(log_mass);
    alignas(64) float logs[W];
    alignas(64) double part[W];
    for (std::int64_t begin = 0; begin < n; begin += kSumBlock) {
        const std::int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
        Doubles sum[2] = {};
        for (std::int64_t i = begin; i < end; i += W) {
            const int some = end - i < W ? static_cast<int>(end - i) : W;
            store(logs, load_some(x + i, some) - down - further);
            for (int k = some; k < W; ++k) logs[k] = kLowest;
            exp_doubles(logs, part);
            exp_doubles(logs + kDoubles, part + kDoubles);
            for (int k = 0; k < 2; ++k) {
                Doubles next;
                std::memcpy(&next, part + k * kDoubles, sizeof next);
                sum[k] = sum[k] + next;
            }
            if (shares != nullptr) std::memcpy(shares + (i - begin), part, some * sizeof(double));
        }
        double total = 0.0;
        for (int k = 0; k < kDoubles; ++k) total += sum[0][k] + sum[1][k];
        *sums++ = total;
    }
}

static SamplingKernels sampling_kernels() { return {peak, peaks, mass, scale, block_sums}; }

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
