// See attention.h. Included by kernels.inl, once per instruction set.
//
// An item is a small matrix of rows (query, head) of one kv head, row = query * heads + head. Its context goes by segments:
// scores = Q K^T, weights = softmax of these, sums = keep * sums + add * (weights V).
#pragma once

#include "cpu/attention_products.inl"
#include "cpu/attention_softmax.inl"

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

constexpr int kSplitSegments = kSplit / kSegment;

static void forget(AttentionScratch& scratch, int which, int rows, int dim) {
    for (int row = 0; row < rows; row += W) {
        store(scratch.peaks[which] + row, broadcast(kNothing));
        store(scratch.masses[which] + row, zero());
    }
    for (int i = 0; i < rows * dim; i += W) store(scratch.sums[which] + i, zero());
}

// Adds a split to the sums of all.
static void take_in_split(const AttentionPartial& split, AttentionScratch& scratch, int rows, int dim) {
    take_in(split.peaks, split.masses, rows, scratch.peaks[1], scratch.masses[1], scratch.keep, scratch.add);
    for (int row = 0; row < rows; ++row) {
        const F keep = broadcast(scratch.keep[row]), add = broadcast(scratch.add[row]);
        const float* source = split.sums + static_cast<std::int64_t>(row) * dim;
        float* target = scratch.sums[1] + static_cast<std::int64_t>(row) * dim;
        for (int i = 0; i < dim; i += W) store(target + i, fma(load(source + i), add, load(target + i) * keep));
    }
}

// The rows of the output from the sums of one split, or of all.
template <class T>
static void write_rows(const ItemRows<T>& rows, int which) {
    for (int row = 0; row < rows.count; ++row) {
        const float* sums = rows.scratch.sums[which] + static_cast<std::int64_t>(row) * rows.padded_dim;
        T* out = static_cast<T*>(rows.all.out) + (rows.item.first_query + row / rows.heads) * rows.all.out_stride +
                 static_cast<std::int64_t>(rows.item.head + row % rows.heads) * rows.dim;
        const F share = broadcast(1.0f / rows.scratch.masses[which][row]);
        int i = 0;
        for (; i + W <= rows.dim; i += W) store(out + i, load(sums + i) * share);
        if (i < rows.dim) store(out + i, load(sums + i) * share, rows.dim - i);
    }
}

template <class T>
static void attend_segment(const ItemRows<T>& rows, int index, const Ahead<T>& ahead) {
    const Segment<T> segment = find_segment<T>(rows, index);
    ahead.some ? score<T, true>(rows, segment, ahead) : score<T, false>(rows, segment, ahead);
    soften_rows<T>(rows, segment, index * kSegment);
    ahead.some ? add_values<T, true>(rows, segment, ahead) : add_values<T, false>(rows, segment, ahead);
}

template <class T>
static void attend(const Attention& all, const AttentionItem& item, const AttentionItem* next, AttentionPartial partial,
                   AttentionScratch& scratch) {
    const ItemRows<T> rows(all, item, scratch);
    const AttentionPartial split{scratch.sums[0], scratch.peaks[0], scratch.masses[0]};
    // A prompt's chunk works on each key for long: fetching ahead is for decode rows.
    const bool fetch = item.queries == 1 && tiled(all.pool.block_size);
    const bool fetch_next = fetch && next != nullptr && next->queries == 1;
    const int splits = (item.end_segment - 1) / kSplitSegments - item.first_segment / kSplitSegments + 1;
    forget(scratch, 0, rows.count, rows.padded_dim);
    if (splits > 1) forget(scratch, 1, rows.count, rows.padded_dim);
    for (int index = item.first_segment; index < item.end_segment; ++index) {
        Ahead<T> ahead;
        ahead.some = false;
        if (fetch && index + 1 < item.end_segment)
            ahead = look_ahead<T>(all, item, index + 1);
        else if (fetch_next)
            ahead = look_ahead<T>(all, *next, next->first_segment);
        attend_segment<T>(rows, index, ahead);
        if (splits > 1 && ((index + 1) % kSplitSegments == 0 || index + 1 == item.end_segment)) {
            take_in_split(split, scratch, rows.count, rows.padded_dim);
            forget(scratch, 0, rows.count, rows.padded_dim);
        }
    }
    // The sums of one split alone are those of all: adding them to nothing changes no bit.
    if (item.partial < 0) return write_rows<T>(rows, splits > 1 ? 1 : 0);
    std::memcpy(partial.sums, split.sums, sizeof(float) * rows.count * rows.padded_dim);
    std::memcpy(partial.peaks, split.peaks, sizeof scratch.peaks[0]);
    std::memcpy(partial.masses, split.masses, sizeof scratch.masses[0]);
}

template <class T>
static void merge(const Attention& all, const AttentionItem& item, const AttentionPartial* partials, int count,
                  AttentionScratch& scratch) {
    const ItemRows<T> rows(all, item, scratch);
    forget(scratch, 1, rows.count, rows.padded_dim);
    for (int i = 0; i < count; ++i) take_in_split(partials[i], scratch, rows.count, rows.padded_dim);
    write_rows<T>(rows, 1);
}

static AttentionKernels attention_kernels() {
    return {{attend<float>, attend<bf16>}, {merge<float>, merge<bf16>}};
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
