// Where the numbers of attention lie: the rows of an item, the tiles of keys and values that they need. See attention.h.
#pragma once

#include "cpu/attention.h"
#include "cpu/gemm.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr int kVectorsPerTile = kTile / W;  // vectors of one number per token
constexpr int kSegmentTiles = kSegment / kTile;

// What an item is to the loops below.
template <class T>
struct ItemRows {
    const Attention& all;
    const AttentionItem& item;
    AttentionScratch& scratch;
    int count, heads, dim, padded_dim, steps;  // steps: of Q K^T
    const std::int32_t* table;
    const T* queries[kMaxRows];
    T* weights;

    ItemRows(const Attention& all, const AttentionItem& item, AttentionScratch& scratch)
        : all(all),
          item(item),
          scratch(scratch),
          count(item.queries * item.heads),
          heads(item.heads),
          dim(all.pool.head_dim),
          padded_dim(padded(dim)),
          steps(dim / Step<T>::kElements),
          table(all.batch.block_tables + item.sequence * all.batch.table_stride),
          weights(reinterpret_cast<T*>(scratch.weights)) {
        const T* first = static_cast<const T*>(all.q) + item.first_query * all.q_stride;
        for (int row = 0; row < count; ++row)
            queries[row] = first + row / heads * all.q_stride + static_cast<std::int64_t>(item.head + row % heads) * dim;
    }

    // The keys that query i sees: positions first(i) .. end(i)-1.
    int end(int query) const { return item.position + query + 1; }
    int first(int query) const {
        const int seen = end(query);
        return all.window > 0 && seen > all.window ? seen - all.window : 0;
    }
};

// The tiles of a segment that are needed: tokens first .. end-1 of it, counted from the segment's start.
template <class T>
struct Segment {
    const T* keys[kSegmentTiles];
    const T* values[kSegmentTiles];
    int first, end;
    int first_tile() const { return first / kTile; }
    int end_tile() const { return (end + kTile - 1) / kTile; }
};

// Element i of a token's key, and of its value, in a tile for vectors of `dim` numbers.
template <class T>
static inline std::int64_t key_place(int token, int i) {
    constexpr int w = Step<T>::kElements;
    return (static_cast<std::int64_t>(i / w) * kTile + token) * w + i % w;
}
template <class T>
static inline std::int64_t value_place(int token, int i, int dim) {
    constexpr int w = Step<T>::kElements;
    return (static_cast<std::int64_t>(token / w) * dim + i) * w + token % w;
}

// The key (or value) row of (block, kv_head), as numbers from the start of the pool.
static inline std::int64_t place_of(const KvPool& pool, std::int64_t block, int kv_head, int offset) {
    return ((block * pool.kv_heads + kv_head) * pool.block_size + offset) * static_cast<std::int64_t>(pool.head_dim);
}

// Tokens first .. end-1 of a tile that lies token by token, in the order of a tile. Nothing else is written: scores of other
// tokens are not looked at.
template <class T>
static void gather_keys(const ItemRows<T>& rows, int position, int first, int end, T* tile) {
    const KvPool& pool = rows.all.pool;
    for (int token = first; token < end; ++token) {
        const int at = position + token;
        const T* source = static_cast<const T*>(pool.keys) +
                          place_of(pool, rows.table[at / pool.block_size], rows.item.kv_head, at % pool.block_size);
        for (int i = 0; i < rows.dim; ++i) tile[key_place<T>(token, i)] = source[i];
    }
}

// Tokens first .. end-1 in the order of a tile, its rows padded: zeros in the padding and in the other half of a pair.
template <class T>
static void gather_values(const ItemRows<T>& rows, int position, int first, int end, T* tile) {
    constexpr int w = Step<T>::kElements;
    const KvPool& pool = rows.all.pool;
    const bool in_tiles = tiled(pool.block_size);
    const int begin = first / w * w, stop = (end + w - 1) / w * w;
    for (std::int64_t i = value_place<T>(begin, 0, rows.padded_dim); i < value_place<T>(stop, 0, rows.padded_dim); ++i)
        tile[i] = T{};
    for (int token = first; token < end; ++token) {
        const int at = position + token, offset = at % pool.block_size;
        const T* source = static_cast<const T*>(pool.values) + place_of(pool, rows.table[at / pool.block_size],
                                                                        rows.item.kv_head, in_tiles ? offset - token : offset);
        for (int i = 0; i < rows.dim; ++i)
            tile[value_place<T>(token, i, rows.padded_dim)] = source[in_tiles ? value_place<T>(token, i, rows.dim) : i];
    }
}

// Segment `index` of the rows' context, as far as one of them sees it.
template <class T>
static Segment<T> find_segment(const ItemRows<T>& rows, int index) {
    const KvPool& pool = rows.all.pool;
    const int start = index * kSegment;
    const int last = rows.end(rows.item.queries - 1) - start, first = rows.first(0) - start;
    Segment<T> segment;
    segment.first = first > 0 ? first : 0;
    segment.end = last < kSegment ? last : kSegment;
    const bool in_tiles = tiled(pool.block_size);
    for (int t = segment.first_tile(); t < segment.end_tile(); ++t) {
        const int position = start + t * kTile;
        const int from = segment.first > t * kTile ? segment.first - t * kTile : 0;
        const int to = segment.end - t * kTile < kTile ? segment.end - t * kTile : kTile;
        const std::int64_t place =
            in_tiles ? place_of(pool, rows.table[position / pool.block_size], rows.item.kv_head, position % pool.block_size)
                     : 0;
        T* spare[2];
        for (int i = 0; i < 2; ++i)
            spare[i] = reinterpret_cast<T*>(rows.scratch.tiles[i]) + static_cast<std::int64_t>(t) * kTile * rows.padded_dim;
        segment.keys[t] = in_tiles ? static_cast<const T*>(pool.keys) + place : spare[0];
        if (!in_tiles) gather_keys<T>(rows, position, from, to, spare[0]);
        constexpr int w = Step<T>::kElements;
        const bool direct = in_tiles && rows.dim == rows.padded_dim && from % w == 0 && to % w == 0;
        segment.values[t] = direct ? static_cast<const T*>(pool.values) + place : spare[1];
        if (!direct) gather_values<T>(rows, position, from, to, spare[1]);
    }
    return segment;
}

// Where the keys and values lie that come after this segment; null: not known, or not worth it.
template <class T>
struct Ahead {
    const T* keys[kSegmentTiles];
    const T* values[kSegmentTiles];
    bool some;
};

template <class T>
static Ahead<T> look_ahead(const Attention& all, const AttentionItem& item, int segment) {
    Ahead<T> ahead;
    const KvPool& pool = all.pool;
    const std::int32_t* table = all.batch.block_tables + item.sequence * all.batch.table_stride;
    const int end = item.position + 1;
    int last = 0;
    for (int t = 0; t < kSegmentTiles; ++t) {
        const int position = segment * kSegment + t * kTile;
        if (position < end) last = position;
        const std::int64_t place = place_of(pool, table[last / pool.block_size], item.kv_head, last % pool.block_size);
        ahead.keys[t] = static_cast<const T*>(pool.keys) + place;
        ahead.values[t] = static_cast<const T*>(pool.values) + place;
    }
    ahead.some = true;
    return ahead;
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
