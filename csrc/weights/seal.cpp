// See seal.h. A block of some thousand numbers is copied, then looked at while it lies in the first cache: so memory is read
// once and written once. Loops are plain; the compiler makes vectors of them, for the widest registers this processor has.
#include "weights/seal.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pearl::weights {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a message's words are little-endian");

constexpr std::int64_t kBlockBytes = 8 << 10;  // of the larger side; two of them and what is fetched ahead fit the first cache
constexpr std::int64_t kWord = 8;

#define PEARL_INLINE inline __attribute__((always_inline))

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// ---------------------------------------------------------------------------------------------------------- one stretch

template <Number>
struct Bits;
template <>
struct Bits<Number::f64> {
    using type = std::uint64_t;
    static constexpr type magnitude = 0x7fffffffffffffff, infinity = 0x7ff0000000000000;
};
template <>
struct Bits<Number::f32> {
    using type = std::uint32_t;
    static constexpr type magnitude = 0x7fffffff, infinity = 0x7f800000;
};
template <>
struct Bits<Number::f16> {
    using type = std::uint16_t;
    static constexpr type magnitude = 0x7fff, infinity = 0x7c00;
};
template <>
struct Bits<Number::bf16> {
    using type = std::uint16_t;
    static constexpr type magnitude = 0x7fff, infinity = 0x7f80;
};

// The least magnitude of a 32-bit number that is infinite once it is rounded to the nearest of `to` (ties to even).
template <Number to>
constexpr std::uint32_t kTooLarge = to == Number::bf16 ? 0x7f7f8000 : to == Number::f16 ? 0x477ff000 : 0x7f800000;

// Round to nearest even; right for all that is finite afterwards.
PEARL_INLINE std::uint16_t to_bf16(std::uint32_t bits) {
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

PEARL_INLINE std::uint16_t to_f16(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7fffffff;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Below 2**-14 the steps of half precision are those of single precision at one half: the addition rounds to them.
    float small;
    std::memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    std::uint32_t subnormal;
    std::memcpy(&subnormal, &small, sizeof small);
    subnormal -= 126u << 23;
    return static_cast<std::uint16_t>((magnitude < (113u << 23) ? subnormal : normal) | ((bits >> 16) & 0x8000));
}

// The sum of the 64-bit words that these bytes are part of, counting zero for the others; `offset` is from a word's beginning.
PEARL_INLINE std::uint64_t sum_words(const char* bytes, std::int64_t offset, std::int64_t count) {
    std::uint64_t sum = 0;
    for (; count > 0 && offset % kWord; ++bytes, ++offset, --count)
        sum += static_cast<std::uint64_t>(static_cast<unsigned char>(*bytes)) << (8 * (offset % kWord));
    const std::int64_t words = count / kWord;
    for (std::int64_t i = 0; i < words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, bytes + i * kWord, kWord);
        sum += word;
    }
    for (std::int64_t i = words * kWord; i < count; ++i)
        sum += static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * (i % kWord));
    return sum;
}

template <Number kind>
PEARL_INLINE bool all_finite(const char* numbers, std::int64_t count) {
    using Word = typename Bits<kind>::type;
    Word worst = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        Word bits;
        std::memcpy(&bits, numbers + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
        const Word size = bits & Bits<kind>::magnitude;
        worst = size > worst ? size : worst;
    }
    return worst < Bits<kind>::infinity;
}

template <Number to>
PEARL_INLINE bool convert(char* __restrict target, const char* __restrict source, std::int64_t count) {
    std::uint32_t worst = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, source + i * 4, 4);
        const std::uint32_t size = bits & 0x7fffffff;
        worst = size > worst ? size : worst;
        const std::uint16_t half = to == Number::bf16 ? to_bf16(bits) : to_f16(bits);
        std::memcpy(target + i * 2, &half, 2);
    }
    return worst < kTooLarge<to>;
}

// Whether `count` 32-bit numbers are finite once they are rounded to `to`.
template <Number to>
PEARL_INLINE bool stay_finite(const char* source, std::int64_t count) {
    std::uint32_t worst = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, source + i * 4, 4);
        const std::uint32_t size = bits & 0x7fffffff;
        worst = size > worst ? size : worst;
    }
    return worst < kTooLarge<to>;
}

// `count` numbers to `target`, which lies `offset` bytes from a word's beginning. No target: they are only looked at.
template <Number from, Number to>
PEARL_INLINE void stretch(char* target, const char* source, std::int64_t offset, std::int64_t count, Totals& totals) {
    constexpr std::int64_t wide = sizeof(typename Bits<from>::type), narrow = sizeof(typename Bits<to>::type);
    constexpr std::int64_t most = kBlockBytes / wide;
    for (std::int64_t done = 0; done < count; done += most) {
        const std::int64_t part = std::min(most, count - done);
        const char* seen = source + done * wide;
        char* into = target == nullptr ? nullptr : target + done * narrow;
        if constexpr (from == to) {
            if (into != nullptr) std::memcpy(into, seen, static_cast<std::size_t>(part * wide));
            totals.finite &= all_finite<to>(into == nullptr ? seen : into, part);
        } else if (into == nullptr) {
            totals.finite &= stay_finite<to>(seen, part);
            continue;
        } else {
            totals.finite &= convert<to>(into, seen, part);
        }
        totals.sum += sum_words(into == nullptr ? seen : into, offset + done * narrow, part * narrow);
    }
}

using Stretch = void (*)(char*, const char*, std::int64_t, std::int64_t, Totals&);

template <Number from, Number to>
void plain(char* target, const char* source, std::int64_t offset, std::int64_t count, Totals& totals) {
    stretch<from, to>(target, source, offset, count, totals);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <Number from, Number to>
__attribute__((target("avx2"))) void with_avx2(char* target, const char* source, std::int64_t offset, std::int64_t count,
                                               Totals& totals) {
    stretch<from, to>(target, source, offset, count, totals);
}

template <Number from, Number to>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void with_avx512(char* target, const char* source,
                                                                               std::int64_t offset, std::int64_t count,
                                                                               Totals& totals) {
    stretch<from, to>(target, source, offset, count, totals);
}

template <Number from, Number to>
Stretch widest() {
    static const Stretch found = [] {
        if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            return with_avx512<from, to>;
        return __builtin_cpu_supports("avx2") ? with_avx2<from, to> : plain<from, to>;
    }();
    return found;
}
#else
template <Number from, Number to>
Stretch widest() {
    return plain<from, to>;
}
#endif

Stretch stretch_of(Number from, Number to) {
    if (from == to) {
        switch (to) {
            case Number::f64: return widest<Number::f64, Number::f64>();
            case Number::f32: return widest<Number::f32, Number::f32>();
            case Number::f16: return widest<Number::f16, Number::f16>();
            case Number::bf16: return widest<Number::bf16, Number::bf16>();
        }
    }
    if (from == Number::f32 && to == Number::bf16) return widest<Number::f32, Number::bf16>();
    if (from == Number::f32 && to == Number::f16) return widest<Number::f32, Number::f16>();
    return nullptr;
}

std::int64_t size_of(Number kind) { return kind == Number::f64 ? 8 : kind == Number::f32 ? 4 : 2; }

// ------------------------------------------------------------------------------------------------------- whole tensors

std::int64_t count_of(const Tensor& tensor) {
    std::int64_t count = 1;
    for (std::int64_t side : tensor.shape) count *= side;
    return count;
}

std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size());
    std::int64_t step = 1;
    for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) strides[axis] = step;
    return strides;
}

void check(const Tensor& tensor) {
    if (tensor.shape.size() != tensor.strides.size()) refuse("tensor: must have as many strides as axes");
    for (std::int64_t side : tensor.shape)
        if (side < 1) refuse("tensor: has a side of " + std::to_string(side) + ", must be >= 1");
    if (tensor.address == 0) refuse("tensor: has no memory");
}

// Axes from the last on that lie without gaps on both sides, as one: the number of axes before them.
std::size_t outer_axes(const Tensor& a, const Tensor& b) {
    std::int64_t dense = 1;
    std::size_t axis = a.shape.size();
    while (axis > 0) {
        const std::size_t last = axis - 1;
        if (a.shape[last] != 1 && (a.strides[last] != dense || b.strides[last] != dense)) break;
        dense *= a.shape[last];
        axis = last;
    }
    return axis;
}

// Every stretch of numbers that lies without a gap on both sides, in order.
void walk(const Tensor& target, const Tensor& source, std::int64_t offset, Number from, Number to, Totals& totals) {
    const Stretch run = stretch_of(from, to);
    const std::size_t outer = outer_axes(target, source);
    std::int64_t inner = 1;
    for (std::size_t axis = outer; axis < source.shape.size(); ++axis) inner *= source.shape[axis];
    std::vector<std::int64_t> index(outer, 0);
    char* into = reinterpret_cast<char*>(target.address);
    const char* out_of = reinterpret_cast<const char*>(source.address);
    const std::int64_t wide = size_of(from), narrow = size_of(to);
    for (;;) {
        std::int64_t there = 0, here = 0;
        for (std::size_t axis = 0; axis < outer; ++axis) {
            there += index[axis] * target.strides[axis];
            here += index[axis] * source.strides[axis];
        }
        run(into == nullptr ? nullptr : into + there * narrow, out_of + here * wide, offset, inner, totals);
        offset += inner * narrow;
        std::size_t axis = outer;
        while (axis > 0 && ++index[axis - 1] == source.shape[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
}

Tensor dense(std::uintptr_t address, const std::vector<std::int64_t>& shape) { return {address, shape, dense_strides(shape)}; }

std::int64_t word_at(std::uintptr_t message, int number) {
    std::int64_t word;
    std::memcpy(&word, reinterpret_cast<const char*>(message) + number * kWord, kWord);
    return word;
}

void set_word(std::uintptr_t message, int number, std::int64_t word) {
    std::memcpy(reinterpret_cast<char*>(message) + number * kWord, &word, kWord);
}

void check_places(std::uintptr_t message, std::int64_t bytes, const std::vector<Place>& places, Number kind) {
    if (message == 0 || bytes < kHeaderBytes || bytes % kWord)
        refuse("message of " + std::to_string(bytes) + " bytes: must be whole words and have a header");
    std::int64_t end = kHeaderBytes;
    for (const Place& place : places) {
        check(place.tensor);
        const std::int64_t size = count_of(place.tensor) * size_of(kind);
        if (place.offset < end || place.offset + size > bytes)
            refuse("place at byte " + std::to_string(place.offset) + ", " + std::to_string(size) + " bytes: must lie between " +
                   std::to_string(end) + " and " + std::to_string(bytes));
        end = place.offset + size;
    }
}

}  // namespace

bool converts(Number from, Number to) { return stretch_of(from, to) != nullptr; }

Totals put(std::uintptr_t message, std::int64_t bytes, const std::vector<Place>& places, Number from, Number to) {
    if (!converts(from, to)) refuse("such numbers are not converted here");
    check_places(message, bytes, places, to);
    Totals totals;
    for (const Place& place : places) {
        const Tensor into = dense(message + static_cast<std::uintptr_t>(place.offset), place.tensor.shape);
        walk(into, place.tensor, place.offset, from, to, totals);
    }
    return totals;
}

void seal(std::uintptr_t message, std::int64_t bytes, std::int64_t version, std::uint64_t sum,
          const std::vector<std::pair<std::int64_t, std::int64_t>>& gaps) {
    check_places(message, bytes, {}, Number::f64);
    for (const auto& [begin, end] : gaps) {
        if (begin < kHeaderBytes || end < begin || end > bytes)
            refuse("gap from " + std::to_string(begin) + " to " + std::to_string(end) + ": outside the message");
        std::memset(reinterpret_cast<char*>(message) + begin, 0, static_cast<std::size_t>(end - begin));
    }
    std::memset(reinterpret_cast<char*>(message), 0, static_cast<std::size_t>(kHeaderBytes));
    set_word(message, 1, version);
    set_word(message, 0, static_cast<std::int64_t>(sum + static_cast<std::uint64_t>(version)));
}

Verdict take(std::uintptr_t message, std::int64_t bytes, const std::vector<Place>& places, Number kind) {
    check_places(message, bytes, places, kind);
    const char* data = reinterpret_cast<const char*>(message);
    Verdict verdict{false, word_at(message, 1), word_at(message, 2), true};
    Totals totals;
    totals.sum = sum_words(data + kWord, 0, kHeaderBytes - kWord);
    if (places.empty() || verdict.refusal_bytes != 0) {
        const std::int64_t count = (bytes - kHeaderBytes) / size_of(kind);
        stretch_of(kind, kind)(nullptr, data + kHeaderBytes, 0, count, totals);
    } else {
        std::int64_t end = kHeaderBytes;
        for (const Place& place : places) {
            totals.sum += sum_words(data + end, end, place.offset - end);
            const Tensor seen = dense(message + static_cast<std::uintptr_t>(place.offset), place.tensor.shape);
            walk(place.tensor, seen, place.offset, kind, kind, totals);
            end = place.offset + count_of(place.tensor) * size_of(kind);
        }
        totals.sum += sum_words(data + end, end, bytes - end);
    }
    verdict.intact = totals.sum == static_cast<std::uint64_t>(word_at(message, 0));
    verdict.finite = totals.finite;
    return verdict;
}

bool look(const std::vector<Tensor>& tensors, Number from, Number to) {
    if (!converts(from, to)) refuse("such numbers are not converted here");
    for (const Tensor& tensor : tensors) check(tensor);
    Totals totals;
    for (const Tensor& tensor : tensors) walk({0, tensor.shape, tensor.strides}, tensor, 0, from, to, totals);
    return totals.finite;
}

bool copy(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources, Number from, Number to) {
    if (!converts(from, to)) refuse("such numbers are not converted here");
    if (targets.size() != sources.size()) refuse("targets and sources: must be as many");
    for (std::size_t i = 0; i < targets.size(); ++i) {
        check(targets[i]);
        check(sources[i]);
        if (targets[i].shape != sources[i].shape)
            refuse("targets[" + std::to_string(i) + "]: has another shape than its source");
    }
    Totals totals;
    for (std::size_t i = 0; i < targets.size(); ++i) walk(targets[i], sources[i], 0, from, to, totals);
    return totals.finite;
}

}  // namespace pearl::weights
