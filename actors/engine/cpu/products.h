// Matrix products with packed weights, y = activation(x W^T + b) + residual, optimized for few rows: each weight is
// prefetched once and multiplied with all rows. Sums are float32. A row's result depends only on that row, not on the
// batch or number of threads. Weights are float32 or bfloat16, or int8 if the processor has the instructions.

#pragma once

#include <omp.h>

#include <array>
#include <utility>

#include "numbers.h"

// On processors that multiply tiles (AMX), torch's products in bfloat16 are faster.
#ifdef __AMX_BF16__
#define CAN_MULTIPLY 0
#else
#define CAN_MULTIPLY 1
#endif
#if CAN_MULTIPLY && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define CAN_QUANTIZE 1
#else
#define CAN_QUANTIZE 0
#endif

namespace {

// WIDTH: float32 numbers in a register. TILE: number of rows for which the sums of a panel fit the registers.
#ifdef __AVX512F__
constexpr int64_t WIDTH = 16, TILE = 8;  // 8 x 3 sums, 3 weights and a number of x take 28 of 32 registers
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, TILE = 2;  // 2 x 6 sums, a weight and 2 numbers of x take 15 of 16 registers
#else
constexpr int64_t WIDTH = 4, TILE = 1;
#endif
typedef float Vector __attribute__((vector_size(WIDTH * 4), may_alias));

constexpr int64_t PANEL = 48;               // number of outputs whose weights are stored together in a packed weight
constexpr int64_t VECTORS = PANEL / WIDTH;  // vectors of sums in a panel
constexpr int64_t MOST_ROWS = 64;           // maximum number of rows that are multiplied with a panel in one pass

// Number of products that one instruction computes and sums for each output.
template <class T>
constexpr int64_t FACTORS = sizeof(float) / sizeof(T);

// Number of inputs that are summed for all rows before the next inputs. Their weights in a panel fit the L1 cache.
template <class T>
constexpr int64_t DEPTH = 192 * FACTORS<T>;

// sums += x * weights for FACTORS numbers of each row of x; weights: [PANEL, FACTORS], aligned to 64 bytes.
template <int ROWS>
inline void add_factors(Vector (&sums)[ROWS][VECTORS], const float* x, int64_t x_row, const float* weights) {
    const Vector* weight = (const Vector*)weights;
#ifdef __AVX512F__
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 3
        for (int n = 0; n < VECTORS; n++) sums[m][n] += weight[n] * x[m * x_row];
#else  // there are too few registers for all weights
    Vector number[ROWS];
    for (int m = 0; m < ROWS; m++) number[m] = x[m * x_row] - Vector();
#pragma GCC unroll 12
    for (int n = 0; n < VECTORS; n++)
#pragma GCC unroll 2
        for (int m = 0; m < ROWS; m++) sums[m][n] += weight[n] * number[m];
#endif
}

template <int ROWS>
inline void add_factors(Vector (&sums)[ROWS][VECTORS], const BFloat16* x, int64_t x_row, const BFloat16* weights) {
#ifdef __AVX512BF16__
    __m512bh weight[VECTORS];
    for (int n = 0; n < VECTORS; n++) weight[n] = load_factor(weights + n * 2 * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
        const __m512bh both = repeated(x + m * x_row);
        for (int n = 0; n < VECTORS; n++) sums[m][n] = (Vector)add_product((Floats)sums[m][n], both, weight[n]);
    }
#else  // 32 bits hold two bfloat16 numbers; convert each to float32
    typedef uint32_t Pairs __attribute__((vector_size(WIDTH * 4), may_alias));
    Vector low[ROWS], high[ROWS];
    for (int m = 0; m < ROWS; m++) {
        uint32_t both;
        std::memcpy(&both, x + m * x_row, sizeof both);
        low[m] = (Vector)(Pairs() + (both << 16)), high[m] = (Vector)(Pairs() + (both & 0xffff0000u));
    }
#pragma GCC unroll 12
    for (int n = 0; n < VECTORS; n++) {
        const Pairs both = ((const Pairs*)weights)[n];
        const Vector first = (Vector)(both << 16), second = (Vector)(both & 0xffff0000u);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) sums[m][n] += first * low[m], sums[m][n] += second * high[m];
    }
#endif
}

// Adds the products of `steps` * FACTORS inputs to the sums in `before` [ROWS, PANEL] (null: 0), and passes the new
// sums to `end`, with row numbers from `row` on. weights: [steps, PANEL, FACTORS]. `weights` and `before` are aligned
// to 64 bytes. Prefetches `lines` cache lines from `next` on.
template <int ROWS, class T, class End>
void add_products(const T* x, int64_t x_row, const T* weights, int64_t steps, const float* before, int64_t before_row,
                  const char* next, int64_t lines, const End& end, int64_t row) {
    Vector held[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
        for (int n = 0; n < VECTORS; n++)
            held[m][n] = before ? *(const Vector*)(before + m * before_row + n * WIDTH) : Vector();
    const int64_t each = (lines + steps - 1) / steps;
    for (int64_t k = 0; k < steps; k++) {
        __builtin_prefetch(next + k * each * 64, 0, 3);
        if (each > 1) __builtin_prefetch(next + (k * each + 1) * 64, 0, 3);
        if (each > 2) __builtin_prefetch(next + (k * each + 2) * 64, 0, 3);
        add_factors<ROWS>(held, x + k * FACTORS<T>, x_row, weights + k * PANEL * FACTORS<T>);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
        for (int n = 0; n < VECTORS; n++) end(row + m, n, held[m][n]);
}

template <class T, class End, size_t... BELOW>
constexpr std::array<decltype(&add_products<1, T, End>), TILE> tiles_of(std::index_sequence<BELOW...>) {
    return {add_products<BELOW + 1, T, End>...};
}

template <class T, class End>
constexpr auto TILES = tiles_of<T, End>(std::make_index_sequence<TILE>());  // index: number of rows - 1

// Writes sums to memory: an `End` for add_products.
struct Keep {
    float* sums;
    int64_t row;

    void operator()(int64_t m, int64_t n, Vector sum) const { *(Vector*)(sums + m * row + n * WIDTH) = sum; }
};

// Multiplies rows of x with one panel, DEPTH inputs at a time. `sums` [rows, PANEL] stores intermediate sums; `end`
// gets the final sums. Prefetches the weights after the panel.
template <class T, class End>
inline void sum_panel(const T* x, int64_t x_row, const T* weights, int64_t inputs, int64_t rows, const Keep& sums,
                      const End& end) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t begin = 0; begin < inputs; begin += DEPTH<T>) {
        const int64_t depth = std::min(DEPTH<T>, inputs - begin), lines = DEPTH<T> * PANEL * sizeof(T) / 64;
        const T* here = weights + begin * PANEL;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t from = t * rows / tiles, to = (t + 1) * rows / tiles;
            const int64_t fetched = t * lines / tiles, upto = (t + 1) * lines / tiles;
            auto run = [&](const auto& then) {
                TILES<T, std::decay_t<decltype(then)>>[to - from - 1](
                    x + from * x_row + begin, x_row, here, depth / FACTORS<T>, begin ? sums.sums + from * sums.row : nullptr,
                    sums.row, (const char*)(here + depth * PANEL) + fetched * 64, upto - fetched, then, from);
            };
            if (begin + depth < inputs)
                run(sums);
            else
                run(end);
        }
    }
}

template <class T>
struct Product {
    const T* x;                // [rows, inputs]
    const T* weight;           // [outputs / 48 rounded up, inputs / FACTORS, 48, FACTORS], aligned to 64 bytes
    const T *bias, *residual;  // [outputs], [rows, outputs], or null
    T* out;                    // [rows, outputs]
    int64_t inputs, outputs;
    bool relu;
};

// Writes the outputs of the panel that begins at output `at`, for rows from `first` on: an `End` for add_products.
template <class T>
struct Write {
    const Product<T>& p;
    int64_t first, at;

    void operator()(int64_t m, int64_t n, Vector y) const {
        const int64_t output = at + n * WIDTH, place = (first + m) * p.outputs + output, left = p.outputs - output;
        if (left <= 0) return;
        if (p.bias) y += load_vector<Vector>(p.bias + output, left);
        if (p.relu) y = y < Vector() ? Vector() : y;  // NaN stays NaN
        if (p.residual) y += load_vector<Vector>(p.residual + place, left);
        store_vector(p.out + place, y, left);
    }
};

// Computes the outputs of one panel for rows first ... last - 1, at most MOST_ROWS.
template <class T>
inline void multiply_panel(const Product<T>& p, int64_t panel, int64_t first, int64_t last) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    sum_panel(p.x + first * p.inputs, p.inputs, p.weight + panel * PANEL * p.inputs, p.inputs, last - first,
              Keep{sums, PANEL}, Write<T>{p, first, panel * PANEL});
}

// Computes all rows of a `Product` or `QuantizedProduct`. The threads of the calling parallel region share the work.
template <class Any>
inline void multiply(const Any& p, int64_t rows) {
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, threads = omp_get_num_threads();
    // if there are more threads than panels, use smaller blocks of rows
    const int64_t block = std::min(MOST_ROWS, std::max<int64_t>(8, rows * panels / threads / 8 * 8));
    const int64_t blocks = (rows + block - 1) / block;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t first = task / panels * block;
        multiply_panel(p, task % panels, first, std::min(first + block, rows));
    }
}

#if CAN_QUANTIZE

// int8 weights take half the bytes of bfloat16, and one instruction computes twice as many products. Weights have one
// scale per output. x is rounded to 8 bits with one scale for each GROUP numbers of a row (as in ZeroQuant, Yao et al.,
// 2022). Within a group, integers are summed exactly; the groups' sums are added in float32.

constexpr int64_t GROUP = 64;          // numbers of x with one scale; the inputs are padded to a multiple of GROUP
constexpr int64_t QUADS = GROUP / 4;   // quads in a group; one instruction sums the 4 products of a quad
constexpr int64_t GROUPS_AT_ONCE = 6;  // groups summed for all rows before the next: their weights fit the L1 cache
constexpr int64_t QUANTIZED_TILE = 4;  // rows with sums in registers; with more, adding the groups' sums takes longer
constexpr int64_t GROUP_BYTES = PANEL * (GROUP + 4);  // bytes of a group in a panel: corrections, then weights

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// Returns the bytes of a packed panel: 48 scales, then the groups.
inline int64_t panel_bytes(int64_t inputs) { return PANEL * 4 + groups_of(inputs) * GROUP_BYTES; }

// Rows of numbers in 8 bits. codes [rows, groups * 64]: each number divided by its group's scale, plus 128.
struct Codes {
    uint8_t* codes;
    float* scales;  // [rows, groups]; NaN for a group with a number that is not finite
};

#ifndef EMULATED  // tests emulate the instructions on other processors
// Adds codes * weights to sums, four products for each sum. This is assembly, because with the intrinsic GCC 12 copies
// the sums and reads the weights from memory once for each row.
inline void add_quads(__m512i& sums, __m512i codes, __m512i weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(weights));
}

inline void load_sums(__m512i& sums, const int8_t* from) {
    asm volatile("vmovdqa64 %1, %0" : "=v"(sums) : "m"(*(const __m512i*)from));
}
#endif

// Returns the bytes for the codes and scales of `rows` rows.
inline int64_t bytes_of_codes(int64_t rows, int64_t inputs) { return rows * groups_of(inputs) * (GROUP + 4); }

// Divides `memory`, which must be aligned to 64 bytes, into codes and scales.
inline Codes codes_in(char* memory, int64_t rows, int64_t inputs) {
    return {(uint8_t*)memory, (float*)(memory + rows * groups_of(inputs) * GROUP)};
}

// Quantizes one group of up to 64 numbers; missing numbers count as 0.
inline void quantize_group(const BFloat16* x, int64_t count, uint8_t* codes, float* scale) {
    float numbers[GROUP];
    Places bits = {};  // the absolute values as integers: infinity and NaN are greater than all numbers
    for (int64_t i = 0; i < GROUP; i += LANES) {
        const Floats some = load_vector(x + i, count - i);
        const Places absolute = (Places)some & 0x7fffffff;
        bits = absolute > bits ? absolute : bits;
        store_vector(numbers + i, some, LANES);
    }
    int32_t highest = 0;
    for (int64_t i = 0; i < LANES; i++) highest = std::max(highest, bits[i]);
    float absolute;
    std::memcpy(&absolute, &highest, sizeof absolute);
    const bool finite = highest < 0x7f800000;
    *scale = finite ? absolute / 127 : __builtin_nanf("");
    const float inverse = finite && absolute > 0 ? 127 / absolute : 0;
    for (int64_t i = 0; i < GROUP; i++)  // round to the nearest, ties to even
        codes[i] = uint8_t(int32_t(std::nearbyint(numbers[i] * inverse)) + 128);
}

// Quantizes the rows of x [rows, inputs]. The threads of the calling parallel region share the rows.
inline void quantize(const BFloat16* x, int64_t rows, int64_t inputs, Codes to) {
    const int64_t groups = groups_of(inputs);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++)
            quantize_group(x + row * inputs + g * GROUP, std::min(GROUP, inputs - g * GROUP),
                           to.codes + (row * groups + g) * GROUP, to.scales + row * groups + g);
}

// Adds the products of `count` groups to sums [ROWS, PANEL]; if `first`, overwrites the sums. groups: number of groups
// in a row of codes and scales. Prefetches `lines` cache lines from `next` on.
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
            for (int n = 0; n < VECTORS; n++) load_sums(exact[m][n], here + n * 64);
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
            const float scale = scales[m * groups + g];
#pragma GCC unroll 3
            for (int n = 0; n < VECTORS; n++) {
                Vector& sum = *(Vector*)(sums + m * PANEL + n * LANES);
                sum = (begins ? Vector() : sum) + __builtin_convertvector((Places)exact[m][n], Floats) * scale;
            }
        }
    }
}

constexpr decltype(&add_groups<1>) QUANTIZED_TILES[QUANTIZED_TILE + 1] = {
    nullptr, add_groups<1>, add_groups<2>, add_groups<3>, add_groups<4>};

// Multiplies rows `from` ... `to` - 1 with one packed panel. Writes sums [rows, PANEL] without the weights' scales.
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

// A product with int8 weights. `codes` are the codes of `x`; `weight` holds [outputs / 48 rounded up] packed panels.
struct QuantizedProduct : Product<BFloat16> {
    Codes codes;
};

inline void multiply_panel(const QuantizedProduct& p, int64_t panel, int64_t first, int64_t last) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    const char* packed = (const char*)p.weight + panel * panel_bytes(p.inputs);
    sum_quantized_panel(p.codes, first, last, p.inputs, packed, sums);
    const Write<BFloat16> write{p, first, panel * PANEL};
    for (int64_t row = 0; row < last - first; row++)
        for (int64_t n = 0; n < VECTORS; n++)
            write(row, n, *(const Vector*)(sums + row * PANEL + n * LANES) * *(const Vector*)(packed + n * 64));
}

#endif

}  // namespace
