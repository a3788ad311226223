// Cuts products into chunks. See gemm.h.
#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace pearl::cpu {
namespace {

constexpr std::int64_t kBlockRows = 128;      // of x that stay near the core while panels pass by
constexpr std::int64_t kChunksPerThread = 8;  // so that a thread that comes late, or is slow, holds nobody up for long

std::int64_t blocks(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

std::int64_t groups(const PackedMatrix& weight) { return blocks(weight.halves ? weight.n / 2 : weight.n, kPanel); }

// How one product is cut: into row blocks, and each of these into pieces of its panels.
struct Cut {
    std::int64_t row_blocks, pieces;

    std::int64_t chunks() const { return row_blocks * pieces; }

    void run(const GemmArguments& a, std::int64_t chunk) const {
        const std::int64_t block = chunk / pieces, piece = chunk % pieces, all = groups(a.weight);
        kernels().gemm.run(a, a.rows * block / row_blocks, a.rows * (block + 1) / row_blocks, all * piece / pieces,
                           all * (piece + 1) / pieces);
    }
};

// `of_rows`: row blocks of this product, `of_all`: of all the products that run with it.
Cut cut(const GemmArguments& a, std::int64_t of_rows, std::int64_t of_all) {
    if (threads() == 1 || of_all == 0) return {of_rows, 1};
    return {of_rows, std::clamp<std::int64_t>(blocks(kChunksPerThread * threads(), of_all), 1, groups(a.weight))};
}

}  // namespace

std::size_t packed_bytes(std::int64_t n, std::int64_t k, DType dtype, bool halves) {
    const std::int64_t steps = dtype == DType::bf16 ? (k + 1) / 2 : k;
    const std::int64_t panels = halves ? 2 * blocks(n / 2, kPanel) : blocks(n, kPanel);
    return static_cast<std::size_t>(panels * steps * kPanel * 4);
}

PackedMatrix pack(const void* weight, std::int64_t stride, std::int64_t n, std::int64_t k, DType dtype, bool halves,
                  void* dst) {
    const PackedMatrix packed{dst, n, k, dtype, halves};
    const std::int64_t all = groups(packed);
    const std::int64_t chunks = std::min<std::int64_t>(all, kChunksPerThread * threads());
    parallel(chunks, [&](std::int64_t chunk) {
        kernels().gemm.pack(weight, stride, packed, dst, all * chunk / chunks, all * (chunk + 1) / chunks);
    });
    return packed;
}

void unpack(const PackedMatrix& packed, void* weight) {
    // A step of one row is 4 bytes: a pair of bf16, whose second number may be padding, or one fp32.
    const std::int64_t size = size_of(packed.dtype), elements = 4 / size, steps = blocks(packed.k, elements);
    const std::int64_t parts = packed.halves ? 2 : 1, columns = packed.n / parts, all = groups(packed);
    parallel(all * parts, [&](std::int64_t index) {
        const std::int64_t group = index / parts, first = index % parts * columns + group * kPanel;
        const char* panel = static_cast<const char*>(packed.data) + index * steps * kPanel * 4;
        for (std::int64_t i = 0; i < std::min(kPanel, columns - group * kPanel); ++i) {
            char* row = static_cast<char*>(weight) + (first + i) * packed.k * size;
            for (std::int64_t s = 0; s < steps; ++s) {
                const std::int64_t bytes = std::min(elements, packed.k - s * elements) * size;
                std::memcpy(row + s * 4, panel + (s * kPanel + i) * 4, static_cast<std::size_t>(bytes));
            }
        }
    });
}

void gemm(const GemmArguments& a) {
    const std::int64_t row_blocks = blocks(a.rows, kBlockRows);
    const Cut whole = cut(a, row_blocks, row_blocks);
    parallel(whole.chunks(), [&](std::int64_t chunk) { whole.run(a, chunk); });
}

void gemm_all(const GemmArguments* arguments, std::int64_t count) {
    std::int64_t row_blocks = 0;
    for (std::int64_t i = 0; i < count; ++i) row_blocks += blocks(arguments[i].rows, kBlockRows);
    std::vector<Cut> cuts;
    std::vector<std::int64_t> ends;  // of each product's chunks
    std::int64_t chunks = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        cuts.push_back(cut(arguments[i], blocks(arguments[i].rows, kBlockRows), row_blocks));
        ends.push_back(chunks += cuts.back().chunks());
    }
    parallel(chunks, [&](std::int64_t chunk) {
        const auto i = std::upper_bound(ends.begin(), ends.end(), chunk) - ends.begin();
        cuts[i].run(arguments[i], chunk - (ends[i] - cuts[i].chunks()));
    });
}

}  // namespace pearl::cpu
