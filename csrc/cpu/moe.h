// A mixture of experts: which experts a token goes to, and the sum of their MLPs.
//
// The router's softmax is over all experts, in fp32; the `top_k` greatest remain (of equals the lowest number), divided by
// their sum if `normalise`. An expert's products run on the tokens that came to it, all experts in one loop; a token's results,
// in fp32, are added up in the order of its experts and rounded once. So its bits do not depend on the batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/gemm.h"

namespace pearl::cpu {

struct MoeArguments {
    const void* x = nullptr;  // [rows, hidden]
    std::int64_t rows = 0;
    std::int64_t x_stride = 0;
    PackedMatrix router;                    // [experts, hidden]
    const PackedMatrix* gate_up = nullptr;  // of each expert here: [2 inner, hidden], with halves
    const PackedMatrix* down = nullptr;     // of each expert here: [hidden, inner]
    std::int64_t first = 0, here = 0;       // the experts here are numbers first .. first+here-1; what others add is left out
    std::int64_t top_k = 0;
    bool normalise = false;
    void* y = nullptr;  // [rows, hidden], not x
    std::int64_t y_stride = 0;
    void* scratch = nullptr;  // moe_scratch_bytes(...), 64-byte aligned
};

std::size_t moe_scratch_bytes(const MoeArguments& arguments);

void moe(const MoeArguments& arguments);

struct MoeKernels {
    // Of `rows` rows of logits [rows, experts]: numbers and shares [rows, top_k]. The logits are overwritten.
    void (*route)(float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k, bool normalise,
                  std::int32_t* chosen, float* shares);
    // y[columns] = sum of shares[i] * results[i * stride] over those i < count whose expert is here, in order.
    void (*mix)(const float* results, std::int64_t stride, const float* shares, const std::int32_t* chosen, std::int64_t count,
                std::int64_t first, std::int64_t here, std::int64_t columns, DType dtype, void* y);
};

}  // namespace pearl::cpu
