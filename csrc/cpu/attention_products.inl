// The two products of attention, scores = Q K^T and sums = keep * sums + add * (weights V): the same loop, a few rows times a
// few vectors of accumulators, one step after the other. See attention.inl.
#pragma once

#include "cpu/attention_tiles.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

// Rows and vectors of accumulators that fit the registers.
#if defined(PEARL_ISA_AVX512_BF16)
constexpr int kBlockRows = 6, kBlockVectors = 4;
#elif defined(PEARL_ISA_AVX512)
constexpr int kBlockRows = 4, kBlockVectors = 4;
#else
constexpr int kBlockRows = 4, kBlockVectors = 2;
#endif
constexpr int kLevel = 2;  // ahead means a segment: to the second-level cache, the first has no room for two

// ---------------------------------------------------------------- scores

template <class T, int R, int V, bool fetch>
static inline void multiply_keys(const T* const* queries, const T* const* keys, const T* const* ahead, int steps,
                                 float* scores) {
    constexpr int w = Step<T>::kElements;
    F sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = zero();
    const T* q_rows[R];
    for (int r = 0; r < R; ++r) q_rows[r] = queries[r];
    std::int64_t at = 0;
    for (std::int64_t s = 0; s < steps; ++s, at += kTile * w) {
        typename Step<T>::V k[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            k[v] = Step<T>::weights(keys[v] + at);
            if (fetch && v % kVectorsPerTile == 0) __builtin_prefetch(ahead[v / kVectorsPerTile] + at, 0, kLevel);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto q = Step<T>::everywhere(q_rows[r] + s * w);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sum[r][v] = Step<T>::add(q, k[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(scores + r * kSegment + v * W, sum[r][v]);
}

template <class T, int V, bool fetch>
static inline void score_block(int rows, const T* const* queries, const T* const* keys, const T* const* ahead, int steps,
                               float* scores) {
    static_assert(kBlockRows <= 6, "one case per number of rows");
    switch (rows) {
        case 1: return multiply_keys<T, 1, V, fetch>(queries, keys, ahead, steps, scores);
        case 2: return multiply_keys<T, 2, V, fetch>(queries, keys, ahead, steps, scores);
        case 3: return multiply_keys<T, 3, V, fetch>(queries, keys, ahead, steps, scores);
        case 4: return multiply_keys<T, 4, V, fetch>(queries, keys, ahead, steps, scores);
        case 5:
            if constexpr (kBlockRows >= 5) return multiply_keys<T, 5, V, fetch>(queries, keys, ahead, steps, scores);
            return;
        default:
            if constexpr (kBlockRows >= 6) return multiply_keys<T, 6, V, fetch>(queries, keys, ahead, steps, scores);
    }
}

// Scores of all tiles of the segment; those of tokens outside it are whatever they are.
template <class T, bool fetch>
static void score(const ItemRows<T>& rows, const Segment<T>& segment, const Ahead<T>& ahead) {
    constexpr int w = Step<T>::kElements;
    const int end = segment.end_tile() * kVectorsPerTile;
    int vector = segment.first_tile() * kVectorsPerTile;
    for (; vector < end;) {
        const int together = end - vector >= kBlockVectors ? kBlockVectors : 1;
        const T* keys[kBlockVectors];
        for (int v = 0; v < together; ++v)
            keys[v] = segment.keys[(vector + v) / kVectorsPerTile] + (vector + v) % kVectorsPerTile * W * w;
        const T* const* fetched = ahead.keys + vector / kVectorsPerTile;
        for (int row = 0; row < rows.count; row += kBlockRows) {
            const int block = rows.count - row < kBlockRows ? rows.count - row : kBlockRows;
            const T* const* queries = rows.queries + row;
            float* scores = rows.scratch.scores + row * kSegment + vector * W;
            if (together == 1)
                score_block<T, 1, false>(block, queries, keys, fetched, rows.steps, scores);
            else if (fetch && row == 0)
                score_block<T, kBlockVectors, fetch>(block, queries, keys, fetched, rows.steps, scores);
            else
                score_block<T, kBlockVectors, false>(block, queries, keys, fetched, rows.steps, scores);
        }
        vector += together;
    }
}

// ---------------------------------------------------------------- sums

template <class T, int R, int V, bool fetch>
static inline void multiply_values(const T* weights, const Segment<T>& segment, const Ahead<T>& ahead, int column, int dim,
                                   float* sums, const float* keep, const float* add) {
    constexpr int w = Step<T>::kElements, tile_steps = kTile / w;
    F sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = zero();
    const int last = (segment.end + w - 1) / w;
    for (int s = segment.first / w; s < last;) {
        const int tile = s / tile_steps, stop = (tile + 1) * tile_steps < last ? (tile + 1) * tile_steps : last;
        const std::int64_t skipped = (static_cast<std::int64_t>(s % tile_steps) * dim + column) * w;
        const T* values = segment.values[tile] + skipped;
        const T* fetched = ahead.values[tile] + skipped;
        for (; s < stop; ++s, values += dim * w, fetched += dim * w) {
            typename Step<T>::V x[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                x[v] = Step<T>::weights(values + v * W * w);
                if (fetch && v % kVectorsPerTile == 0) __builtin_prefetch(fetched + v * W * w, 0, kLevel);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto p = Step<T>::everywhere(weights + r * kSegment + s * w);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = Step<T>::add(p, x[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            float* target = sums + static_cast<std::int64_t>(r) * dim + v * W;
            store(target, fma(sum[r][v], broadcast(add[r]), load(target) * broadcast(keep[r])));
        }
}

template <class T, int V, bool fetch>
static inline void sum_block(int rows, const T* weights, const Segment<T>& segment, const Ahead<T>& ahead, int column, int dim,
                             float* sums, const float* keep, const float* add) {
    switch (rows) {
        case 1: return multiply_values<T, 1, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
        case 2: return multiply_values<T, 2, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
        case 3: return multiply_values<T, 3, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
        case 4: return multiply_values<T, 4, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
        case 5:
            if constexpr (kBlockRows >= 5)
                return multiply_values<T, 5, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
            return;
        default:
            if constexpr (kBlockRows >= 6)
                return multiply_values<T, 6, V, fetch>(weights, segment, ahead, column, dim, sums, keep, add);
    }
}

template <class T, bool fetch>
static void add_values(const ItemRows<T>& rows, const Segment<T>& segment, const Ahead<T>& ahead) {
    const AttentionScratch& scratch = rows.scratch;
    const int dim = rows.padded_dim, end = dim / W;
    for (int row = 0; row < rows.count; row += kBlockRows) {
        const int block = rows.count - row < kBlockRows ? rows.count - row : kBlockRows;
        const T* weights = rows.weights + row * kSegment;
        float* sums = rows.scratch.sums[0] + static_cast<std::int64_t>(row) * dim;
        const float *keep = scratch.keep + row, *add = scratch.add + row;
        for (int vector = 0; vector < end;) {
            const int column = vector * W, together = end - vector >= kBlockVectors ? kBlockVectors : 1;
            if (together == 1)
                sum_block<T, 1, false>(block, weights, segment, ahead, column, dim, sums + column, keep, add);
            else if (fetch && row == 0)
                sum_block<T, kBlockVectors, fetch>(block, weights, segment, ahead, column, dim, sums + column, keep, add);
            else
                sum_block<T, kBlockVectors, false>(block, weights, segment, ahead, column, dim, sums + column, keep, add);
            vector += together;
        }
    }
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
