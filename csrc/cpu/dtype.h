// The two number formats of the CPU kernels. Conversions are `static`: each translation unit keeps its own copy, so that code
// built for one instruction set is never linked into another.
#pragma once

#include <cstdint>
#include <cstring>

namespace pearl::cpu {

enum class DType : std::int32_t { f32, bf16 };

struct bf16 {
    std::uint16_t bits;
};

constexpr std::int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to the nearest, ties to even; a NaN stays one.
static inline bf16 to_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
static inline T from_float(float x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return to_bf16(x);
}

}  // namespace pearl::cpu
