// Matrix products with weights that were packed beforehand: y = x W^T, with what follows a product in a decoder done to the
// sums before they are rounded once.
//
// A weight [n, k] is cut into panels of 48 rows, a panel being [k/2][48][2] in bf16 and [k][48] in fp32, padded with zeros to
// whole panels (and, in bf16, an even k). Gate and up halves may alternate, panel by panel, for `silu_mul`.
// Invariant: an output is one sum, over k in order, in one fp32 accumulator (bf16: by pairs). So its bits depend on its row of
// x and its row of W alone: not on the other rows, their number, or who computed it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/dtype.h"

namespace pearl::cpu {

constexpr std::int64_t kPanel = 48;  // rows of W, which are columns of y

struct PackedMatrix {
    const void* data = nullptr;  // 64-byte aligned
    std::int64_t n = 0, k = 0;   // of the plain weight
    DType dtype = DType::f32;
    bool halves = false;         // panels of the first n/2 rows alternate with those of the others
};

// Bytes that `pack` writes. `halves`: see PackedMatrix; n must be even then.
std::size_t packed_bytes(std::int64_t n, std::int64_t k, DType dtype, bool halves);

// Packs the row-major weight [n, k], rows `stride` elements apart. `dst` is 64-byte aligned.
PackedMatrix pack(const void* weight, std::int64_t stride, std::int64_t n, std::int64_t k, DType dtype, bool halves, void* dst);

// Packs rows row_begin .. row_end-1 of the weight, of which the first lies at `rows`. Padding is left as it is: it must be
// zeros before the first product. `stream`: past the caches, which are of more use to others than a large weight's end.
void pack_rows(const PackedMatrix& packed, std::int64_t row_begin, std::int64_t row_end, const void* rows, std::int64_t stride,
               bool stream = false);

// The way back, bit for bit: writes these rows of the row-major weight, one after the other.
void unpack_rows(const PackedMatrix& packed, std::int64_t row_begin, std::int64_t row_end, void* rows);

enum class Epilogue : std::int32_t {
    none,      // y [rows, n] in the dtype of the weights
    residual,  // y = residual + x W^T; y may be the residual itself
    silu_mul,  // y [rows, n/2] = silu(first half) * second half; the packed weight has `halves`
    wide,      // y [rows, n] in fp32
};

struct GemmArguments {
    const void* x = nullptr;         // [rows, k] in the dtype of the weights
    std::int64_t rows = 0;
    std::int64_t x_stride = 0;       // in elements, like the others
    PackedMatrix weight;
    Epilogue epilogue = Epilogue::none;
    const void* bias = nullptr;      // [n] in the dtype of the weights, or none; added first of all
    const void* residual = nullptr;  // [rows, n]
    std::int64_t residual_stride = 0;
    void* y = nullptr;
    std::int64_t y_stride = 0;
    const std::int32_t* x_rows = nullptr;  // row i is row x_rows[i] of x; none: row i
    const std::int32_t* y_rows = nullptr;  // likewise for y and the residual
};

// One product, on as many threads as there are (threads.h).
void gemm(const GemmArguments& arguments);

// Several products as one loop over all their chunks: no waiting between them. None may read what another one writes.
void gemm_all(const GemmArguments* arguments, std::int64_t count);

// What each instruction set brings. A group is a panel, or a pair of panels where the weight has halves.
struct GemmKernels {
    // Packs rows row_begin .. row_end-1 of the weight, of which the first lies at `rows`; and unpacks them, without gaps.
    void (*pack)(const void* rows, std::int64_t stride, const PackedMatrix& packed, std::int64_t row_begin,
                 std::int64_t row_end, bool stream);
    void (*unpack)(const PackedMatrix& packed, std::int64_t row_begin, std::int64_t row_end, void* rows);
    // Computes rows row_begin .. row_end-1 of the outputs of groups group_begin .. group_end-1.
    void (*run)(const GemmArguments& arguments, std::int64_t row_begin, std::int64_t row_end, std::int64_t group_begin,
                std::int64_t group_end);
};

}  // namespace pearl::cpu
