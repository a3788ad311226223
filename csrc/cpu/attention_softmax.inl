// From scores to weights, and how what was summed up under one peak is added to what was under another. See attention.inl.
#pragma once

#include "cpu/attention_tiles.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr float kLog2e = 1.44269504088896341f;
// The peak of nothing: far below any, and a number one can reckon with.
constexpr float kNothing = -1e30f;

// x = whole + rest, |rest| <= 1/2, and p * 2^whole.
#if defined(PEARL_ISA_AVX512_BF16) || defined(PEARL_ISA_AVX512)
static inline F rest_of(F x) { return _mm512_reduce_ps(x, 0); }
static inline F times_power(F p, F whole) { return _mm512_scalef_ps(p, whole); }
#else
static inline F rest_of(F x) {
    const F shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return x - ((x + shift) - shift);
}
static inline F times_power(F p, F whole) {
    const F shift = broadcast(12582912.0f);
    return p * power_of_two((I)(whole + shift) - (I)shift);
}
#endif

// 2^x for x <= 0, or something below 2^-124 where that is smaller. Within 1e-7 relative, or 1e-4 if `coarse`, which is far
// below what bf16 keeps (polynomials fitted to the least relative error, 1 at 0). NaN stays.
template <bool coarse>
static inline F exp2_of(F x) {
    if (W < 16) x = max(broadcast(-125.0f), x);  // scalef takes any power
    const F r = rest_of(x);
    F p;
    if constexpr (coarse) {
        p = fma(broadcast(5.500887e-2f), r, broadcast(2.4221101e-1f));
        p = fma(p, r, broadcast(6.9328294e-1f));
    } else {
        p = fma(broadcast(1.32647e-3f), r, broadcast(9.67151e-3f));
        p = fma(p, r, broadcast(5.550734e-2f));
        p = fma(p, r, broadcast(2.4022242e-1f));
        p = fma(p, r, broadcast(6.9314698e-1f));
    }
    return times_power(fma(p, r, broadcast(1.0f)), x - r);
}

static inline I lanes() {
    I index;
    for (int i = 0; i < W; ++i) index[i] = i;
    return index;
}

// x where the lane's number is within first .. end-1, else `other`.
static inline F within(F x, int first, int end, F other) {
    const I index = lanes();
    const I inside = (index >= first) & (index < end);
    return (F)(((I)x & inside) | ((I)other & ~inside));
}

// The sum of a row of weights, as they were rounded. `stop` is a multiple of 32.
static inline float mass_of(const float* weights, int stop) {
    F sum = zero();
    for (int j = 0; j < stop; j += W) sum = sum + load(weights + j);
    return hsum(sum);
}
static inline float mass_of(const bf16* weights, int stop) {
    const bf16 ones[2] = {to_bf16(1.0f), to_bf16(1.0f)};
    const P one = broadcast_pair(ones);
    F sum = zero();
    for (int j = 0; j < stop; j += 2 * W) sum = dot(load_pairs(weights + j), one, sum);
    return hsum(sum);
}

// Weights 2^(scale (score - peak)) of tokens first .. end-1 of a row, zeros elsewhere up to `stop`; returns the scaled peak.
// first < end.
template <class T>
static inline float soften(const float* scores, T* weights, int first, int end, int stop, float scale) {
    const int left = first / W * W, right = end / W * W, inner = (first + W - 1) / W * W;
    const bool left_edge = first % W != 0, right_edge = end % W != 0 && !(left_edge && left == right);
    F best = broadcast(kNothing);
    if (left_edge) best = within(load(scores + left), first - left, end - left, best);
    if (right_edge) best = max(best, within(load(scores + right), first - right, end - right, best));
    for (int j = inner; j < right; j += W) best = max(best, load(scores + j));
    const float peak = hmax(best) * scale;
    const F by = broadcast(scale), down = broadcast(-peak);
    constexpr bool coarse = sizeof(T) == 2;
    for (int j = 0; j < left; j += W) store(weights + j, zero());
    for (int j = left; j < end; j += W) {
        F p = exp2_of<coarse>(fma(load(scores + j), by, down));
        if ((j == left && left_edge) || (j == right && right_edge)) p = within(p, first - j, end - j, zero());
        store(weights + j, p);
    }
    for (int j = (end + W - 1) / W * W; j < stop; j += W) store(weights + j, zero());
    return peak;
}

// The same for a row that sees the whole segment.
template <class T>
static inline float soften_whole(const float* scores, T* weights, float scale) {
    F best[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = load(scores + i * W);
    for (int j = 4 * W; j < kSegment; j += 4 * W)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) best[i] = max(best[i], load(scores + j + i * W));
    const float peak = hmax(max(max(best[0], best[1]), max(best[2], best[3]))) * scale;
    const F by = broadcast(scale), down = broadcast(-peak);
    for (int j = 0; j < kSegment; j += 4 * W)
#pragma GCC unroll 4
        for (int i = 0; i < 4 * W; i += W)
            store(weights + j + i, exp2_of<sizeof(T) == 2>(fma(load(scores + j + i), by, down)));
    return peak;
}

// Puts a peak and a mass per row into the running ones; the factors for the sums so far, and for those that come.
static inline void take_in(const float* peaks, const float* masses, int rows, float* running_peaks, float* running_masses,
                           float* keep, float* add) {
    for (int row = 0; row < rows; row += W) {
        const F before = load(running_peaks + row), peak = load(peaks + row), now = max(before, peak);
        const F kept = exp2_of<false>(before - now), added = exp2_of<false>(peak - now);
        store(running_peaks + row, now);
        store(running_masses + row, fma(load(masses + row), added, load(running_masses + row) * kept));
        store(keep + row, kept);
        store(add + row, added);
    }
}

template <class T>
static void soften_rows(const ItemRows<T>& rows, const Segment<T>& segment, int start) {
    AttentionScratch& scratch = rows.scratch;
    const float scale = rows.all.scale * kLog2e;
    const int stop = (segment.end + 31) / 32 * 32;  // whole vectors, of pairs too
    for (int query = 0; query < rows.item.queries; ++query) {
        const int seen = rows.first(query) - start, until = rows.end(query) - start;
        const int first = seen > 0 ? seen : 0, end = until < segment.end ? until : segment.end;
        for (int row = query * rows.heads; row < (query + 1) * rows.heads; ++row) {
            T* weights = rows.weights + row * kSegment;
            scratch.peaks[2][row] = kNothing;
            if (first == 0 && end == kSegment)
                scratch.peaks[2][row] = soften_whole<T>(scratch.scores + row * kSegment, weights, scale);
            else if (first < end)
                scratch.peaks[2][row] = soften<T>(scratch.scores + row * kSegment, weights, first, end, stop, scale);
            else
                for (int j = 0; j < stop; j += W) store(weights + j, zero());
        }
    }
    for (int row = 0; row < rows.count; ++row) scratch.masses[2][row] = mass_of(rows.weights + row * kSegment, stop);
    take_in(scratch.peaks[2], scratch.masses[2], rows.count, scratch.peaks[0], scratch.masses[0], scratch.keep, scratch.add);
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
