// Messages of weights, filled, checked and emptied in one pass over memory: copy or convert, add up, look for what is not
// finite. Knows addresses and sizes alone; who owns the memory, and what a message is for, is the caller's business.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace pearl::weights {

constexpr std::int64_t kHeaderBytes = 64;  // int64: checksum, version, length of a refusal; the rest is zero

enum class Number : int { f64, f32, f16, bf16 };

struct Tensor {
    std::uintptr_t address;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;  // elements
};

// A tensor's numbers and where they lie in a message: contiguous, from byte `offset` on.
struct Place {
    std::int64_t offset;
    Tensor tensor;
};

// What a message says of itself, and whether that and its numbers are sound.
struct Verdict {
    bool intact;  // the checksum is that of the rest
    std::int64_t version;
    std::int64_t refusal_bytes;
    bool finite;
};

// What went into a message: the sum of the 64-bit words that the numbers are part of, and whether they are all finite.
struct Totals {
    std::uint64_t sum = 0;
    bool finite = true;
};

// Puts the tensors, which are of `from`, into the message as numbers of `to`. The places are in the order of their offsets.
// std::invalid_argument for what cannot be, before a byte is written.
Totals put(std::uintptr_t message, std::int64_t bytes, const std::vector<Place>& places, Number from, Number to);

// Writes the header of a message whose numbers sum up to `sum`; `gaps`, first byte and that after the last, become zero.
void seal(std::uintptr_t message, std::int64_t bytes, std::int64_t version, std::uint64_t sum,
          const std::vector<std::pair<std::int64_t, std::int64_t>>& gaps);

// Reads the message, and copies its numbers to the places, if any and unless it is a refusal.
Verdict take(std::uintptr_t message, std::int64_t bytes, const std::vector<Place>& places, Number kind);

// Copies tensors of one shape each from memory to memory. Whether all numbers are finite in `to`.
bool copy(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources, Number from, Number to);

// Whether all numbers would be finite in `to`.
bool look(const std::vector<Tensor>& tensors, Number from, Number to);

// Whether numbers of `from` can be made numbers of `to` here.
bool converts(Number from, Number to);

}  // namespace pearl::weights
