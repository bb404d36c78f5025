// Products with packed int8 weights, y = activation(x W^T + b) + residual, as products.h has them in bfloat16: half the
// bytes, and twice the products an instruction. Weights have one scale an output; the numbers of x are rounded to 8 bits
// with one scale for each GROUP of a row (as in ZeroQuant, Yao et al., 2022). Products of two int8 numbers are summed
// exactly within a group, groups in float32. A row's result depends on that row alone.

#pragma once

#include "products.h"

#if CAN_MULTIPLY && defined(__AVX512VNNI__)
#define CAN_QUANTIZE 1

namespace {

constexpr int64_t GROUP = 64;         // numbers of x with one scale; columns are padded to a multiple
constexpr int64_t QUADS = GROUP / 4;  // of 4 products, which one instruction sums
constexpr int64_t GROUPS_AT_ONCE = 6;  // summed before the next rows: their weights fit the L1 cache
constexpr int64_t QUANTIZED_TILE = 4;     // rows held in registers; with more of them the sums of groups take longer
constexpr int64_t GROUP_BYTES = PANEL * (GROUP + 4);  // of a panel: its corrections, then its weights

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// Bytes of a packed panel: 48 scales, then its groups.
inline int64_t panel_bytes(int64_t inputs) { return PANEL * 4 + groups_of(inputs) * GROUP_BYTES; }

// Rows of numbers in 8 bits: codes [rows, groups x 64] are 128 more than the number divided by its group's scale.
struct Codes {
    uint8_t* codes;
    float* scales;  // [rows, groups]; NaN for a group with a number that is not finite
};

// sums += codes x weights, four products each. Not by the intrinsic: GCC 12 copies its sums and reads its weights from
// memory once a row.
inline void add_quads(__m512i& sums, __m512i codes, __m512i weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(weights));
}

// Numbers of bfloat16 whose memory holds the codes of `rows` rows.
inline int64_t numbers_of_codes(int64_t rows, int64_t inputs) {
    return (rows * groups_of(inputs) * (GROUP + 4) + 64) / 2;
}

inline Codes codes_in(BFloat16* memory, int64_t rows, int64_t inputs) {
    uint8_t* codes = (uint8_t*)(((uintptr_t)memory + 63) / 64 * 64);
    return {codes, (float*)(codes + rows * groups_of(inputs) * GROUP)};
}

// One group of up to 64 numbers; its missing ones are 0.
inline void quantize_group(const BFloat16* x, int64_t count, uint8_t* codes, float* scale) {
    __m512 numbers[4];
    for (int64_t i = 0; i < 4; i++) {
        const int64_t left = std::max<int64_t>(0, count - i * LANES);
        numbers[i] = left ? widen(_mm256_maskz_loadu_epi16(first_lanes(left), x + i * LANES)) : _mm512_setzero_ps();
    }
    __m512i bits = _mm512_setzero_si512();  // as integers, infinity and NaN are above all numbers
    for (int64_t i = 0; i < 4; i++)
        bits = _mm512_max_epi32(bits, _mm512_castps_si512(_mm512_abs_ps(numbers[i])));
    const int32_t highest = _mm512_reduce_max_epi32(bits);
    float absolute;
    std::memcpy(&absolute, &highest, sizeof absolute);
    const bool finite = highest < 0x7f800000;
    *scale = finite ? absolute / 127 : __builtin_nanf("");
    const __m512 inverse = _mm512_set1_ps(finite && absolute > 0 ? 127 / absolute : 0);
    for (int64_t i = 0; i < 4; i++) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(numbers[i], inverse));  // to the nearest, ties to even
        const __m512i shifted = _mm512_add_epi32(rounded, _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i*)(codes + i * LANES), _mm512_cvtusepi32_epi8(shifted));
    }
}

// Rows of x [rows, inputs], divided among the threads of the calling parallel region.
inline void quantize(const BFloat16* x, int64_t rows, int64_t inputs, Codes to) {
    const int64_t groups = groups_of(inputs);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++)
            quantize_group(x + row * inputs + g * GROUP, std::min(GROUP, inputs - g * GROUP),
                           to.codes + (row * groups + g) * GROUP, to.scales + row * groups + g);
}

// Adds `count` groups to the sums [ROWS, PANEL], or initializes them. codes and scales have `groups` a row. Prefetches
// `lines` cache lines from `next` on.
template <int ROWS>
void add_groups(const uint8_t* codes, const float* scales, int64_t groups, const int8_t* weights, int64_t count,
                float* sums, bool first, const char* next, int64_t lines) {
    const int64_t each = (lines + count - 1) / count;
    for (int64_t g = 0; g < count; g++) {
        const int8_t* here = weights + g * GROUP_BYTES;
        const uint8_t* mine = codes + g * GROUP;
        for (int64_t line = 0; line < each; line++) __builtin_prefetch(next + (g * each + line) * 64, 0, 3);
        __m512i exact[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 3
            for (int n = 0; n < VECTORS; n++) asm volatile("vmovdqa64 %1, %0" : "=v"(exact[m][n]) : "m"(*(const __m512i*)(here + n * 64)));
        here += PANEL * 4;
#pragma GCC unroll 16
        for (int64_t q = 0; q < QUADS; q++) {
            __m512i weight[VECTORS];
            for (int n = 0; n < VECTORS; n++) weight[n] = _mm512_load_si512(here + (q * VECTORS + n) * 64);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; m++) {
                int32_t four;
                std::memcpy(&four, mine + m * groups * GROUP + q * 4, sizeof four);
                const __m512i all = _mm512_set1_epi32(four);
                for (int n = 0; n < VECTORS; n++) add_quads(exact[m][n], all, weight[n]);
            }
        }
        const bool begins = first && g == 0;
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            const __m512 scale = _mm512_set1_ps(scales[m * groups + g]);
#pragma GCC unroll 3
            for (int n = 0; n < VECTORS; n++) {
                float* sum = sums + m * PANEL + n * LANES;
                const __m512 before = begins ? _mm512_setzero_ps() : _mm512_load_ps(sum);
                _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[m][n]), scale, before));
            }
        }
    }
}

constexpr decltype(&add_groups<1>) QUANTIZED_TILES[QUANTIZED_TILE + 1] = {
    nullptr, add_groups<1>, add_groups<2>, add_groups<3>, add_groups<4>};

// Rows `from` ... `to` - 1 by one packed panel: sums [rows, PANEL] before the weights' scales.
inline void sum_quantized_panel(const Codes& x, int64_t from, int64_t to, int64_t inputs, const char* panel, float* sums) {
    const int64_t groups = groups_of(inputs), rows = to - from, tiles = (rows + QUANTIZED_TILE - 1) / QUANTIZED_TILE;
    const char* weights = panel + PANEL * 4;
    for (int64_t begin = 0; begin < groups; begin += GROUPS_AT_ONCE) {
        const int64_t count = std::min(GROUPS_AT_ONCE, groups - begin), lines = count * GROUP_BYTES / 64;
        const char* here = weights + begin * GROUP_BYTES;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t a = t * rows / tiles, b = (t + 1) * rows / tiles;
            const int64_t fetched = t * lines / tiles, upto = (t + 1) * lines / tiles;
            QUANTIZED_TILES[b - a](x.codes + ((from + a) * groups + begin) * GROUP, x.scales + (from + a) * groups + begin,
                                   groups, (const int8_t*)here, count, sums + a * PANEL, begin == 0,
                                   here + count * GROUP_BYTES + fetched * 64, upto - fetched);
        }
    }
}

struct QuantizedProduct {
    Codes x;
    const char* weight;               // [outputs / 48 rounded up] packed panels, aligned to 64 bytes
    const BFloat16 *bias, *residual;  // [outputs], [rows, outputs], or null
    BFloat16* out;                    // [rows, outputs]
    int64_t inputs, outputs;
    bool relu;
};

inline void multiply_quantized_panel(const QuantizedProduct& p, int64_t panel, int64_t first, int64_t last) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    const char* packed = p.weight + panel * panel_bytes(p.inputs);
    sum_quantized_panel(p.x, first, last, p.inputs, packed, sums);
    for (int64_t at = panel * PANEL, n = 0; n < VECTORS && at < p.outputs; n++, at += LANES) {
        const __mmask16 mask = first_lanes(p.outputs - at);
        const __m512 scale = _mm512_load_ps((const float*)packed + n * LANES);
        const __m512 bias = p.bias ? widen(_mm256_maskz_loadu_epi16(mask, p.bias + at)) : _mm512_setzero_ps();
        for (int64_t row = first; row < last; row++) {
            const int64_t place = row * p.outputs + at;
            __m512 y = _mm512_fmadd_ps(_mm512_load_ps(sums + (row - first) * PANEL + n * LANES), scale, bias);
            if (p.relu) y = _mm512_max_ps(_mm512_setzero_ps(), y);
            if (p.residual) y = _mm512_add_ps(y, widen(_mm256_maskz_loadu_epi16(mask, p.residual + place)));
            _mm256_mask_storeu_epi16(p.out + place, mask, (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
}

// All rows, divided among the threads of the calling parallel region.
inline void multiply(const QuantizedProduct& p, int64_t rows) {
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, threads = omp_get_num_threads();
    const int64_t block = std::min(MOST_ROWS, std::max(TILE, rows * panels / threads / TILE * TILE));
    const int64_t blocks = (rows + block - 1) / block;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t first = task / panels * block;
        multiply_quantized_panel(p, task % panels, first, std::min(first + block, rows));
    }
}

}  // namespace

#else
#define CAN_QUANTIZE 0
#endif
