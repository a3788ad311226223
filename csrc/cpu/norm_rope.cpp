// Shares rows and tokens out over the threads. See norm_rope.h.
#include "cpu/norm_rope.h"

#include <algorithm>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace pearl::cpu {
namespace {

constexpr std::int64_t kChunkNumbers = 16 << 10;  // fewer are computed sooner than a helper comes
constexpr std::int64_t kChunkTokens = 32;         // of those whose heads are rotated and stored

int kind(DType dtype) { return static_cast<int>(dtype); }

template <class Function>
void in_chunks(std::int64_t count, std::int64_t each, const Function& function) {
    parallel((count + each - 1) / each,
             [&](std::int64_t chunk) { function(chunk * each, std::min(count, (chunk + 1) * each)); });
}

std::int64_t rows_at_once(const Rows& rows) {
    return std::max<std::int64_t>(1, kChunkNumbers / std::max<std::int64_t>(1, rows.size));
}

void norm(const Rows& rows, const void* x, void* residual, const void* weight, float eps, void* out) {
    const auto kernel = kernels().norm_rope.norm[kind(rows.dtype)];
    in_chunks(rows.count, rows_at_once(rows), [&](std::int64_t begin, std::int64_t end) {
        kernel(begin, end, rows.size, x, residual, weight, eps, out);
    });
}

}  // namespace

void rms_norm(const Rows& rows, const void* x, const void* weight, float eps, void* out) {
    norm(rows, x, nullptr, weight, eps, out);
}

void add(const Rows& rows, const void* x, void* residual) { norm(rows, x, residual, nullptr, 0.0f, nullptr); }

void add_rms_norm(const Rows& rows, const void* x, void* residual, const void* weight, float eps, void* out) {
    norm(rows, x, residual, weight, eps, out);
}

void silu_and_mul(const Rows& rows, const void* gate_up, void* out) {
    const auto kernel = kernels().norm_rope.silu_and_mul[kind(rows.dtype)];
    in_chunks(rows.count, rows_at_once(rows),
              [&](std::int64_t begin, std::int64_t end) { kernel(begin, end, rows.size, gate_up, out); });
}

void norm_rope(const Rotation& rotation, std::int64_t tokens, const void* x, std::int64_t stride, std::int32_t heads,
               const void* weight, void* out, std::int64_t out_stride) {
    const auto kernel = kernels().norm_rope.norm_rope[kind(rotation.dtype)];
    in_chunks(tokens, kChunkTokens, [&](std::int64_t begin, std::int64_t end) {
        kernel(rotation, begin, end, x, stride, heads, weight, out, out_stride);
    });
}

void store_kv(const KvPool& pool, std::int64_t tokens, const void* k, std::int64_t k_stride, const void* v,
              std::int64_t v_stride, const std::int64_t* slots) {
    const auto kernel = kernels().norm_rope.store_kv[kind(pool.dtype)];
    in_chunks(tokens, kChunkTokens, [&](std::int64_t begin, std::int64_t end) {
        kernel(pool, begin, end, tokens, k, k_stride, v, v_stride, slots);
    });
}

void norm_rope_store(const Rotation& rotation, std::int64_t tokens, void* qkv, std::int64_t stride, std::int32_t heads,
                     const void* q_weight, const void* k_weight, const KvPool& pool, const std::int64_t* slots) {
    const NormRopeKernels& kernel = kernels().norm_rope;
    const int of = kind(rotation.dtype);
    const std::int64_t size = rotation.head_dim * size_of(rotation.dtype);
    char* k = static_cast<char*>(qkv) + heads * size;
    char* v = k + pool.kv_heads * size;
    in_chunks(tokens, kChunkTokens, [&](std::int64_t begin, std::int64_t end) {
        kernel.norm_rope[of](rotation, begin, end, qkv, stride, heads, q_weight, qkv, stride);
        kernel.norm_rope[of](rotation, begin, end, k, stride, pool.kv_heads, k_weight, k, stride);
        kernel.store_kv[of](pool, begin, end, tokens, k, stride, v, stride, slots);
    });
}

}  // namespace pearl::cpu
