// What a decoder does between its products: norms, the addition to the residual stream, SiLU, rotary embedding, and the writing
// of keys and values into the pool. All run inside `parallel` where there is enough to do; a row's numbers depend on itself.
//
// Everything is computed in fp32 and rounded to the dtype once; a sum with the residual is rounded first, as the stream is,
// and its norm is taken of what was rounded. Pointers are to numbers of the dtype unless they say otherwise.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/dtype.h"

namespace pearl::cpu {

// Contiguous rows of `size` numbers.
struct Rows {
    std::int64_t count, size;
    DType dtype;
};

// out = x / sqrt(mean(x^2) + eps) * weight, row by row; out may be x.
void rms_norm(const Rows& rows, const void* x, const void* weight, float eps, void* out);

// residual += x.
void add(const Rows& rows, const void* x, void* residual);

// residual += x, out = rms_norm(residual); out may be x.
void add_rms_norm(const Rows& rows, const void* x, void* residual, const void* weight, float eps, void* out);

// gate_up has rows of 2 * rows.size numbers, out of rows.size: silu(first half) * second half.
void silu_and_mul(const Rows& rows, const void* gate_up, void* out);

// Rotary embedding by half-split pairs, before it a norm of each head where there is a weight.
struct Rotation {
    const float* cos;               // [positions, head_dim]
    const float* sin;
    const std::int64_t* positions;  // of each token; null: token t is row t of the tables
    std::int32_t head_dim;          // even
    float eps;
    DType dtype;
};

// `heads` heads of head_dim numbers per token, tokens `stride` numbers apart; out may be x. weight: [head_dim] or null.
void norm_rope(const Rotation& rotation, std::int64_t tokens, const void* x, std::int64_t stride, std::int32_t heads,
               const void* weight, void* out, std::int64_t out_stride);

// Puts [kv_heads, head_dim] keys and values per token into the pool, token t into slots[t] = block * block_size + offset.
void store_kv(const KvPool& pool, std::int64_t tokens, const void* k, std::int64_t k_stride, const void* v,
              std::int64_t v_stride, const std::int64_t* slots);

// A fused projection's rows, [heads + 2 * kv_heads, head_dim] per token: queries and keys are normed and rotated where they
// lie, keys and values stored in the pool.
void norm_rope_store(const Rotation& rotation, std::int64_t tokens, void* qkv, std::int64_t stride, std::int32_t heads,
                     const void* q_weight, const void* k_weight, const KvPool& pool, const std::int64_t* slots);

// What each instruction set brings, by DType; rows (tokens) begin .. end-1.
struct NormRopeKernels {
    // residual null: none to add. out null: no norm.
    void (*norm[2])(std::int64_t begin, std::int64_t end, std::int64_t size, const void* x, void* residual, const void* weight,
                    float eps, void* out);
    void (*silu_and_mul[2])(std::int64_t begin, std::int64_t end, std::int64_t size, const void* gate_up, void* out);
    void (*norm_rope[2])(const Rotation& rotation, std::int64_t begin, std::int64_t end, const void* x, std::int64_t stride,
                         std::int32_t heads, const void* weight, void* out, std::int64_t out_stride);
    // Reads slots [begin-1 .. end] within 0 .. tokens-1: the later token of a pair is written by whoever has the earlier one.
    void (*store_kv[2])(const KvPool& pool, std::int64_t begin, std::int64_t end, std::int64_t tokens, const void* k,
                        std::int64_t k_stride, const void* v, std::int64_t v_stride, const std::int64_t* slots);
};

}  // namespace pearl::cpu
