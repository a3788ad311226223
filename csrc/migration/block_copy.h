// Copies of paged KV blocks between two pools of bytes, or between a pool and a flat buffer.
//
// A pool kv[layer, 2, block, ...] is seen as rows (layer * 2) of `num_blocks` blocks, of which `block_bytes` each are to be
// moved; consecutive rows are `row_stride` bytes apart, consecutive blocks `block_stride`, which is more than `block_bytes`
// where only some heads of every block move. A flat buffer [layer * 2][n][block_bytes] is a pool whose block ids are
// 0 .. n-1, so gather, scatter and pool-to-pool copy are one operation. Nothing here knows dtypes, heads or requests.
//
// Invariant: `plan` has checked every byte that a copy touches, so the copies themselves cannot fail half-way.
#pragma once

#include <cstdint>
#include <vector>

namespace pearl::migration {

using BlockIds = std::vector<std::int64_t>;

// Sizes in bytes except `rows` and `num_blocks`. `bytes` is what may be touched from `address` on.
struct BlockPool {
    std::uintptr_t address;
    std::int64_t bytes;
    std::int64_t rows;
    std::int64_t row_stride;
    std::int64_t num_blocks;
    std::int64_t block_stride;
    std::int64_t block_bytes;

    bool gapless() const { return block_stride == block_bytes; }
};

// Blocks src .. src+count-1 go to dst .. dst+count-1, in every row.
struct Run {
    std::int64_t src;
    std::int64_t dst;
    std::int64_t count;
};

// A checked pool. std::invalid_argument names the size that is wrong, with its value.
BlockPool make_pool(std::uintptr_t address, std::int64_t bytes, std::int64_t rows, std::int64_t row_stride,
                    std::int64_t num_blocks, std::int64_t block_stride, std::int64_t block_bytes);

// The flat buffer of `count` blocks with the geometry of `pool`; refuses a buffer of any other size.
BlockPool make_flat(const BlockPool& pool, std::uintptr_t address, std::int64_t bytes, std::int64_t count);

// 0, 1, .. count-1: the block ids of a flat buffer.
BlockIds flat_ids(std::int64_t count);

// Checks ids (range, a destination written twice, bytes both read and written) and merges neighbours without a gap into runs.
std::vector<Run> plan(const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids);

// One copy per run and row (past the caches where there is much to copy), shared out over up to `threads` threads where
// that is worth starting them.
void copy_host(const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs, int threads);

// Queues the same copy on a CUDA stream (a cudaStream_t as an integer, 0 for the default stream) of `device`: long runs as
// copies of the driver, which need no multiprocessor, all else as kernels that move 16 bytes per thread. All addresses must be
// readable by that device. std::runtime_error carries CUDA's own message.
void copy_device(const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs, int device, std::uintptr_t stream);

}  // namespace pearl::migration
