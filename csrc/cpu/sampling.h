// From fp32 logits to a token per row: temperature, top_k, top_p, min_p, the draw, and the log-probs that go with it.
//
// The meaning is that of pearl/engine/sampler.py, for rows whose penalties and masks have been applied: temperature 0 takes the
// lowest of the best ids; else the score is divided by it, top_k keeps all that tie at its cut, top_p removes the least likely
// whose shares add up to at most 1 - top_p (among equals the higher ids first), min_p what is less likely than so many times
// the likeliest. Of the tokens left, in id order, one is drawn by inverting the cumulative distribution, summed in fp64.
#pragma once

#include <cstdint>

namespace pearl::cpu {

// One uniform in [0, 1) with 53 random bits, as pearl/engine/philox.py makes it (Philox4x32-10 of Salmon et al. 2011).
double philox_uniform(std::uint64_t seed, std::uint32_t index, std::uint32_t position);

struct SamplingRow {
    const float* scores;  // [vocabulary]: with penalties and masks; -inf is no candidate
    const float* logits;  // as the model gave them, all finite or the row has an error; may be `scores`
    float temperature;
    std::int64_t top_k;  // below 1, or no less than the vocabulary: all
    double top_p;
    float min_p;
    double uniform;
    bool raw;                // log-probs of softmax(logits), not of the distribution drawn from
    std::int64_t best = 0;   // how many of the likeliest to list
};

enum class SamplingError : std::int32_t { none, not_finite, nothing_left };

struct RankedToken {
    std::int32_t id;
    float logprob;
};

struct SampledRow {
    SamplingError error;
    std::int32_t id;  // -1 with an error, and NaN for its log-prob
    float logprob;
    std::int64_t best;  // how many are listed: fewer where fewer are possible
};

// best[row * best_stride ..]: the likeliest of each row, lowest id first among equals. Runs inside `parallel`.
void sample(const SamplingRow* rows, std::int64_t count, std::int64_t vocabulary, SampledRow* sampled, RankedToken* best,
            std::int64_t best_stride);

constexpr std::int64_t kSumBlock = 512;   // shares that are added up at a time
constexpr std::int64_t kPeakBlock = 64;   // scores of which the greatest is kept

// What each instruction set brings. n may be any number from 1 on.
struct SamplingKernels {
    // The greatest of x; `finite`: whether all of x is.
    float (*peak)(const float* x, std::int64_t n, bool* finite);
    // The greatest of each kPeakBlock, the last of which may be short.
    void (*peaks)(const float* x, std::int64_t n, float* peaks);
    // The sum of exp(x - shift); `sums`: of each kSumBlock. `shares`, or null: each of them. In fp32, block by block.
    double (*mass)(const float* x, std::int64_t n, float shift, double* sums, float* shares);
    // y = (x - shift) / by.
    void (*scale)(const float* x, std::int64_t n, float shift, float by, float* y);
    // exp(x - shift - log_mass) in fp64, of exponents rounded to fp32 as log-probs are: the sum of each kSumBlock. `shares` not
    // null: each of them too, and n <= kSumBlock.
    void (*block_sums)(const float* x, std::int64_t n, float shift, float log_mass, double* sums, double* shares);
};

}  // namespace pearl::cpu
