// Which tokens of a row are left, and which of them is drawn. See sampling.h.
#include "cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace pearl::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallestTemperature = 1e-30f;

// Some tokens of a row, in id order. `ids` null: all of them.
struct Candidates {
    const float* scores;
    const std::int32_t* ids;
    std::int64_t count;

    std::int32_t id(std::int64_t i) const { return ids == nullptr ? static_cast<std::int32_t>(i) : ids[i]; }
};

// What a thread needs for a row. Candidates that were picked out live in `scores` and `ids`.
struct Memory {
    std::vector<float> scaled, scores, shares, peaks, sorted;
    std::vector<std::int32_t> ids, order;
    std::vector<double> sums, bucket_mass;
    std::vector<std::int64_t> places;
};

// Keeps those for which keep(i) holds; `memory` may already hold the candidates.
template <class Keep>
Candidates pick(const Candidates& all, Memory& memory, const Keep& keep) {
    if (all.ids == nullptr) {
        memory.scores.resize(static_cast<std::size_t>(all.count));
        memory.ids.resize(static_cast<std::size_t>(all.count));
    }
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < all.count; ++i) {
        if (!keep(i)) continue;
        const std::int32_t id = all.id(i);
        memory.scores[count] = all.scores[i];
        memory.ids[count++] = id;
    }
    return {memory.scores.data(), memory.ids.data(), count};
}

// ---------------------------------------------------------------- the greatest

// Appends to `places` at least the k greatest of x, all that tie with the last of them too, in order; without -inf.
// As many blocks as have a peak above a score hold at least as many scores above it: so most blocks are passed over.
void find_greatest(const float* x, std::int64_t n, std::int64_t k, Memory& memory) {
    const std::int64_t blocks = (n + kPeakBlock - 1) / kPeakBlock;
    memory.places.clear();
    memory.peaks.resize(static_cast<std::size_t>(blocks));
    kernels().sampling.peaks(x, n, memory.peaks.data());
    float bound = -kInfinity;
    if (k < blocks) {
        memory.sorted = memory.peaks;
        std::nth_element(memory.sorted.begin(), memory.sorted.begin() + (k - 1), memory.sorted.end(), std::greater<float>());
        bound = memory.sorted[k - 1];
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
        if (memory.peaks[block] < bound) continue;
        const std::int64_t end = std::min(n, (block + 1) * kPeakBlock);
        for (std::int64_t i = block * kPeakBlock; i < end; ++i)
            if (x[i] >= bound && x[i] > -kInfinity) memory.places.push_back(i);
    }
}

Candidates keep_top_k(const Candidates& all, std::int64_t k, Memory& memory) {
    find_greatest(all.scores, all.count, k, memory);
    float cut = -kInfinity;
    if (static_cast<std::int64_t>(memory.places.size()) > k) {
        memory.sorted.clear();
        for (const std::int64_t i : memory.places) memory.sorted.push_back(all.scores[i]);
        std::nth_element(memory.sorted.begin(), memory.sorted.begin() + (k - 1), memory.sorted.end(), std::greater<float>());
        cut = memory.sorted[k - 1];
    }
    memory.scores.clear();
    memory.ids.clear();
    for (const std::int64_t i : memory.places) {
        if (all.scores[i] < cut) continue;
        memory.scores.push_back(all.scores[i]);
        memory.ids.push_back(all.id(i));
    }
    return {memory.scores.data(), memory.ids.data(), static_cast<std::int64_t>(memory.ids.size())};
}

// ---------------------------------------------------------------- shares

// The sum of exp(score - peak), and memory.sums of its blocks.
double find_mass(const Candidates& all, float peak, float* shares, Memory& memory) {
    memory.sums.resize(static_cast<std::size_t>((all.count + kSumBlock - 1) / kSumBlock));
    return kernels().sampling.mass(all.scores, all.count, peak, memory.sums.data(), shares);
}

// Fills memory.shares with the softmax of the candidates, in fp32.
void find_shares(const Candidates& all, float peak, Memory& memory) {
    memory.shares.resize(static_cast<std::size_t>(all.count));
    const auto mass = static_cast<float>(find_mass(all, peak, memory.shares.data(), memory));
    for (float& share : memory.shares) share /= mass;
}

constexpr std::int64_t kBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0f;

// From the least likely on, tokens go while the shares of those gone and this one add up to at most `spare`. Where many are
// candidates they are put into buckets by score, and only the bucket in which that ends is sorted.
Candidates keep_top_p(const Candidates& all, double top_p, float peak, Memory& memory) {
    const float spare = static_cast<float>(1.0 - top_p);
    if (!(1.0 - top_p > 0.0)) return all;
    find_shares(all, peak, memory);
    const std::int64_t buckets = all.count > kBuckets ? kBuckets : 1;
    const auto bucket_of = [&](std::int64_t i) {
        return std::min<std::int64_t>(buckets - 1, static_cast<std::int64_t>(std::min((peak - all.scores[i]) * kBucketsPerUnit,
                                                                                      static_cast<float>(kBuckets))));
    };
    memory.bucket_mass.assign(static_cast<std::size_t>(buckets), 0.0);
    for (std::int64_t i = 0; i < all.count; ++i) memory.bucket_mass[bucket_of(i)] += memory.shares[i];
    double gone = 0.0;
    std::int64_t last = buckets - 1;
    while (last > 0 && static_cast<float>(gone + memory.bucket_mass[last]) <= spare) gone += memory.bucket_mass[last--];
    memory.order.clear();
    for (std::int64_t i = 0; i < all.count; ++i)
        if (bucket_of(i) == last) memory.order.push_back(static_cast<std::int32_t>(i));
    std::sort(memory.order.begin(), memory.order.end(), [&](std::int32_t a, std::int32_t b) {
        return all.scores[a] != all.scores[b] ? all.scores[a] < all.scores[b] : a > b;
    });
    // The likeliest stays in any case. Its bucket may be empty of others, or be one that holds nothing at all.
    std::size_t first = 0;
    const std::size_t end = memory.order.size() - (last == 0 ? 1 : 0);
    while (first < end) {
        gone += memory.shares[memory.order[first]];
        if (static_cast<float>(gone) > spare) break;
        ++first;
    }
    if (first == memory.order.size())
        return pick(all, memory, [&](std::int64_t i) { return bucket_of(i) < last; });
    const std::int32_t lowest = memory.order[first];
    const float cut = all.scores[lowest];
    return pick(all, memory, [&](std::int64_t i) { return all.scores[i] > cut || (all.scores[i] == cut && i <= lowest); });
}

Candidates keep_min_p(const Candidates& all, float min_p, float peak, Memory& memory) {
    find_shares(all, peak, memory);
    const float best = *std::max_element(memory.shares.begin(), memory.shares.end()), least = min_p * best;
    return pick(all, memory, [&](std::int64_t i) { return memory.shares[i] >= least || memory.shares[i] >= best; });
}

// ---------------------------------------------------------------- the draw

// log-probs are score - peak - log_mass, rounded after each step.
struct Distribution {
    Candidates candidates;
    float peak, log_mass;
    double mass;

    float logprob(float score) const { return (score - peak) - log_mass; }
};

// Leaves the masses of its blocks in memory.sums.
Distribution distribution(const Candidates& candidates, float peak, Memory& memory) {
    const double mass = find_mass(candidates, peak, nullptr, memory);
    return {candidates, peak, static_cast<float>(std::log(mass)), mass};
}

// The sums of blocks in fp32 are this near to those in fp64, as parts of all.
constexpr double kNear = 2e-5;

// A block and what is below it; the first that takes the sum above `target`, or the last.
struct Found {
    std::int64_t block;
    double below;
};

Found find_block(const std::vector<double>& sums, double target) {
    Found found{0, 0.0};
    const auto last = static_cast<std::int64_t>(sums.size()) - 1;
    while (found.block < last && !(found.below + sums[found.block] > target)) found.below += sums[found.block++];
    return found;
}

// The place in a block of the first candidate at which the sum of shares from `below` on is above `target`. `nearest`: how far
// the target is from the two sums that it lies between.
std::int64_t find_place(const Distribution& all, const Found& found, double target, double* nearest) {
    const std::int64_t begin = found.block * kSumBlock, count = std::min(kSumBlock, all.candidates.count - begin);
    double shares[kSumBlock], sum, below = found.below, above = found.below;
    kernels().sampling.block_sums(all.candidates.scores + begin, count, all.peak, all.log_mass, &sum, shares);
    std::int64_t place = 0;
    for (std::int64_t i = 0; i < count && !(above > target); ++i) {
        if (shares[i] == 0.0) continue;
        place = i;  // a block's sum is rounded otherwise than the sum along it: then it is the last that can be
        below = above;
        above += shares[i];
    }
    *nearest = std::min(target - below, above - target);
    return begin + place;
}

// The place of the first candidate at which the cumulative distribution, summed in fp64, is above `uniform` times its total.
// The masses in memory.sums say it already, unless the number falls too near to the border of two candidates.
std::int64_t draw(const Distribution& all, double uniform, Memory& memory) {
    double nearest;
    Found found = find_block(memory.sums, uniform * all.mass);
    found.below /= all.mass;
    const std::int64_t place = find_place(all, found, uniform, &nearest);
    if (nearest > kNear) return place;
    kernels().sampling.block_sums(all.candidates.scores, all.candidates.count, all.peak, all.log_mass, memory.sums.data(),
                                  nullptr);
    double total = 0.0;
    for (const double sum : memory.sums) total += sum;
    return find_place(all, find_block(memory.sums, uniform * total), uniform * total, &nearest);
}

// ---------------------------------------------------------------- rows

Candidates filtered(const SamplingRow& row, const Candidates& all, float peak, Memory& memory) {
    Candidates left = all;
    if (row.top_k > 0 && row.top_k < all.count) left = keep_top_k(left, row.top_k, memory);
    if (row.top_p < 1.0) left = keep_top_p(left, row.top_p, peak, memory);
    if (row.min_p > 0.0f) left = keep_min_p(left, row.min_p, peak, memory);
    return left;
}

std::int64_t list_best(const Distribution& shown, std::int64_t count, RankedToken* best, Memory& memory) {
    const Candidates& all = shown.candidates;
    find_greatest(all.scores, all.count, std::min(count, all.count), memory);
    const auto before = [&](std::int64_t a, std::int64_t b) {
        const float first = shown.logprob(all.scores[a]), second = shown.logprob(all.scores[b]);
        return first != second ? first > second : a < b;
    };
    const std::int64_t listed = std::min<std::int64_t>(count, static_cast<std::int64_t>(memory.places.size()));
    std::partial_sort(memory.places.begin(), memory.places.begin() + listed, memory.places.end(), before);
    for (std::int64_t i = 0; i < listed; ++i)
        best[i] = {all.id(memory.places[i]), shown.logprob(all.scores[memory.places[i]])};
    return listed;
}

SampledRow sample_row(const SamplingRow& row, std::int64_t vocabulary, RankedToken* best, Memory& memory) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const SamplingKernels& kernel = kernels().sampling;
    bool finite;
    const float greatest = kernel.peak(row.logits, vocabulary, &finite);
    if (!finite) return {SamplingError::not_finite, -1, nan, 0};
    bool same;
    float peak = row.scores == row.logits ? greatest : kernel.peak(row.scores, vocabulary, &same);
    if (peak == -kInfinity) return {SamplingError::nothing_left, -1, nan, 0};
    Candidates left{row.scores, nullptr, vocabulary};
    const bool drawn = row.temperature != 0.0f;
    if (drawn && row.temperature != 1.0f) {
        memory.scaled.resize(static_cast<std::size_t>(vocabulary));
        kernel.scale(row.scores, vocabulary, peak, std::max(row.temperature, kSmallestTemperature), memory.scaled.data());
        left.scores = memory.scaled.data();
        peak = 0.0f;
    }
    if (drawn) left = filtered(row, left, peak, memory);
    const Distribution processed = distribution(left, peak, memory);
    const std::int64_t place = drawn ? draw(processed, row.uniform, memory)
                                     : std::find(left.scores, left.scores + left.count, peak) - left.scores;
    const std::int32_t id = left.id(place);
    const Distribution shown = row.raw ? distribution({row.logits, nullptr, vocabulary}, greatest, memory) : processed;
    const float logprob = shown.logprob(row.raw ? row.logits[id] : left.scores[place]);
    return {SamplingError::none, id, logprob, row.best > 0 ? list_best(shown, row.best, best, memory) : 0};
}

}  // namespace

double philox_uniform(std::uint64_t seed, std::uint32_t index, std::uint32_t position) {
    std::uint32_t counter[4] = {position, index, 0, 0};
    std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t first = std::uint64_t{0xD2511F53} * counter[0], second = std::uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0];
        counter[2] = static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1];
        counter[1] = static_cast<std::uint32_t>(second);
        counter[3] = static_cast<std::uint32_t>(first);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    const std::uint64_t bits = (std::uint64_t{counter[0] >> 5} << 26) | (counter[1] >> 6);
    return static_cast<double>(bits) * 0x1p-53;
}

void sample(const SamplingRow* rows, std::int64_t count, std::int64_t vocabulary, SampledRow* sampled, RankedToken* best,
            std::int64_t best_stride) {
    parallel(count, [&](std::int64_t row) {
        thread_local Memory memory;
        sampled[row] = sample_row(rows[row], vocabulary, best + row * best_stride, memory);
    });
}

}  // namespace pearl::cpu
