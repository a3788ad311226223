// Attention of one engine step over the paged pool: decode rows and chunks of prompts in one batch, causal, with a window.
//
// A pool is kv[2][block][kv_head][...] of one layer. The order inside a (block, kv_head), `block_size` x `head_dim` numbers,
// is `kv_layout`. With blocks of whole tiles of 16 tokens:
//   pairs16    bf16: a tile of keys is [head_dim / 2][16 tokens][2], one of values [16 / 2 pairs of tokens][head_dim][2]
//   columns16  fp32: a tile of keys is [head_dim][16 tokens], one of values [16 tokens][head_dim]
// so that both products of attention read whole vectors and add no lanes up. Other block sizes: plain, [token][head_dim].
//
// The numbers of a query depend on itself, its keys and values alone, bit for bit: keys are taken in segments and splits whose
// borders are fixed positions, whoever shares the batch, the chunk or the threads. What lies at or past a sequence's context,
// or before the window, meets no number that counts, whatever it holds.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"

namespace pearl::cpu {

constexpr int kTile = 16;
constexpr int kMaxHeadDim = 256;

static constexpr bool tiled(std::int64_t block_size) { return block_size % kTile == 0; }
const char* kv_layout(DType dtype, std::int64_t block_size);

// One layer of the pool. `keys` and `values` are [blocks][kv_heads][block_size * head_dim] each.
struct KvPool {
    void* keys;
    void* values;
    std::int64_t blocks;
    std::int32_t kv_heads, block_size, head_dim;
    DType dtype;
};

// As interface.PagedBatch: queries query_starts[s] .. query_starts[s + 1] are the last of context_lens[s] tokens. A sequence
// of a padded batch may have no queries.
struct PagedBatch {
    const std::int32_t* query_starts;
    const std::int32_t* context_lens;
    const std::int32_t* block_tables;
    std::int64_t table_stride;
    std::int32_t sequences;
};

// q and out: rows of `heads` x head_dim numbers of the pool's dtype, so many numbers apart. window 0: all keys.
struct Attention {
    KvPool pool;
    PagedBatch batch;
    std::int32_t heads;
    float scale;
    std::int32_t window;
    const void* q;
    std::int64_t q_stride;
    void* out;
    std::int64_t out_stride;
};

// Runs inside `parallel`. Throws std::invalid_argument for sizes that no kernel serves; ids and lengths are the caller's word.
void paged_attention(const Attention& attention);

// ---------------------------------------------------------------- between attention.cpp and attention.inl

constexpr int kSegment = 128;  // keys per softmax
constexpr int kSplit = 512;    // keys whose sum is made from nothing, so that several threads may share a sequence
constexpr int kMaxRows = 64;         // (query, head) pairs of one item

// Queries `first_query` .. + `queries` (rows of q) of one sequence, of which the first stands at `position`, for some heads of
// one kv head, over segments `first_segment` .. `end_segment`-1 of the context. partial >= 0: these are part of one split, and
// other items have the other splits; the sums are left in that place, and not written to the output.
struct AttentionItem {
    std::int32_t sequence, kv_head, head, heads, first_query, queries, position, first_segment, end_segment, partial;
};

// One thread's memory.
struct AttentionScratch {
    alignas(64) float scores[kMaxRows * kSegment];
    alignas(64) float weights[kMaxRows * kSegment];     // of either dtype
    alignas(64) float sums[2][kMaxRows * kMaxHeadDim];       // of the split, of all
    alignas(64) float tiles[2][kSegment * kMaxHeadDim];   // of either dtype: keys, values that need another order
    alignas(64) float peaks[3][kMaxRows];                 // of the split, of all, of the segment
    alignas(64) float masses[3][kMaxRows];
    alignas(64) float keep[kMaxRows], add[kMaxRows];
};

// What a split of an item left: sums [rows][padded head_dim], peaks and masses [kMaxRows].
struct AttentionPartial {
    float* sums;
    float* peaks;
    float* masses;
};

static constexpr int padded(int head_dim) { return (head_dim + kTile - 1) / kTile * kTile; }

struct AttentionKernels {
    // `next` (or null) is what this thread probably does next: its first keys and values are fetched ahead.
    using Attend = void (*)(const Attention&, const AttentionItem&, const AttentionItem* next, AttentionPartial partial,
                            AttentionScratch&);
    // Adds up `count` partials in order and writes the rows of the item.
    using Merge = void (*)(const Attention&, const AttentionItem&, const AttentionPartial*, int count, AttentionScratch&);
    Attend attend[2];  // by DType
    Merge merge[2];
};

}  // namespace pearl::cpu
