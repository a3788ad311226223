// See norm_rope.h. Included by kernels.inl, once per instruction set.
#pragma once

#include "cpu/attention_tiles.inl"
#include "cpu/norm_rope.h"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

// The vectors of a row: the last one may be short.
template <class Function>
static inline __attribute__((always_inline)) void each_vector(std::int64_t size, Function&& function) {
    std::int64_t i = 0;
    for (; i + W <= size; i += W) function(i, W);
    if (i < size) function(i, static_cast<int>(size - i));
}

// 1 / sqrt(mean of the squares + eps).
template <class T>
static inline F inverse_root(const T* x, std::int64_t size, float eps) {
    F sums[4] = {zero(), zero(), zero(), zero()};
    std::int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const F v = load(x + i + k * W);
            sums[k] = fma(v, v, sums[k]);
        }
    for (; i < size; i += W) {
        const F v = load_some(x + i, size - i < W ? static_cast<int>(size - i) : W);
        sums[0] = fma(v, v, sums[0]);
    }
    const float squares = hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return broadcast(1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + eps));
}

template <class T>
static void norm_rows(std::int64_t begin, std::int64_t end, std::int64_t size, const void* x, void* residual,
                      const void* weight, float eps, void* out) {
    const T* scale = static_cast<const T*>(weight);
    for (std::int64_t row = begin; row < end; ++row) {
        const T* source = static_cast<const T*>(x) + row * size;
        if (residual != nullptr) {
            T* sum = static_cast<T*>(residual) + row * size;
            each_vector(size, [&](std::int64_t i, int n) {
                store_some(sum + i, load_some(source + i, n) + load_some(sum + i, n), n);
            });
            source = sum;
        }
        if (out == nullptr) continue;
        const F by = inverse_root(source, size, eps);
        T* target = static_cast<T*>(out) + row * size;
        each_vector(size, [&](std::int64_t i, int n) {
            store_some(target + i, load_some(source + i, n) * by * load_some(scale + i, n), n);
        });
    }
}

template <class T>
static void silu_and_mul_rows(std::int64_t begin, std::int64_t end, std::int64_t size, const void* gate_up, void* out) {
    for (std::int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(gate_up) + row * 2 * size;
        T* target = static_cast<T*>(out) + row * size;
        each_vector(size, [&](std::int64_t i, int n) {
            store_some(target + i, silu(load_some(gate + i, n)) * load_some(gate + size + i, n), n);
        });
    }
}

// One head: x may be out.
template <class T>
static inline void norm_rope_head(const T* x, const float* cos, const float* sin, const T* weight, int dim, float eps, T* out) {
    const int half = dim / 2;
    const F by = weight == nullptr ? broadcast(1.0f) : inverse_root(x, dim, eps);
    each_vector(half, [&](std::int64_t i, int n) {
        const std::int64_t j = i + half;
        F low = load_some(x + i, n), high = load_some(x + j, n);
        if (weight != nullptr) {
            low = low * by * load_some(weight + i, n);
            high = high * by * load_some(weight + j, n);
        }
        const F low_out = fma(low, load_some(cos + i, n), zero() - high * load_some(sin + i, n));
        const F high_out = fma(high, load_some(cos + j, n), low * load_some(sin + j, n));
        store_some(out + i, low_out, n);
        store_some(out + j, high_out, n);
    });
}

template <class T>
static void norm_rope_tokens(const Rotation& rotation, std::int64_t begin, std::int64_t end, const void* x, std::int64_t stride,
                             std::int32_t heads, const void* weight, void* out, std::int64_t out_stride) {
    const int dim = rotation.head_dim;
    for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t row = (rotation.positions == nullptr ? token : rotation.positions[token]) * dim;
        const T* source = static_cast<const T*>(x) + token * stride;
        T* target = static_cast<T*>(out) + token * out_stride;
        for (int head = 0; head < heads; ++head, source += dim, target += dim)
            norm_rope_head<T>(source, rotation.cos + row, rotation.sin + row, static_cast<const T*>(weight), dim, rotation.eps,
                              target);
    }
}

// ---------------------------------------------------------------- the pool

template <class T>
static inline void store_key(const T* key, int dim, int token, T* tile) {
    constexpr int w = Step<T>::kElements;
    for (int i = 0; i < dim; i += w) std::memcpy(tile + key_place<T>(token, i), key + i, w * sizeof(T));
}

static inline void store_value(const float* value, const float*, int dim, int token, float* tile) {
    std::memcpy(tile + value_place<float>(token, 0, dim), value, sizeof(float) * dim);
}

// A value as its half of a pair; and the one after it (or null) as the other half.
static inline void store_value(const bf16* value, const bf16* later, int dim, int token, bf16* tile) {
    bf16* half = tile + value_place<bf16>(token, 0, dim);
    int i = 0;
    if (later == nullptr) {
        for (; i < dim; ++i) half[2 * i] = value[i];
        return;
    }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    using Bits = std::uint32_t __attribute__((vector_size(sizeof(F))));
    for (; i + W <= dim; i += W) {  // a widened bf16 is its bits in the upper half
        const Bits both = ((Bits)load(value + i) >> 16) | (Bits)load(later + i);
        std::memcpy(half + 2 * i, &both, sizeof both);
    }
#endif
    for (; i < dim; ++i) {
        half[2 * i] = value[i];
        half[2 * i + 1] = later[i];
    }
}

template <class T>
static void store_kv_tokens(const KvPool& pool, std::int64_t begin, std::int64_t end, std::int64_t tokens, const void* k,
                            std::int64_t k_stride, const void* v, std::int64_t v_stride, const std::int64_t* slots) {
    const int dim = pool.head_dim;
    const bool in_tiles = tiled(pool.block_size);
    constexpr bool pairs = Step<T>::kElements == 2;
    for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t slot = slots[t], block = slot / pool.block_size;
        const int offset = static_cast<int>(slot % pool.block_size), token = offset % kTile;
        const bool first = token % 2 == 0;
        const bool with_next = pairs && first && t + 1 < tokens && slots[t + 1] == slot + 1;
        const bool done = pairs && !first && t > 0 && slots[t - 1] == slot - 1;
        for (int head = 0; head < pool.kv_heads; ++head) {
            const T* key = static_cast<const T*>(k) + t * k_stride + static_cast<std::int64_t>(head) * dim;
            const T* value = static_cast<const T*>(v) + t * v_stride + static_cast<std::int64_t>(head) * dim;
            T* keys = static_cast<T*>(pool.keys) + place_of(pool, block, head, in_tiles ? offset - token : offset);
            T* values = static_cast<T*>(pool.values) + place_of(pool, block, head, in_tiles ? offset - token : offset);
            if (!in_tiles) {
                std::memcpy(keys, key, sizeof(T) * dim);
                std::memcpy(values, value, sizeof(T) * dim);
                continue;
            }
            store_key<T>(key, dim, token, keys);
            if (!done) store_value(value, with_next ? value + v_stride : nullptr, dim, token, values);
        }
    }
}

static NormRopeKernels norm_rope_kernels() {
    return {{norm_rows<float>, norm_rows<bf16>},
            {silu_and_mul_rows<float>, silu_and_mul_rows<bf16>},
            {norm_rope_tokens<float>, norm_rope_tokens<bf16>},
            {store_kv_tokens<float>, store_kv_tokens<bf16>}};
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
