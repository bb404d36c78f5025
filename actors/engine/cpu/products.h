// Products with packed bfloat16 weights, y = activation(x W^T + b) + residual, optimized for few rows: each weight is
// fetched from memory once, ahead of its use, and multiplied with all rows. Sums are float32. A row's result depends on
// that row alone, not on the batch or the number of threads.

#pragma once

// The library's products are faster on processors that multiply tiles (AMX).
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
#define CAN_MULTIPLY 1

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <type_traits>

#include "numbers.h"

namespace {

constexpr int64_t VECTORS = 3;          // of 16 sums each, in a panel
constexpr int64_t PANEL = VECTORS * LANES;
constexpr int64_t TILE = 8;             // rows held in registers: 8 x 3 sums, 3 weights and a number of x are 28 of 32
constexpr int64_t DEPTH = 384;          // numbers summed before the next rows: 48 x 384 weights fit the L1 cache
constexpr int64_t MOST_ROWS = 64;       // that a panel is multiplied with in one pass

// Adds `pairs` products of two to the sums [ROWS, PANEL], which begin at `before`, or at 0 where that is null, and gives
// each row's to `end`. weights: [pairs, PANEL, 2]; they and `before` are aligned to 64 bytes. Prefetches `lines` cache
// lines from `next` on.
template <int ROWS, class End>
void add_products(const BFloat16* x, int64_t x_row, const BFloat16* weights, int64_t pairs, const float* before,
                  int64_t before_row, const char* next, int64_t lines, const End& end, int64_t row) {
    __m512 held[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 3
        for (int n = 0; n < VECTORS; n++)
            held[m][n] = before ? _mm512_load_ps(before + m * before_row + n * LANES) : _mm512_setzero_ps();
    const int64_t each = (lines + pairs - 1) / pairs;
    for (int64_t k = 0; k < pairs; k++) {
        __builtin_prefetch(next + k * each * 64, 0, 3);
        if (each > 1) __builtin_prefetch(next + (k * each + 1) * 64, 0, 3);
        if (each > 2) __builtin_prefetch(next + (k * each + 2) * 64, 0, 3);
        __m512bh weight[VECTORS];
        for (int n = 0; n < VECTORS; n++)
            weight[n] = (__m512bh)_mm512_load_si512(weights + (k * VECTORS + n) * 2 * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            int32_t two;
            std::memcpy(&two, x + m * x_row + 2 * k, sizeof two);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
            for (int n = 0; n < VECTORS; n++) held[m][n] = _mm512_dpbf16_ps(held[m][n], both, weight[n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 3
        for (int n = 0; n < VECTORS; n++) end(row + m, n, held[m][n]);
}

template <class End>
constexpr decltype(&add_products<1, End>) TILES[TILE + 1] = {
    nullptr,              add_products<1, End>, add_products<2, End>, add_products<3, End>, add_products<4, End>,
    add_products<5, End>, add_products<6, End>, add_products<7, End>, add_products<8, End>};

// Keeps sums in memory: an `End` of add_products.
struct Keep {
    float* sums;
    int64_t row;

    void operator()(int64_t m, int64_t n, __m512 sum) const { _mm512_store_ps(sums + m * row + n * LANES, sum); }
};

// Rows of x by one panel; `sums` [rows, PANEL] holds them between parts of the inputs, and `end` gets the last ones.
// Prefetches the weights behind the panel.
template <class End>
inline void sum_panel(const BFloat16* x, int64_t x_row, const BFloat16* weights, int64_t inputs, int64_t rows, const Keep& sums,
                      const End& end) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t begin = 0; begin < inputs; begin += DEPTH) {
        const int64_t depth = std::min(DEPTH, inputs - begin), lines = DEPTH * PANEL * 2 / 64;
        const BFloat16* here = weights + begin * PANEL;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t from = t * rows / tiles, to = (t + 1) * rows / tiles;
            const int64_t fetched = t * lines / tiles, upto = (t + 1) * lines / tiles;
            auto run = [&](const auto& then) {
                TILES<std::decay_t<decltype(then)>>[to - from](
                    x + from * x_row + begin, x_row, here, depth / 2, begin ? sums.sums + from * sums.row : nullptr, sums.row,
                    (const char*)(here + depth * PANEL) + fetched * 64, upto - fetched, then, from);
            };
            if (begin + depth < inputs)
                run(sums);
            else
                run(end);
        }
    }
}

struct Product {
    const BFloat16* x;                // [rows, inputs]
    const BFloat16* weight;           // [outputs / 48 rounded up, inputs / 2, 48, 2], aligned to 64 bytes
    const BFloat16 *bias, *residual;  // [outputs], [rows, outputs], or null
    BFloat16* out;                    // [rows, outputs]
    int64_t inputs, outputs;
    bool relu;
};

// Writes the outputs of rows from `first` on, of the panel that begins at output `at`: an `End` of add_products.
struct Write {
    const Product& p;
    int64_t first, at;

    void operator()(int64_t m, int64_t n, __m512 y) const {
        const int64_t output = at + n * LANES, place = (first + m) * p.outputs + output, left = p.outputs - output;
        if (left <= 0) return;
        const __mmask16 mask = first_lanes(left);
        if (p.bias) y = _mm512_add_ps(y, widen(_mm256_maskz_loadu_epi16(mask, p.bias + output)));
        if (p.relu) y = _mm512_max_ps(_mm512_setzero_ps(), y);  // with the operands in this order NaN stays NaN
        if (p.residual) y = _mm512_add_ps(y, widen(_mm256_maskz_loadu_epi16(mask, p.residual + place)));
        _mm256_mask_storeu_epi16(p.out + place, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
};

// Rows first ... last - 1, at most MOST_ROWS, of the outputs of one panel.
inline void multiply_panel(const Product& p, int64_t panel, int64_t first, int64_t last) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    sum_panel(p.x + first * p.inputs, p.inputs, p.weight + panel * PANEL * p.inputs, p.inputs, last - first,
              Keep{sums, PANEL}, Write{p, first, panel * PANEL});
}

// All rows, divided among the threads of the calling parallel region.
inline void multiply(const Product& p, int64_t rows) {
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, threads = omp_get_num_threads();
    // smaller blocks of rows if there are more threads than panels
    const int64_t block = std::min(MOST_ROWS, std::max(TILE, rows * panels / threads / TILE * TILE));
    const int64_t blocks = (rows + block - 1) / block;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t first = task / panels * block;
        multiply_panel(p, task % panels, first, std::min(first + block, rows));
    }
}

}  // namespace

#else
#define CAN_MULTIPLY 0
#endif
