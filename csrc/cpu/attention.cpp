// The items of an attention call, and who computes them.
#include "cpu/attention.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace pearl::cpu {
namespace {

constexpr int kSplitSegments = kSplit / kSegment;
constexpr int kChunkRows = 48;      // of a prompt: rows that are worth reading a key for
constexpr int kItemsPerThread = 8;  // so that threads that end early find something

int segments(int tokens) { return (tokens + kSegment - 1) / kSegment; }

// Items in order; partials of one split context follow each other.
struct Plan {
    struct Split {
        std::int32_t item, count;  // the first of `count` items
    };
    std::vector<AttentionItem> items;
    std::vector<Split> splits;
    std::vector<float> memory;
    std::vector<AttentionPartial> partials;
};

void check(const Attention& attention) {
    const KvPool& pool = attention.pool;
    const auto refuse = [](const std::string& text) { throw std::invalid_argument(text); };
    if (pool.head_dim < 2 || pool.head_dim > kMaxHeadDim || pool.head_dim % 2 != 0)
        refuse("head_dim=" + std::to_string(pool.head_dim) + ": must be even, from 2 to " + std::to_string(kMaxHeadDim));
    if (pool.block_size < 1) refuse("block_size=" + std::to_string(pool.block_size) + ": must be >= 1");
    if (pool.kv_heads < 1 || attention.heads < 1 || attention.heads % pool.kv_heads != 0)
        refuse("heads=" + std::to_string(attention.heads) + ": must be a multiple of kv_heads=" +
               std::to_string(pool.kv_heads));
    if (attention.window < 0) refuse("window=" + std::to_string(attention.window) + ": must be >= 0");
}

// Whether there are so few items that threads would share them unevenly: then long contexts are cut.
bool should_split(const Attention& attention) {
    return threads() > 1 && attention.batch.sequences * attention.pool.kv_heads < 4 * threads();
}

// One item, or one for each split of its context.
void add_item(AttentionItem item, const Attention& attention, bool split, Plan& plan) {
    const int seen = attention.window > 0 ? std::max(0, item.position + 1 - attention.window) : 0;
    item.first_segment = seen / kSegment;
    item.end_segment = segments(item.position + item.queries);
    const int first = item.first_segment / kSplitSegments;
    const int end = (item.end_segment + kSplitSegments - 1) / kSplitSegments;
    if (!split || item.queries > 1 || end - first < 2) {
        plan.items.push_back(item);
        return;
    }
    plan.splits.push_back({static_cast<std::int32_t>(plan.items.size()), end - first});
    const AttentionItem whole = item;
    for (int s = first; s < end; ++s) {
        item.first_segment = std::max(whole.first_segment, s * kSplitSegments);
        item.end_segment = std::min(whole.end_segment, (s + 1) * kSplitSegments);
        item.partial = static_cast<std::int32_t>(plan.partials.size());
        plan.partials.push_back({});
        plan.items.push_back(item);
    }
}

void make_plan(const Attention& attention, Plan& plan) {
    plan.items.clear();
    plan.splits.clear();
    plan.partials.clear();
    const PagedBatch& batch = attention.batch;
    const int group = attention.heads / attention.pool.kv_heads;
    const int together = std::min(group, kMaxRows), most = std::max(1, kChunkRows / together);
    const bool split = should_split(attention);
    for (int s = 0; s < batch.sequences; ++s) {
        const int start = batch.query_starts[s], queries = batch.query_starts[s + 1] - start;
        // The last chunk of a prompt sees most: threads are done at the same time if that one comes first.
        for (int end = queries; end > 0; end -= most) {
            const int first = std::max(0, end - most);
            for (int head = 0; head < attention.heads; head += std::min(together, group - head % group)) {
                AttentionItem item{};
                item.sequence = s;
                item.kv_head = head / group;
                item.head = head;
                item.heads = std::min(together, group - head % group);
                item.first_query = start + first;
                item.queries = end - first;
                item.position = batch.context_lens[s] - queries + first;
                item.partial = -1;
                add_item(item, attention, split, plan);
            }
        }
    }
}

void place_partials(const Attention& attention, Plan& plan) {
    const std::int64_t sums = static_cast<std::int64_t>(kMaxRows) * padded(attention.pool.head_dim);
    const std::int64_t each = sums + 2 * kMaxRows;
    plan.memory.resize(plan.partials.size() * each);
    float* place = plan.memory.data();
    for (AttentionPartial& partial : plan.partials) {
        partial = {place, place + sums, place + sums + kMaxRows};
        place += each;
    }
}

AttentionScratch& scratch() {
    thread_local const auto memory = std::make_unique<AttentionScratch>();
    return *memory;
}

}  // namespace

const char* kv_layout(DType dtype, std::int64_t block_size) {
    if (!tiled(block_size)) return "plain";
    return dtype == DType::bf16 ? "pairs16" : "columns16";
}

void paged_attention(const Attention& attention) {
    check(attention);
    thread_local Plan plan_memory;
    Plan& plan = plan_memory;  // the caller's, in the helpers too
    make_plan(attention, plan);
    place_partials(attention, plan);
    const auto kind = static_cast<int>(attention.pool.dtype);
    const AttentionKernels& kernel = kernels().attention;
    const auto count = static_cast<std::int64_t>(plan.items.size());
    const std::int64_t each = threads() == 1 ? std::max<std::int64_t>(count, 1)
                                             : std::max<std::int64_t>(1, count / (kItemsPerThread * threads()));
    parallel((count + each - 1) / each, [&](std::int64_t chunk) {
        const std::int64_t end = std::min(count, (chunk + 1) * each);
        for (std::int64_t i = chunk * each; i < end; ++i) {
            const AttentionItem& item = plan.items[i];
            kernel.attend[kind](attention, item, i + 1 < end ? &plan.items[i + 1] : nullptr,
                                item.partial < 0 ? AttentionPartial{} : plan.partials[item.partial], scratch());
        }
    });
    parallel(static_cast<std::int64_t>(plan.splits.size()), [&](std::int64_t index) {
        const Plan::Split split = plan.splits[index];
        const AttentionItem& item = plan.items[split.item];
        kernel.merge[kind](attention, item, plan.partials.data() + item.partial, split.count, scratch());
    });
}

}  // namespace pearl::cpu
