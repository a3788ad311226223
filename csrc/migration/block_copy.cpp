// Checks, planning and the host copy. See block_copy.h.
#include "migration/block_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pearl::migration {
namespace {

constexpr std::int64_t kBytesPerThread = 1 << 20;    // below this, starting a thread costs more than it saves
constexpr std::int64_t kBytesToStream = 16 << 20;    // from here on the copy would push everything else out of the caches
constexpr std::int64_t kRunsPerShare = 256;          // what a thread takes at a time, of one row
constexpr std::int64_t kLeadBytes = 4 << 10;         // how far ahead of the copy, beside one block, memory is asked to be
constexpr std::size_t kLine = 64;                    // a cache line
constexpr std::size_t kFetchAhead = 64 << 10;        // a run up to this size leaves room in the caches for the one after it

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string text(std::int64_t value) { return std::to_string(value); }

std::int64_t product(std::int64_t a, std::int64_t b) {
    std::int64_t result;
    if (__builtin_mul_overflow(a, b, &result)) refuse(text(a) + " * " + text(b) + ": does not fit 64 bits");
    return result;
}

std::int64_t sum(std::int64_t a, std::int64_t b) {
    std::int64_t result;
    if (__builtin_add_overflow(a, b, &result)) refuse(text(a) + " + " + text(b) + ": does not fit 64 bits");
    return result;
}

void at_least(const char* name, std::int64_t value, std::int64_t low) {
    if (value < low) refuse(std::string(name) + "=" + text(value) + ": must be >= " + text(low));
}

// Bytes from the address to the end of the last block.
std::int64_t span(const BlockPool& pool) {
    if (pool.num_blocks == 0) return 0;
    return sum(product(pool.rows - 1, pool.row_stride), sum(product(pool.num_blocks - 1, pool.block_stride), pool.block_bytes));
}

void check_ids(const char* name, const BlockIds& ids, const BlockPool& pool) {
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (ids[i] < 0 || ids[i] >= pool.num_blocks)
            refuse(std::string(name) + "[" + std::to_string(i) + "]=" + text(ids[i]) + ": outside the pool of " +
                   text(pool.num_blocks) + " blocks, valid are 0.." + text(pool.num_blocks - 1));
}

void check_written_once(const BlockIds& ids) {
    std::vector<std::pair<std::int64_t, std::size_t>> order;
    order.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) order.emplace_back(ids[i], i);
    std::sort(order.begin(), order.end());
    for (std::size_t i = 1; i < order.size(); ++i)
        if (order[i].first == order[i - 1].first)
            refuse("destination ids [" + std::to_string(order[i - 1].second) + "] and [" + std::to_string(order[i].second) +
                   "] are both block " + text(order[i].first) + ": a block can be written once only");
}

// One block of one row: where it starts, and from which side.
struct Piece {
    std::uintptr_t start;
    std::int64_t id;
    bool written;
};

void add_pieces(std::vector<Piece>& pieces, const BlockPool& pool, const BlockIds& ids, std::int64_t rows, bool written) {
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t id : ids)
            pieces.push_back({pool.address + static_cast<std::uintptr_t>(row * pool.row_stride + id * pool.block_stride), id,
                              written});
}

// Exact: pieces are of one size, so if any read piece meets a written one, then two neighbours in address order do.
void check_disjoint(const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids) {
    const auto src_end = src.address + static_cast<std::uintptr_t>(span(src));
    const auto dst_end = dst.address + static_cast<std::uintptr_t>(span(dst));
    if (src_end <= dst.address || dst_end <= src.address) return;
    const bool same_pool =
        src.address == dst.address && src.row_stride == dst.row_stride && src.block_stride == dst.block_stride;
    const std::int64_t rows = same_pool ? 1 : src.rows;  // all rows look alike in one and the same pool
    std::vector<Piece> pieces;
    pieces.reserve(static_cast<std::size_t>(rows) * (src_ids.size() + dst_ids.size()));
    add_pieces(pieces, src, src_ids, rows, false);
    add_pieces(pieces, dst, dst_ids, rows, true);
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.start < b.start; });
    for (std::size_t i = 1; i < pieces.size(); ++i) {
        const Piece &a = pieces[i - 1], &b = pieces[i];
        if (a.written != b.written && b.start - a.start < static_cast<std::uintptr_t>(src.block_bytes))
            refuse("source block " + text(a.written ? b.id : a.id) + " and destination block " +
                   text(a.written ? a.id : b.id) + " overlap in memory");
    }
}

#if defined(__x86_64__)
// Whole cache lines, past the caches. `next` is fetched meanwhile, line by line.
void stream_sse2(char* to, const char* from, std::size_t bytes, const char* next) {
    for (std::size_t i = 0; i < bytes; i += kLine) {
        _mm_prefetch(next + i, _MM_HINT_T1);
        const auto* source = reinterpret_cast<const __m128i*>(from + i);
        auto* target = reinterpret_cast<__m128i*>(to + i);
        const __m128i a = _mm_load_si128(source), b = _mm_load_si128(source + 1);
        const __m128i c = _mm_load_si128(source + 2), d = _mm_load_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
}

__attribute__((target("avx512f"))) void stream_avx512(char* to, const char* from, std::size_t bytes, const char* next) {
    std::size_t i = 0;
    for (; i + 4 * kLine <= bytes; i += 4 * kLine) {
        for (std::size_t line = 0; line < 4 * kLine; line += kLine) _mm_prefetch(next + i + line, _MM_HINT_T1);
        const __m512i a = _mm512_load_si512(from + i), b = _mm512_load_si512(from + i + kLine);
        const __m512i c = _mm512_load_si512(from + i + 2 * kLine), d = _mm512_load_si512(from + i + 3 * kLine);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + kLine), b);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 2 * kLine), c);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 3 * kLine), d);
    }
    for (; i < bytes; i += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
}
#endif

// A copy whose destination does not pass through the caches, so that its old content need not be read first: for scattered
// blocks a third less traffic than memcpy, which does the same only for single copies of megabytes. `ahead` is what will be
// read next: the processor's own prefetching stops at the end of a page, and a block is not much more than one.
void copy_streaming(char* to, const char* from, std::size_t bytes, const char* ahead) {
#if defined(__x86_64__)
    const auto address = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (address % kLine == 0) {
        static const auto stream = __builtin_cpu_supports("avx512f") ? &stream_avx512 : &stream_sse2;
        stream(to, from, bytes, bytes <= kFetchAhead ? ahead : from);
        return;
    }
#else
    (void)ahead;
#endif
    std::memcpy(to, from, bytes);
}

// Streamed bytes must be visible before another thread is told that they are there.
void finish_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

std::int64_t bytes_in(const BlockPool& pool, const std::vector<Run>& runs) {
    std::int64_t blocks = 0;
    for (const Run& run : runs) blocks += run.count;
    return pool.rows * blocks * pool.block_bytes;
}

// In the order of the destination: any order gives the same bytes, and in this one neighbours are found, and memory is walked
// through upwards, which is a tenth faster for small blocks.
std::vector<Run> merge(const BlockIds& src_ids, const BlockIds& dst_ids, bool gapless) {
    std::vector<Run> runs;
    runs.reserve(src_ids.size());
    for (std::size_t i = 0; i < src_ids.size(); ++i) runs.push_back({src_ids[i], dst_ids[i], 1});
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.dst < b.dst; });
    if (!gapless || runs.empty()) return runs;
    std::size_t last = 0;
    for (std::size_t i = 1; i < runs.size(); ++i) {
        Run& run = runs[last];
        if (runs[i].src == run.src + run.count && runs[i].dst == run.dst + run.count)
            ++run.count;
        else
            runs[++last] = runs[i];
    }
    runs.resize(last + 1);
    return runs;
}

}  // namespace

BlockPool make_pool(std::uintptr_t address, std::int64_t bytes, std::int64_t rows, std::int64_t row_stride,
                    std::int64_t num_blocks, std::int64_t block_stride, std::int64_t block_bytes) {
    at_least("bytes", bytes, 0);
    at_least("rows", rows, 1);
    at_least("num_blocks", num_blocks, 0);
    at_least("block_bytes", block_bytes, 1);
    at_least("block_stride", block_stride, block_bytes);
    const std::int64_t row_bytes = span({address, bytes, 1, 0, num_blocks, block_stride, block_bytes});
    at_least("row_stride", row_stride, rows > 1 ? row_bytes : 0);
    const BlockPool pool{address, bytes, rows, row_stride, num_blocks, block_stride, block_bytes};
    const std::int64_t needed = span(pool);
    if (needed > bytes)
        refuse("bytes=" + text(bytes) + ": " + text(rows) + " rows of " + text(num_blocks) + " blocks of " +
               text(block_bytes) + " bytes, " + text(row_stride) + " and " + text(block_stride) + " apart, need " +
               text(needed));
    if (needed > 0 && address == 0) refuse("address=0: no memory behind " + text(needed) + " bytes");
    if (address > UINTPTR_MAX - static_cast<std::uintptr_t>(needed))
        refuse("address=" + std::to_string(address) + ": " + text(needed) + " bytes from there pass the end of memory");
    return pool;
}

BlockPool make_flat(const BlockPool& pool, std::uintptr_t address, std::int64_t bytes, std::int64_t count) {
    const std::int64_t row_stride = product(count, pool.block_bytes);
    const std::int64_t needed = product(pool.rows, row_stride);
    if (bytes != needed)
        refuse("buffer of " + text(bytes) + " bytes: " + text(count) + " blocks of " + text(pool.block_bytes) +
               " bytes in " + text(pool.rows) + " rows are " + text(needed));
    return make_pool(address, bytes, pool.rows, row_stride, count, pool.block_bytes, pool.block_bytes);
}

BlockIds flat_ids(std::int64_t count) {
    BlockIds ids(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) ids[static_cast<std::size_t>(i)] = i;
    return ids;
}

std::vector<Run> plan(const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids) {
    if (src.rows != dst.rows) refuse("source has " + text(src.rows) + " rows, destination " + text(dst.rows));
    if (src.block_bytes != dst.block_bytes)
        refuse("source blocks have " + text(src.block_bytes) + " bytes, destination blocks " + text(dst.block_bytes));
    if (src_ids.size() != dst_ids.size())
        refuse(std::to_string(src_ids.size()) + " source ids, " + std::to_string(dst_ids.size()) + " destination ids");
    check_ids("source ids", src_ids, src);
    check_ids("destination ids", dst_ids, dst);
    check_written_once(dst_ids);
    check_disjoint(src, src_ids, dst, dst_ids);
    return merge(src_ids, dst_ids, src.gapless() && dst.gapless());
}

namespace {

// Some runs of one row.
void copy_runs(const BlockPool& src, const BlockPool& dst, std::int64_t row, const Run* begin, const Run* end, bool stream) {
    const auto* from_row = reinterpret_cast<const char*>(src.address + static_cast<std::uintptr_t>(row * src.row_stride));
    auto* to_row = reinterpret_cast<char*>(dst.address + static_cast<std::uintptr_t>(row * dst.row_stride));
    const std::int64_t lead = 1 + kLeadBytes / src.block_bytes;
    for (const Run* run = begin; run != end; ++run) {
        const auto size = static_cast<std::size_t>(run->count * src.block_bytes);
        const char* from = from_row + run->src * src.block_stride;
        char* to = to_row + run->dst * dst.block_stride;
        if (stream)
            copy_streaming(to, from, size, from_row + (end - run > lead ? run + lead : end - 1)->src * src.block_stride);
        else
            std::memcpy(to, from, size);
    }
    finish_streaming();
}

}  // namespace

void copy_host(const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs, int threads) {
    at_least("threads", threads, 1);
    const auto num_runs = static_cast<std::int64_t>(runs.size());
    const std::int64_t shares = (num_runs + kRunsPerShare - 1) / kRunsPerShare;
    const std::int64_t bytes = bytes_in(src, runs);
    const bool stream = bytes >= kBytesToStream;
    std::atomic<std::int64_t> next{0};
    const auto work = [&] {
        for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < src.rows * shares;) {
            const std::int64_t first = i % shares * kRunsPerShare;
            const Run* end = runs.data() + std::min(first + kRunsPerShare, num_runs);
            copy_runs(src, dst, i / shares, runs.data() + first, end, stream);
        }
    };
    const std::int64_t helpers = std::min({static_cast<std::int64_t>(threads), bytes / kBytesPerThread, src.rows * shares}) - 1;
    std::vector<std::thread> started;
    try {
        for (std::int64_t i = 0; i < helpers; ++i) started.emplace_back(work);
    } catch (const std::system_error&) {
        // No more threads to be had: the ones that run, and this one, do the rest.
    }
    work();
    for (std::thread& thread : started) thread.join();
}

}  // namespace pearl::migration
