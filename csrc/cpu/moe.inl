// Routing and the weighted sum. See moe.h and kernels.inl.
#pragma once

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

// Softmax in place, lane by lane in a fixed order.
static void softmax(float* row, std::int64_t count) {
    float top = row[0];
    for (std::int64_t e = 1; e < count; ++e) top = row[e] > top ? row[e] : top;
    F sums = zero();
    for (std::int64_t e = 0; e < count; e += W) {
        const int n = count - e < W ? static_cast<int>(count - e) : W;
        store_some(row + e, exp(load_some(row + e, n) - broadcast(top)), n);
        sums = sums + load_some(row + e, n);
    }
    const F whole = broadcast(hsum(sums));
    for (std::int64_t e = 0; e < count; e += W) {
        const int n = count - e < W ? static_cast<int>(count - e) : W;
        store_some(row + e, load_some(row + e, n) / whole, n);
    }
}

static void route(float* logits, std::int64_t rows, std::int64_t experts, std::int64_t top_k, bool normalise,
                  std::int32_t* chosen, float* shares) {
    for (std::int64_t r = 0; r < rows; ++r, logits += experts, chosen += top_k, shares += top_k) {
        softmax(logits, experts);
        float sum = 0;
        for (std::int64_t i = 0; i < top_k; ++i) {
            std::int64_t best = 0;
            for (std::int64_t e = 1; e < experts; ++e)
                if (logits[e] > logits[best]) best = e;
            chosen[i] = static_cast<std::int32_t>(best);
            sum += shares[i] = logits[best];
            logits[best] = -1;
        }
        for (std::int64_t i = 0; normalise && i < top_k; ++i) shares[i] /= sum;
    }
}

template <class T>
static void mix_row(const float* results, std::int64_t stride, const float* shares, const std::int32_t* chosen,
                    std::int64_t count, std::int64_t first, std::int64_t here, std::int64_t columns, T* y) {
    for (std::int64_t c = 0; c < columns; c += W) {
        const int n = columns - c < W ? static_cast<int>(columns - c) : W;
        F sum = zero();
        for (std::int64_t i = 0; i < count; ++i)
            if (chosen[i] >= first && chosen[i] < first + here)
                sum = fma(broadcast(shares[i]), load_some(results + i * stride + c, n), sum);
        store_some(y + c, sum, n);
    }
}

static void mix(const float* results, std::int64_t stride, const float* shares, const std::int32_t* chosen, std::int64_t count,
                std::int64_t first, std::int64_t here, std::int64_t columns, DType dtype, void* y) {
    if (dtype == DType::bf16)
        mix_row(results, stride, shares, chosen, count, first, here, columns, static_cast<bf16*>(y));
    else
        mix_row(results, stride, shares, chosen, count, first, here, columns, static_cast<float*>(y));
}

static MoeKernels moe_kernels() { return {&route, &mix}; }

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
