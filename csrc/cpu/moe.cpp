// The order of operations of a mixture of experts. See moe.h.
#include "cpu/moe.h"

#include <vector>

#include "cpu/table.h"
#include "cpu/threads.h"

namespace pearl::cpu {
namespace {

constexpr std::int64_t kRowsPerChunk = 16;

// The parts of the scratch memory, each on a cache line of its own.
struct Scratch {
    float *logits, *shares, *results;  // [rows, experts], [rows, top_k], [rows * top_k, hidden]
    void* inner;                       // [rows * top_k, inner]
    std::int32_t *chosen, *tokens, *slots;  // [rows * top_k] each: experts; the rows and the places of each expert's tokens
    std::size_t bytes = 0;

    Scratch(const MoeArguments& a, void* memory) {
        const std::int64_t places = a.rows * a.top_k;
        auto take = [&](std::int64_t count, std::int64_t size) {
            void* part = memory == nullptr ? nullptr : static_cast<char*>(memory) + bytes;
            bytes += static_cast<std::size_t>((count * size + 63) / 64 * 64);
            return part;
        };
        logits = static_cast<float*>(take(a.rows * a.router.n, 4));
        shares = static_cast<float*>(take(places, 4));
        results = static_cast<float*>(take(places * a.router.k, 4));
        inner = take(places * (a.here > 0 ? a.down[0].k : 0), size_of(a.router.dtype));
        chosen = static_cast<std::int32_t*>(take(places, 4));
        tokens = static_cast<std::int32_t*>(take(places, 4));
        slots = static_cast<std::int32_t*>(take(places, 4));
    }
};

// Sorts the places by expert, those of one expert in order. Returns where each expert's begin, and where the last one's end.
std::vector<std::int64_t> sort_places(const MoeArguments& a, const Scratch& s) {
    std::vector<std::int64_t> begins(static_cast<std::size_t>(a.here) + 1, 0);
    const std::int64_t places = a.rows * a.top_k;
    const auto is_here = [&](std::int64_t expert) { return expert >= a.first && expert < a.first + a.here; };
    for (std::int64_t p = 0; p < places; ++p)
        if (is_here(s.chosen[p])) ++begins[static_cast<std::size_t>(s.chosen[p] - a.first) + 1];
    for (std::size_t e = 0; e < static_cast<std::size_t>(a.here); ++e) begins[e + 1] += begins[e];
    std::vector<std::int64_t> next = begins;
    for (std::int64_t p = 0; p < places; ++p) {
        if (!is_here(s.chosen[p])) continue;
        const std::int64_t at = next[static_cast<std::size_t>(s.chosen[p] - a.first)]++;
        s.tokens[at] = static_cast<std::int32_t>(p / a.top_k);
        s.slots[at] = static_cast<std::int32_t>(p);
    }
    return begins;
}

template <class Run>
void in_row_chunks(std::int64_t rows, const Run& run) {
    const std::int64_t chunks = (rows + kRowsPerChunk - 1) / kRowsPerChunk;
    parallel(chunks, [&](std::int64_t chunk) { run(rows * chunk / chunks, rows * (chunk + 1) / chunks); });
}

void choose(const MoeArguments& a, const Scratch& s) {
    GemmArguments router{a.x, a.rows, a.x_stride, a.router, Epilogue::wide};
    router.y = s.logits;
    router.y_stride = a.router.n;
    gemm(router);
    in_row_chunks(a.rows, [&](std::int64_t begin, std::int64_t end) {
        kernels().moe.route(s.logits + begin * a.router.n, end - begin, a.router.n, a.top_k, a.normalise,
                            s.chosen + begin * a.top_k, s.shares + begin * a.top_k);
    });
}

// Gate and up of all experts in one loop, down in another.
void run_experts(const MoeArguments& a, const Scratch& s, const std::vector<std::int64_t>& begins) {
    std::vector<GemmArguments> up, down;
    for (std::size_t e = 0; e < static_cast<std::size_t>(a.here); ++e) {
        const std::int64_t begin = begins[e], count = begins[e + 1] - begin, inner = a.down[e].k;
        if (count == 0) continue;
        GemmArguments first{a.x, count, a.x_stride, a.gate_up[e], Epilogue::silu_mul};
        first.x_rows = s.tokens + begin;
        first.y = static_cast<char*>(s.inner) + begin * inner * size_of(a.router.dtype);
        first.y_stride = inner;
        up.push_back(first);
        GemmArguments second{first.y, count, inner, a.down[e], Epilogue::wide};
        second.y = s.results;
        second.y_stride = a.router.k;
        second.y_rows = s.slots + begin;
        down.push_back(second);
    }
    gemm_all(up.data(), static_cast<std::int64_t>(up.size()));
    gemm_all(down.data(), static_cast<std::int64_t>(down.size()));
}

}  // namespace

std::size_t moe_scratch_bytes(const MoeArguments& arguments) { return Scratch(arguments, nullptr).bytes; }

void moe(const MoeArguments& a) {
    const Scratch s(a, a.scratch);
    const std::int64_t hidden = a.router.k;
    choose(a, s);
    run_experts(a, s, sort_places(a, s));
    in_row_chunks(a.rows, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r)
            kernels().moe.mix(s.results + r * a.top_k * hidden, hidden, s.shares + r * a.top_k, s.chosen + r * a.top_k, a.top_k,
                              a.first, a.here, hidden, a.router.dtype,
                              static_cast<char*>(a.y) + r * a.y_stride * size_of(a.router.dtype));
    });
}

}  // namespace pearl::cpu
