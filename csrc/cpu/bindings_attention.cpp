// Python names of attention, norms and rotary embedding. Addresses and sizes are checked as far as they can be; the caller
// owns all memory and keeps it alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/norm_rope.h"
#include "cpu/register.h"

namespace py = pybind11;

namespace pearl::cpu {
namespace {

DType dtype_of(const std::string& name) {
    if (name == "float32") return DType::f32;
    if (name == "bfloat16") return DType::bf16;
    throw std::invalid_argument("dtype=" + name + ": must be float32 or bfloat16");
}

void at_least(const char* field, std::int64_t value, std::int64_t low) {
    if (value < low)
        throw std::invalid_argument(std::string(field) + "=" + std::to_string(value) + ": must be >= " + std::to_string(low));
}

template <class T>
T* pointer(const char* field, std::uintptr_t address) {
    if (address == 0) throw std::invalid_argument(std::string(field) + ": must be an address, got none");
    return reinterpret_cast<T*>(address);
}

template <class T>
T* pointer_or_none(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// One layer of a pool kv[2][blocks][kv_heads][block_size * head_dim].
KvPool pool_of(std::uintptr_t kv, std::int64_t blocks, std::int32_t kv_heads, std::int32_t block_size, std::int32_t head_dim,
               const std::string& dtype) {
    const DType type = dtype_of(dtype);
    at_least("blocks", blocks, 1);
    at_least("kv_heads", kv_heads, 1);
    at_least("block_size", block_size, 1);
    at_least("head_dim", head_dim, 1);
    char* keys = pointer<char>("kv", kv);
    const std::int64_t half = blocks * kv_heads * block_size * head_dim * size_of(type);
    return {keys, keys + half, blocks, kv_heads, block_size, head_dim, type};
}

// Query starts and context lengths must fit the queries, block ids the pool.
void check_batch(const PagedBatch& batch, std::int64_t tokens, const KvPool& pool) {
    const auto refuse = [](const std::string& text) { throw std::invalid_argument(text); };
    if (batch.query_starts[0] != 0 || batch.query_starts[batch.sequences] != tokens)
        refuse("query_starts: must begin with 0 and end with the number of queries, " + std::to_string(tokens));
    for (std::int32_t s = 0; s < batch.sequences; ++s) {
        const std::string at = " of sequence " + std::to_string(s);
        const std::int32_t queries = batch.query_starts[s + 1] - batch.query_starts[s], context = batch.context_lens[s];
        if (queries < 0 || queries > context)
            refuse("queries=" + std::to_string(queries) + at + ": must be from 0 to its context of " + std::to_string(context));
        const std::int64_t blocks = (static_cast<std::int64_t>(context) + pool.block_size - 1) / pool.block_size;
        if (queries > 0 && blocks > batch.table_stride)
            refuse("context_lens=" + std::to_string(context) + at + ": its block table has " +
                   std::to_string(batch.table_stride) + " blocks of " + std::to_string(pool.block_size));
        for (std::int64_t i = 0; queries > 0 && i < blocks; ++i) {
            const std::int32_t block = batch.block_tables[s * batch.table_stride + i];
            if (block < 0 || block >= pool.blocks)
                refuse("block_tables=" + std::to_string(block) + at + ": must be from 0 to " + std::to_string(pool.blocks - 1));
        }
    }
}

void check_slots(const KvPool& pool, std::int64_t tokens, const std::int64_t* slots) {
    for (std::int64_t t = 0; t < tokens; ++t)
        if (slots[t] < 0 || slots[t] >= pool.blocks * pool.block_size)
            throw std::invalid_argument("slots=" + std::to_string(slots[t]) + " of token " + std::to_string(t) +
                                        ": must be from 0 to " + std::to_string(pool.blocks * pool.block_size - 1));
}

void check_rotation(const Rotation& rotation) {
    if (rotation.head_dim < 2 || rotation.head_dim % 2 != 0)
        throw std::invalid_argument("head_dim=" + std::to_string(rotation.head_dim) + ": must be even");
}

// Contiguous queries and outputs [tokens, heads, head_dim].
void attention_checked(std::uintptr_t q, std::int64_t tokens, std::int32_t heads, const KvPool& pool,
                       std::uintptr_t query_starts, std::uintptr_t context_lens, std::uintptr_t block_tables,
                       std::int64_t table_stride, std::int32_t sequences, float scale, std::int32_t window,
                       std::uintptr_t out) {
    at_least("tokens", tokens, 0);
    at_least("sequences", sequences, 0);
    if (tokens == 0 || sequences == 0) return;
    const PagedBatch batch{pointer<const std::int32_t>("query_starts", query_starts),
                           pointer<const std::int32_t>("context_lens", context_lens),
                           pointer<const std::int32_t>("block_tables", block_tables), table_stride, sequences};
    check_batch(batch, tokens, pool);
    const std::int64_t stride = static_cast<std::int64_t>(heads) * pool.head_dim;
    const Attention attention{pool,  batch,  heads, scale, window, pointer<const void>("q", q), stride,
                              pointer<void>("out", out), stride};
    py::gil_scoped_release unlocked;
    paged_attention(attention);
}

Rows rows_of(std::int64_t count, std::int64_t size, const std::string& dtype) {
    at_least("count", count, 0);
    at_least("size", size, 1);
    return {count, size, dtype_of(dtype)};
}

void norm_checked(std::int64_t count, std::int64_t size, const std::string& dtype, std::uintptr_t x, std::uintptr_t residual,
                  std::uintptr_t weight, float eps, std::uintptr_t out) {
    const Rows rows = rows_of(count, size, dtype);
    if (count == 0) return;
    const auto* source = pointer<const void>("x", x);
    const auto* scale = pointer<const void>("weight", weight);
    auto* target = pointer<void>("out", out);
    py::gil_scoped_release unlocked;
    if (residual == 0)
        rms_norm(rows, source, scale, eps, target);
    else
        add_rms_norm(rows, source, pointer_or_none<void>(residual), scale, eps, target);
}

void register_pool(py::module_& m) {
    py::class_<KvPool>(m, "KvPool", "One layer kv[2][blocks][kv_heads][block_size * head_dim] of a pool; refers to the memory.")
        .def(py::init(&pool_of), py::arg("kv"), py::arg("blocks"), py::arg("kv_heads"), py::arg("block_size"),
             py::arg("head_dim"), py::arg("dtype"));
    m.def(
        "kv_layout", [](const std::string& dtype, std::int64_t block_size) { return kv_layout(dtype_of(dtype), block_size); },
        py::arg("dtype"), py::arg("block_size"), "The order of numbers inside a (block, kv_head), see csrc/cpu/attention.h.");
    m.def(
        "store_kv",
        [](const KvPool& pool, std::int64_t tokens, std::uintptr_t k, std::uintptr_t v, std::uintptr_t slots) {
            at_least("tokens", tokens, 0);
            if (tokens == 0) return;
            const auto* places = pointer<const std::int64_t>("slots", slots);
            check_slots(pool, tokens, places);
            const auto *keys = pointer<const void>("k", k), *values = pointer<const void>("v", v);
            const std::int64_t stride = static_cast<std::int64_t>(pool.kv_heads) * pool.head_dim;
            py::gil_scoped_release unlocked;
            store_kv(pool, tokens, keys, stride, values, stride, places);
        },
        py::arg("pool"), py::arg("tokens"), py::arg("k"), py::arg("v"), py::arg("slots"),
        "Contiguous keys and values [tokens, kv_heads, head_dim] to their int64 slots.");
    m.def("paged_attention", &attention_checked, py::arg("q"), py::arg("tokens"), py::arg("heads"), py::arg("pool"),
          py::arg("query_starts"), py::arg("context_lens"), py::arg("block_tables"), py::arg("table_stride"),
          py::arg("sequences"), py::arg("scale"), py::arg("window"), py::arg("out"),
          "Causal attention of contiguous queries [tokens, heads, head_dim]; int32 starts, lengths and block tables.");
}

void register_rows(py::module_& m) {
    m.def("rms_norm", &norm_checked, py::arg("count"), py::arg("size"), py::arg("dtype"), py::arg("x"), py::arg("residual"),
          py::arg("weight"), py::arg("eps"), py::arg("out"),
          "Norms of rows; with a residual (not 0), x is added to it first and the norm taken of the sum.");
    m.def(
        "silu_and_mul",
        [](std::int64_t count, std::int64_t size, const std::string& dtype, std::uintptr_t gate_up, std::uintptr_t out) {
            const Rows rows = rows_of(count, size, dtype);
            if (count == 0) return;
            const auto* source = pointer<const void>("gate_up", gate_up);
            auto* target = pointer<void>("out", out);
            py::gil_scoped_release unlocked;
            silu_and_mul(rows, source, target);
        },
        py::arg("count"), py::arg("size"), py::arg("dtype"), py::arg("gate_up"), py::arg("out"),
        "silu(first half) * second half of rows of 2 * size numbers.");
    m.def(
        "norm_rope",
        [](std::int64_t tokens, std::int32_t heads, std::int32_t head_dim, const std::string& dtype, std::uintptr_t x,
           std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t weight, float eps, std::uintptr_t out) {
            at_least("tokens", tokens, 0);
            at_least("heads", heads, 1);
            if (tokens == 0) return;
            const Rotation rotation{pointer<const float>("cos", cos), pointer<const float>("sin", sin), nullptr, head_dim, eps,
                                    dtype_of(dtype)};
            check_rotation(rotation);
            const auto* source = pointer<const void>("x", x);
            auto* target = pointer<void>("out", out);
            const std::int64_t stride = static_cast<std::int64_t>(heads) * head_dim;
            py::gil_scoped_release unlocked;
            norm_rope(rotation, tokens, source, stride, heads, pointer_or_none<const void>(weight), target, stride);
        },
        py::arg("tokens"), py::arg("heads"), py::arg("head_dim"), py::arg("dtype"), py::arg("x"), py::arg("cos"),
        py::arg("sin"), py::arg("weight"), py::arg("eps"), py::arg("out"),
        "Contiguous heads [tokens, heads, head_dim], normed where there is a weight (not 0), rotated by [tokens, head_dim].");
    m.def(
        "norm_rope_store",
        [](std::int64_t tokens, std::int32_t heads, std::uintptr_t qkv, std::uintptr_t positions, std::uintptr_t cos,
           std::uintptr_t sin, std::uintptr_t q_weight, std::uintptr_t k_weight, float eps, const KvPool& pool,
           std::uintptr_t slots) {
            at_least("tokens", tokens, 0);
            at_least("heads", heads, 1);
            if (tokens == 0) return;
            const Rotation rotation{pointer<const float>("cos", cos), pointer<const float>("sin", sin),
                                    pointer<const std::int64_t>("positions", positions), pool.head_dim, eps, pool.dtype};
            check_rotation(rotation);
            const auto* places = pointer<const std::int64_t>("slots", slots);
            check_slots(pool, tokens, places);
            auto* rows = pointer<void>("qkv", qkv);
            const std::int64_t stride = static_cast<std::int64_t>(heads + 2 * pool.kv_heads) * pool.head_dim;
            py::gil_scoped_release unlocked;
            norm_rope_store(rotation, tokens, rows, stride, heads, pointer_or_none<const void>(q_weight),
                            pointer_or_none<const void>(k_weight), pool, places);
        },
        py::arg("tokens"), py::arg("heads"), py::arg("qkv"), py::arg("positions"), py::arg("cos"), py::arg("sin"),
        py::arg("q_weight"), py::arg("k_weight"), py::arg("eps"), py::arg("pool"), py::arg("slots"),
        "The rows [tokens, heads + 2 kv_heads, head_dim] of a fused projection: rotated in place, keys and values stored.");
}

}  // namespace

void register_attention(py::module_& m) {
    register_pool(m);
    register_rows(m);
}

}  // namespace pearl::cpu
