// Rows of a weight into panels, and out of them again. See gemm.h and kernels.inl.
//
// A step of a row is one 32-bit word whatever the dtype, so a panel is the transpose of its rows in words: W rows times W words
// at a time are turned in registers. A whole cache line of each row is read, and whole lines of the panel are written.
#pragma once

#include "cpu/gemm.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr std::int64_t kWord = 4;

// Where row `index` of the weight, and those below it in the same panel, have their words.
struct Lane {
    char* first;         // word 0 of the row
    std::int64_t lane;   // of the panel
    std::int64_t left;   // rows from here to the panel's end, or to that of the (half) matrix

    Lane(const PackedMatrix& shape, const Groups& groups, std::int64_t index) {
        const std::int64_t half = index / groups.columns, column = index % groups.columns, group = column / kPanel;
        lane = column % kPanel;
        const std::int64_t below = groups.columns - column;
        left = kPanel - lane < below ? kPanel - lane : below;
        first = static_cast<char*>(const_cast<void*>(shape.data)) + group * groups.bytes() + half * groups.panel_bytes +
                lane * kWord;
    }
};

// Words begin .. end-1 of one row; the last may be half a pair, whose other half is then zero.
static inline void pack_row(const char* row, std::int64_t row_bytes, std::int64_t begin, std::int64_t end, char* first) {
    for (std::int64_t s = begin; s < end; ++s) {
        std::uint32_t word = 0;
        const std::int64_t some = row_bytes - s * kWord;
        if (some >= kWord)
            std::memcpy(&word, row + s * kWord, kWord);
        else
            std::memcpy(&word, row + s * kWord, sizeof(bf16));
        std::memcpy(first + s * kStepBytes, &word, kWord);
    }
}

static inline void unpack_row(const char* first, std::int64_t begin, std::int64_t end, std::int64_t row_bytes, char* row) {
    for (std::int64_t s = begin; s < end; ++s) {
        const std::int64_t some = row_bytes - s * kWord;
        if (some >= kWord)
            std::memcpy(row + s * kWord, first + s * kStepBytes, kWord);
        else
            std::memcpy(row + s * kWord, first + s * kStepBytes, sizeof(bf16));
    }
}

// `count` rows of one panel, `stride` bytes apart. A panel's rows lie together, mostly: those of the next are fetched ahead.
template <bool Stream>
static void pack_lanes(const char* rows, std::int64_t stride, std::int64_t count, std::int64_t row_bytes, const Lane& at) {
    const std::int64_t words = (row_bytes + kWord - 1) / kWord, whole = row_bytes / kWord / W * W;
    const std::int64_t before = (W - at.lane % W) % W, head = before < count ? before : count, tail = (count - head) % W;
    for (std::int64_t s = 0; s < whole; s += W)
        for (std::int64_t r = head; r < count - tail; r += W) {
            const char* source = rows + r * stride + s * kWord;
            PEARL_UNROLL
            for (int i = 0; i < W; ++i) __builtin_prefetch(source + (kPanel + i) * stride, 0, 2);
            transpose<Stream>(source, stride, at.first + r * kWord + s * kStepBytes, kStepBytes);
        }
    for (std::int64_t r = 0; r < count; ++r) {
        const bool edge = r < head || r >= count - tail;
        pack_row(rows + r * stride, row_bytes, edge ? 0 : whole, words, at.first + r * kWord);
    }
}

static void unpack_lanes(char* rows, std::int64_t count, std::int64_t row_bytes, const Lane& at) {
    const std::int64_t words = (row_bytes + kWord - 1) / kWord, whole = row_bytes / kWord / W * W, turned = count / W * W;
    for (std::int64_t r = 0; r < turned; r += W)
        for (std::int64_t s = 0; s < whole; s += W)
            transpose<false>(at.first + r * kWord + s * kStepBytes, kStepBytes, rows + r * row_bytes + s * kWord, row_bytes);
    for (std::int64_t r = 0; r < count; ++r)
        unpack_row(at.first + r * kWord, r < turned ? whole : 0, words, row_bytes, rows + r * row_bytes);
}

// each(row, lane, count): rows begin .. end-1, those of one panel at a time.
template <class F>
static inline void each_panel(const PackedMatrix& shape, std::int64_t begin, std::int64_t end, F&& each) {
    const Groups groups(shape);
    for (std::int64_t row = begin; row < end;) {
        const Lane lane(shape, groups, row);
        const std::int64_t count = end - row < lane.left ? end - row : lane.left;
        each(row, lane, count);
        row += count;
    }
}

static void pack(const void* rows, std::int64_t stride, const PackedMatrix& shape, std::int64_t row_begin,
                 std::int64_t row_end, bool stream) {
    const std::int64_t size = size_of(shape.dtype), row_bytes = shape.k * size;
    each_panel(shape, row_begin, row_end, [&](std::int64_t row, const Lane& lane, std::int64_t count) {
        const char* source = static_cast<const char*>(rows) + (row - row_begin) * stride * size;
        stream ? pack_lanes<true>(source, stride * size, count, row_bytes, lane)
               : pack_lanes<false>(source, stride * size, count, row_bytes, lane);
    });
    if (stream) streamed();
}

static void unpack(const PackedMatrix& shape, std::int64_t row_begin, std::int64_t row_end, void* rows) {
    const std::int64_t row_bytes = shape.k * size_of(shape.dtype);
    each_panel(shape, row_begin, row_end, [&](std::int64_t row, const Lane& lane, std::int64_t count) {
        unpack_lanes(static_cast<char*>(rows) + (row - row_begin) * row_bytes, count, row_bytes, lane);
    });
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
