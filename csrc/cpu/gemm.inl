// The product of some rows with some panels. See gemm.h and kernels.inl.
#pragma once

namespace pearl::cpu::PEARL_ISA_NAMESPACE {

// A step along k takes 32 bits of each row of x and of W: one float, or a pair of bf16.
template <class T>
struct Step;

template <>
struct Step<float> {
    using V = F;
    static constexpr int kElements = 1;
    static V weights(const float* p) { return load(p); }
    static V everywhere(const float* p) { return broadcast(*p); }
    static F add(V x, V w, F sum) { return fma(x, w, sum); }
};

template <>
struct Step<bf16> {
    using V = P;
    static constexpr int kElements = 2;
    static V weights(const bf16* p) { return load_pairs(p); }
    static V everywhere(const bf16* p) { return broadcast_pair(p); }
    static F add(V x, V w, F sum) { return dot(x, w, sum); }
};

// Rows and vectors of columns whose sums are kept in registers at a time; a single row takes the whole panel, so that memory
// is read in order.
#if defined(PEARL_ISA_AVX512_BF16) || defined(PEARL_ISA_AVX512)
constexpr int kTileRows = 8;
template <class T, int R>
constexpr int kTileVectors = 3;
#else  // 16 registers; a widened pair of bf16 takes two
constexpr int kTileRows = 4;
template <class T, int R>
constexpr int kTileVectors = R == 1 ? static_cast<int>(kPanel) / W : sizeof(T) == 4 ? 3 : 2;
#endif

constexpr std::int64_t kStepBytes = kPanel * 4;  // of a panel
constexpr int kLine = 64;
constexpr int kLinesPerStep = static_cast<int>(kStepBytes / kLine);

template <class T, int R>
constexpr int kStrips = static_cast<int>(kPanel) / (kTileVectors<T, R> * W);  // of columns, one after the other

// Where a panel that is read once is fetched to, and how far ahead. With few rows memory sets the pace, and lines are best
// brought to the nearest cache just before their use; with more, arithmetic does, and the second cache in good time is better.
constexpr bool reads_near(std::int64_t rows) { return rows <= 4; }
constexpr std::int64_t lead_bytes(std::int64_t rows) { return reads_near(rows) ? 4 << 10 : 8 << 10; }

// sums[R][kPanel] = x[0..R-1] . panel. On the way fetches `Fetch` cache lines a step of what comes later.
template <class T, int R, int Fetch>
void tile(const T* const* x, const T* panel, std::int64_t k, const char* later, float* sums) {
    using S = Step<T>;
    constexpr int C = kTileVectors<T, R>;
    static_assert(kPanel % (C * W) == 0);
    constexpr int strips = kStrips<T, R>, fetch = (Fetch + strips - 1) / strips;
    constexpr int nearness = Fetch == kLinesPerStep && strips == 1 && reads_near(R) ? 3 : 2;
    const std::int64_t steps = k / S::kElements;
    const T* rows[R];
    PEARL_UNROLL
    for (int r = 0; r < R; ++r) rows[r] = x[r];
    for (int strip = 0, column = 0; strip < strips; ++strip, column += C * W) {
        const T* w = panel + column * S::kElements;
        F sum[R][C];
        PEARL_UNROLL
        for (int r = 0; r < R; ++r)
            PEARL_UNROLL
            for (int c = 0; c < C; ++c) sum[r][c] = zero();
        const auto step = [&](const T* const* at, std::int64_t offset) __attribute__((always_inline)) {
            typename S::V weights[C], value = S::everywhere(at[0] + offset);
            PEARL_UNROLL
            for (int c = 0; c < C; ++c) {
                weights[c] = S::weights(w + c * W * S::kElements);
                sum[0][c] = S::add(value, weights[c], sum[0][c]);
            }
            PEARL_UNROLL
            for (int r = 1; r < R; ++r) {
                value = S::everywhere(at[r] + offset);
                PEARL_UNROLL
                for (int c = 0; c < C; ++c) sum[r][c] = S::add(value, weights[c], sum[r][c]);
            }
            w += kPanel * S::kElements;
        };
        for (std::int64_t s = 0; s < steps; ++s) {
            if (strip * fetch < Fetch)
                PEARL_UNROLL
                for (int line = 0; line < fetch; ++line, later += kLine) __builtin_prefetch(later, 0, nearness);
            step(rows, s * S::kElements);
        }
        if (k % S::kElements) {  // half a pair: the other half of the panel's is zero
            T half[R][2];
            const T* halves[R];
            for (int r = 0; r < R; ++r) {
                half[r][0] = rows[r][k - 1];
                half[r][1] = T{};
                halves[r] = half[r];
            }
            step(halves, 0);
        }
        PEARL_UNROLL
        for (int r = 0; r < R; ++r)
            PEARL_UNROLL
            for (int c = 0; c < C; ++c) store(sums + r * kPanel + column + c * W, sum[r][c]);
    }
}

template <class T>
using Tile = void (*)(const T* const*, const T*, std::int64_t, const char*, float*);

template <class T, int Fetch>
Tile<T> tile_of_rows(int rows) {
    switch (rows) {
        case 1: return tile<T, 1, Fetch>;
        case 2: return tile<T, 2, Fetch>;
        case 3: return tile<T, 3, Fetch>;
        case 4: return tile<T, 4, Fetch>;
#if defined(PEARL_ISA_AVX512_BF16) || defined(PEARL_ISA_AVX512)
        case 5: return tile<T, 5, Fetch>;
        case 6: return tile<T, 6, Fetch>;
        case 7: return tile<T, 7, Fetch>;
        default: return tile<T, 8, Fetch>;
#else
        default: __builtin_unreachable();
#endif
    }
}

template <class T>
Tile<T> tile_of(int rows, int fetch) {
    switch (fetch) {
        case 0: return tile_of_rows<T, 0>(rows);
        case 1: return tile_of_rows<T, 1>(rows);
        case 2: return tile_of_rows<T, 2>(rows);
        default: return tile_of_rows<T, kLinesPerStep>(rows);
    }
}

// Writes one row of one group: `sums` is [kPanel], or two of them (gate, up).
template <class T>
void finish_row(const GemmArguments& a, std::int64_t row, std::int64_t column, std::int64_t columns, const float* sums,
                const float* up_sums) {
    const T* bias = static_cast<const T*>(a.bias);
    const std::int64_t half = a.weight.n / 2;
    const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride + column;
    T* y = static_cast<T*>(a.y) + row * a.y_stride + column;
    float* wide = static_cast<float*>(a.y) + row * a.y_stride + column;
    for (int c = 0; c < columns; c += W) {
        const int n = columns - c < W ? static_cast<int>(columns - c) : W;
        F v = load(sums + c);
        if (bias != nullptr) v = v + load_some(bias + column + c, n);
        switch (a.epilogue) {
            case Epilogue::none: store_some(y + c, v, n); break;
            case Epilogue::residual: store_some(y + c, v + load_some(residual + c, n), n); break;
            case Epilogue::wide: store_some(wide + c, v, n); break;
            case Epilogue::silu_mul: {
                F up = load(up_sums + c);
                if (bias != nullptr) up = up + load_some(bias + half + column + c, n);
                store_some(y + c, silu(v) * up, n);
                break;
            }
        }
    }
}

// Where the panels of a weight lie.
struct Groups {
    std::int64_t columns;  // of y
    std::int64_t panel_bytes;
    int panels;  // of a group
    explicit Groups(const PackedMatrix& weight)
        : columns(weight.halves ? weight.n / 2 : weight.n),
          panel_bytes((weight.dtype == DType::bf16 ? (weight.k + 1) / 2 : weight.k) * kStepBytes),
          panels(weight.halves ? 2 : 1) {}
    std::int64_t bytes() const { return panels * panel_bytes; }
};

// One group of panels times some rows, a tile of rows at a time. A weight that is read once is fetched some way ahead of its
// use; while one is read again and again (from the cache) the next one is fetched, spread over the first passes.
template <class T>
void run_group(const GemmArguments& a, const Groups& groups, std::int64_t group, std::int64_t row_begin, std::int64_t row_end) {
    alignas(64) float sums[2][kTileRows * kPanel];
    const char* data = static_cast<const char*>(a.weight.data) + group * groups.bytes();
    const std::int64_t rows = row_end - row_begin, tiles = (rows + kTileRows - 1) / kTileRows;
    const std::int64_t column = group * kPanel;
    const std::int64_t columns = groups.columns - column < kPanel ? groups.columns - column : kPanel;
    const int share = tiles == 1 ? kLinesPerStep : tiles == 2 ? 2 : 1;
    const bool once = rows == 1 || (tiles == 1 && kStrips<T, 2> == 1);
    const char* later = once ? data + lead_bytes(rows) : data + groups.bytes();
    const char* const later_end = data + 2 * groups.bytes();
    for (std::int64_t t = 0; t < tiles; ++t) {
        const std::int64_t begin = row_begin + rows * t / tiles, end = row_begin + rows * (t + 1) / tiles;
        const int count = static_cast<int>(end - begin);
        const T* x[kTileRows];
        for (int r = 0; r < count; ++r) {
            const std::int64_t row = a.x_rows == nullptr ? begin + r : a.x_rows[begin + r];
            x[r] = static_cast<const T*>(a.x) + row * a.x_stride;
        }
        for (int p = 0; p < groups.panels; ++p) {
            const bool fetch = later < later_end;
            const T* panel = reinterpret_cast<const T*>(data + p * groups.panel_bytes);
            tile_of<T>(count, fetch ? share : 0)(x, panel, a.weight.k, later, sums[p]);
            if (fetch) later += groups.panel_bytes * share / kLinesPerStep;
        }
        for (int r = 0; r < count; ++r) {
            const std::int64_t row = a.y_rows == nullptr ? begin + r : a.y_rows[begin + r];
            finish_row<T>(a, row, column, columns, sums[0] + r * kPanel, sums[1] + r * kPanel);
        }
    }
}

static void run(const GemmArguments& a, std::int64_t row_begin, std::int64_t row_end, std::int64_t group_begin,
         std::int64_t group_end) {
    const Groups groups(a.weight);
    for (std::int64_t group = group_begin; group < group_end; ++group) {
        if (a.weight.dtype == DType::bf16)
            run_group<bf16>(a, groups, group, row_begin, row_end);
        else
            run_group<float>(a, groups, group, row_begin, row_end);
    }
}

}  // namespace pearl::cpu::PEARL_ISA_NAMESPACE
