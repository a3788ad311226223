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

constexpr std::int64_t kPackedAtOnce = 4 * kPanel;

// run(begin, end) for parts of row_begin .. row_end-1 whose borders are, mostly, those of panels.
template <class F>
void in_panels(std::int64_t row_begin, std::int64_t row_end, F&& run) {
    const std::int64_t first = row_begin / kPackedAtOnce, last = blocks(row_end, kPackedAtOnce);
    parallel(last - first, [&](std::int64_t chunk) {
        const std::int64_t begin = (first + chunk) * kPackedAtOnce;
        run(std::max(row_begin, begin), std::min(row_end, begin + kPackedAtOnce));
    });
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
    const bool padded = (halves ? n / 2 : n) % kPanel != 0;
    if (padded) std::memset(dst, 0, packed_bytes(n, k, dtype, halves));
    pack_rows(packed, 0, n, weight, stride);
    return packed;
}

void pack_rows(const PackedMatrix& packed, std::int64_t row_begin, std::int64_t row_end, const void* rows,
               std::int64_t stride, bool stream) {
    in_panels(row_begin, row_end, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t skipped = (begin - row_begin) * stride * size_of(packed.dtype);
        kernels().gemm.pack(static_cast<const char*>(rows) + skipped, stride, packed, begin, end, stream);
    });
}

void unpack_rows(const PackedMatrix& packed, std::int64_t row_begin, std::int64_t row_end, void* rows) {
    in_panels(row_begin, row_end, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t skipped = (begin - row_begin) * packed.k * size_of(packed.dtype);
        kernels().gemm.unpack(packed, begin, end, static_cast<char*>(rows) + skipped);
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
