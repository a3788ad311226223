// See vec.h. AVX-512 F, BW, DQ and VL, with or without BF16.
#pragma once

#include <immintrin.h>

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

using F = __m512;
constexpr int W = 16;

static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

static inline F zero() { return _mm512_setzero_ps(); }
static inline F broadcast(float x) { return _mm512_set1_ps(x); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline float hsum(F v) { return _mm512_reduce_add_ps(v); }
static inline float hmax(F v) { return _mm512_reduce_max_ps(v); }

static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
static inline void store(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

static inline F widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

#if defined(PEARL_ISA_AVX512_BF16)
static inline __m256i narrow(F v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
static inline __m256i narrow(F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
#endif

static inline F load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
static inline F load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
static inline void store(bf16* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
static inline void store(bf16* p, F v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(v)); }

static inline __m512i broadcast_bits(const bf16* p) {
    std::int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}

template <bool stream>
static inline void transpose(const char* rows, std::int64_t stride, char* columns, std::int64_t other) {
    __m512i a[W], b[W];
    for (int i = 0; i < W; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < W; i += 2) {  // pairs of rows: words, then pairs of words
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < W; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {  // a[4 g + j]: in quarter q word 4 q + j of rows 4 g .. 4 g + 3
        const __m512i upper_even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        const __m512i upper_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i lower_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i lower_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(upper_even, lower_even, 0x88);
        b[4 + j] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(upper_even, lower_even, 0xdd);
        b[12 + j] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0xdd);
    }
    for (int j = 0; j < W; ++j) {
        if constexpr (stream)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(columns + j * other), b[j]);
        else
            _mm512_storeu_si512(columns + j * other, b[j]);
    }
}
static inline void streamed() { _mm_sfence(); }

#if defined(PEARL_ISA_AVX512_BF16)
using P = __m512bh;
static inline P load_pairs(const bf16* p) { return (P)_mm512_loadu_si512(p); }
static inline P broadcast_pair(const bf16* p) { return (P)broadcast_bits(p); }
static inline P zero_pairs() { return (P)_mm512_setzero_si512(); }
static inline F dot(P a, P b, F acc) { return _mm512_dpbf16_ps(acc, a, b); }
#else
struct P {
    F even, odd;
};
static inline P widen_pairs(__m512i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
static inline P load_pairs(const bf16* p) { return widen_pairs(_mm512_loadu_si512(p)); }
static inline P broadcast_pair(const bf16* p) { return widen_pairs(broadcast_bits(p)); }
static inline P zero_pairs() { return {zero(), zero()}; }
static inline F dot(P a, P b, F acc) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }
#endif

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
