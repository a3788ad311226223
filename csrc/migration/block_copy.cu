// The device copy of block_copy.h: raw pointers and a stream, no torch. Compiled for GPUs, but not yet run on one.
//
// Runs of blocks long enough for the driver's own copies go that way, in one call for all rows. The ids of other blocks travel
// as kernel arguments (constant memory), kBlocksPerLaunch at a time: no device buffer of ids, no host copy that must outlive
// the call. Both can be captured in a graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "migration/block_copy.h"

namespace pearl::migration {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerLaunch = 448;               // 2 * 4 * 448 = 3584 bytes of the 4096 that kernel arguments may have
constexpr std::int64_t kSegmentBytes = 16 * 1024;   // what one thread block copies at a time: 4 vectors of 16 bytes per thread
constexpr std::int64_t kMaxGrid = 16384;
constexpr std::int64_t kDriverRunBytes = 256 * 1024;  // from here on the cost of one more call does not matter
constexpr std::int64_t kMaxPitch = INT32_MAX;         // cudaDeviceProp::memPitch of all GPUs so far

struct BlockMap {
    std::int32_t src[kBlocksPerLaunch];
    std::int32_t dst[kBlocksPerLaunch];
};

struct Shape {
    std::int64_t items;            // rows * count * segments
    std::int64_t count;            // blocks in this launch
    std::int64_t segments;         // segments of a block
    std::int64_t segment_vectors;  // vectors of a whole segment
    std::int64_t block_vectors;
    std::int64_t src_row_vectors;
    std::int64_t dst_row_vectors;
    std::int64_t src_stride_vectors;  // from one block to the next
    std::int64_t dst_stride_vectors;
};

// An item is one segment of one block in one row. All threads of a thread block work on the same item, so the look-ups of
// block ids are uniform, and neighbouring threads touch neighbouring vectors.
template <typename Vector>
__global__ void __launch_bounds__(kThreads) copy_blocks(const Vector* __restrict__ src, Vector* __restrict__ dst, Shape shape,
                                                        const __grid_constant__ BlockMap map) {
    for (std::int64_t item = blockIdx.x; item < shape.items; item += gridDim.x) {
        const std::int64_t segment = item % shape.segments;
        const std::int64_t index = item / shape.segments % shape.count;
        const std::int64_t row = item / shape.segments / shape.count;
        const std::int64_t first = segment * shape.segment_vectors;
        const std::int64_t left = shape.block_vectors - first;
        const std::int64_t vectors = left < shape.segment_vectors ? left : shape.segment_vectors;
        const Vector* from = src + row * shape.src_row_vectors + map.src[index] * shape.src_stride_vectors + first;
        Vector* to = dst + row * shape.dst_row_vectors + map.dst[index] * shape.dst_stride_vectors + first;
        for (std::int64_t i = threadIdx.x; i < vectors; i += kThreads) to[i] = from[i];
    }
}

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

template <typename Vector>
void launch(const BlockPool& src, const BlockPool& dst, const BlockMap& map, std::int64_t count, cudaStream_t stream) {
    constexpr std::int64_t size = sizeof(Vector);
    const std::int64_t segments = (src.block_bytes + kSegmentBytes - 1) / kSegmentBytes;
    const Shape shape{src.rows * count * segments, count,
                      segments,                    kSegmentBytes / size,
                      src.block_bytes / size,      src.row_stride / size,
                      dst.row_stride / size,       src.block_stride / size,
                      dst.block_stride / size};
    const auto grid = static_cast<unsigned>(std::min(shape.items, kMaxGrid));
    copy_blocks<Vector><<<grid, kThreads, 0, stream>>>(reinterpret_cast<const Vector*>(src.address),
                                                       reinterpret_cast<Vector*>(dst.address), shape, map);
    check(cudaGetLastError(), "copy of KV blocks");
}

bool aligned(const BlockPool& pool) {
    return pool.address % 16 == 0 && pool.block_bytes % 16 == 0 && pool.block_stride % 16 == 0 &&
           (pool.rows == 1 || pool.row_stride % 16 == 0);
}

bool for_driver(const BlockPool& src, const BlockPool& dst, const Run& run) {
    return src.gapless() && dst.gapless() && run.count * src.block_bytes >= kDriverRunBytes &&
           (src.rows == 1 || std::max(src.row_stride, dst.row_stride) <= kMaxPitch);
}

void copy_run(const BlockPool& src, const BlockPool& dst, const Run& run, cudaStream_t stream) {
    const auto width = static_cast<std::size_t>(run.count * src.block_bytes);
    const auto pitch = [width](const BlockPool& pool) {
        return pool.rows == 1 ? width : static_cast<std::size_t>(pool.row_stride);
    };
    auto* to = reinterpret_cast<void*>(dst.address + static_cast<std::uintptr_t>(run.dst * dst.block_bytes));
    const auto* from = reinterpret_cast<const void*>(src.address + static_cast<std::uintptr_t>(run.src * src.block_bytes));
    check(cudaMemcpy2DAsync(to, pitch(dst), from, pitch(src), width, static_cast<std::size_t>(src.rows), cudaMemcpyDefault,
                            stream),
          "copy of a run of KV blocks");
}

}  // namespace

void copy_device(const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs, int device, std::uintptr_t stream) {
    if (std::max(src.num_blocks, dst.num_blocks) > INT32_MAX)
        throw std::invalid_argument("num_blocks=" + std::to_string(std::max(src.num_blocks, dst.num_blocks)) +
                                    ": on a GPU at most " + std::to_string(INT32_MAX));
    check(cudaSetDevice(device), "cudaSetDevice");
    const auto queue = reinterpret_cast<cudaStream_t>(stream);
    const auto send = aligned(src) && aligned(dst) ? &launch<uint4> : &launch<std::uint8_t>;
    BlockMap map;
    int count = 0;
    for (const Run& run : runs) {
        if (for_driver(src, dst, run)) {
            copy_run(src, dst, run, queue);
            continue;
        }
        for (std::int64_t i = 0; i < run.count; ++i) {
            map.src[count] = static_cast<std::int32_t>(run.src + i);
            map.dst[count] = static_cast<std::int32_t>(run.dst + i);
            if (++count == kBlocksPerLaunch) {
                send(src, dst, map, count, queue);
                count = 0;
            }
        }
    }
    if (count > 0) send(src, dst, map, count, queue);
}

}  // namespace pearl::migration
