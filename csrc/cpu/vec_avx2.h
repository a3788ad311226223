// See vec.h. AVX2 with FMA.
#pragma once

#include <immintrin.h>

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

using F = __m256;
constexpr int W = 8;

static inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline F zero() { return _mm256_setzero_ps(); }
static inline F broadcast(float x) { return _mm256_set1_ps(x); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
static inline F min(F a, F b) { return _mm256_min_ps(a, b); }

static inline float hsum(F v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float hmax(F v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline F load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
static inline void store(float* p, F v, int n) { _mm256_maskstore_ps(p, first(n), v); }

static inline F widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }

static inline __m128i narrow(F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

static inline F load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline F load(const bf16* p, int n) {
    alignas(16) bf16 part[W] = {};
    std::memcpy(part, p, static_cast<std::size_t>(n) * sizeof(bf16));
    return load(part);
}
static inline void store(bf16* p, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v)); }
static inline void store(bf16* p, F v, int n) {
    alignas(16) bf16 part[W];
    store(part, v);
    std::memcpy(p, part, static_cast<std::size_t>(n) * sizeof(bf16));
}

template <bool stream>
static inline void transpose(const char* rows, std::int64_t stride, char* columns, std::int64_t other) {
    __m256i a[W], b[W];
    for (int i = 0; i < W; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i * stride));
    for (int i = 0; i < W; i += 2) {  // pairs of rows: words, then pairs of words
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < W; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int j = 0; j < W; ++j) {  // a[4 g + j]: in half h word 4 h + j of rows 4 g .. 4 g + 3
        const __m256i column = j < 4 ? _mm256_permute2x128_si256(a[j], a[4 + j], 0x20)
                                     : _mm256_permute2x128_si256(a[j - 4], a[j], 0x31);
        auto* target = reinterpret_cast<__m256i*>(columns + j * other);
        if constexpr (stream)
            _mm256_stream_si256(target, column);
        else
            _mm256_storeu_si256(target, column);
    }
}
static inline void streamed() { _mm_sfence(); }

struct P {
    F even, odd;
};
static inline P widen_pairs(__m256i bits) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
static inline P load_pairs(const bf16* p) {
    return widen_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline P broadcast_pair(const bf16* p) {
    std::int32_t both;
    std::memcpy(&both, p, sizeof both);
    return widen_pairs(_mm256_set1_epi32(both));
}
static inline P zero_pairs() { return {zero(), zero()}; }
static inline F dot(P a, P b, F acc) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
