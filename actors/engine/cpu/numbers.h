// Vectors of bfloat16 or float32 numbers, and a layer's operations between matrix products: norms, rotary embeddings
// and gates. All computations are in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store(float* place, float value) { *place = value; }

inline void store(BFloat16* place, float value) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    place->bits = uint16_t(value == value ? rounded : 0x7fc0);
}

// Vectors of 16 numbers. GCC and Clang compile them to the processor's vectors.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Places __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// Vectors of BYTES / 4 integers, of 32 bits (Whole) or 16 bits (Half) each.
template <size_t BYTES>
struct Ints;

#define INTS(BYTES) \
    template <> \
    struct Ints<BYTES> { \
        typedef uint32_t Whole __attribute__((vector_size(BYTES))); \
        typedef uint16_t Half __attribute__((vector_size(BYTES / 2))); \
    };

INTS(64)
INTS(32)
INTS(16)

constexpr int64_t LANES = 16, PAIR = 2 * LANES;

// Loads the first `n` numbers of x. Ignores numbers beyond the vector's size; sets missing ones to 0.
template <class V = Floats>
inline V load_vector(const float* x, int64_t n) {
    V y = {};
    if (n >= int64_t(sizeof y / sizeof *x))
        std::memcpy(&y, x, sizeof y);
    else if (n > 0)
        std::memcpy(&y, x, n * sizeof *x);
    return y;
}

template <class V = Floats>
inline V load_vector(const BFloat16* x, int64_t n) {
    using Some = typename Ints<sizeof(V)>::Half;
    Some y = {};
    if (n >= int64_t(sizeof y / sizeof *x))
        std::memcpy(&y, x, sizeof y);
    else if (n > 0)
        std::memcpy(&y, x, n * sizeof *x);
    return (V)(__builtin_convertvector(y, typename Ints<sizeof(V)>::Whole) << 16);
}

// Stores the first `n` numbers of vector x, or all if n is larger than the vector.
template <class V>
inline void store_vector(float* to, V x, int64_t n) {
    if (n >= int64_t(sizeof x / sizeof *to))
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, n * sizeof *to);
}

template <class V>
inline void store_vector(BFloat16* to, V x, int64_t n) {  // to the nearest, ties to even; NaN stays NaN
    using Some = typename Ints<sizeof(V)>::Half;
    using Wide = typename Ints<sizeof(V)>::Whole;
    const Wide bits = (Wide)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Some halves = __builtin_convertvector(x == x ? rounded : Wide() + 0x7fc0, Some);
    if (n >= int64_t(sizeof halves / sizeof *to))
        std::memcpy(to, &halves, sizeof halves);
    else
        std::memcpy(to, &halves, n * sizeof *to);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(EMULATED)
// load_vector and store_vector for 16 bfloat16 numbers, with the processor's own instructions and without branches.
inline __mmask16 first_lanes(int64_t n) { return n >= LANES ? 0xffff : n > 0 ? (1 << n) - 1 : 0; }

template <>
inline Floats load_vector<Floats>(const BFloat16* x, int64_t n) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), x)), 16);
}

inline void store_vector(BFloat16* to, Floats x, int64_t n) {
    _mm256_mask_storeu_epi16(to, first_lanes(n), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#endif

// Returns, for each i in `index`, number i of x if i < 16, else number i - 16 of y.
inline Floats permuted(Floats x, Floats y, Places index) {
#ifdef __clang__
    Floats z;
    for (int i = 0; i < LANES; i++) z[i] = index[i] < LANES ? x[index[i]] : y[index[i] - LANES];
    return z;
#else
    return __builtin_shuffle(x, y, index);
#endif
}

// Reduces x to one number with `both`, a function of two numbers or two vectors.
template <class Both>
inline float joined(Floats x, Both both) {
    typedef float Four __attribute__((vector_size(16)));
    Four y[4];
    std::memcpy(y, &x, sizeof y);
    const Four z = both(both(y[0], y[2]), both(y[1], y[3]));
    return both(both(z[0], z[2]), both(z[1], z[3]));
}

inline float sum_of(Floats x) {
    return joined(x, [](auto a, auto b) { return a + b; });
}

inline float highest_of(Floats x) {
    return joined(x, [](auto a, auto b) { return a > b ? a : b; });
}

// Returns the highest of `vectors` * 16 numbers, `vectors` >= 1. Uses vectors, because compilers do not vectorize max.
inline float highest(const float* x, int64_t vectors) {
    Floats most = load_vector(x, LANES);
    for (int64_t i = 1; i < vectors; i++) {
        const Floats next = load_vector(x + i * LANES, LANES);
        most = next > most ? next : most;
    }
    return highest_of(most);
}

// Returns exp(given) with a relative error below 2e-7, like Cephes' expf. Returns 0 below -87, for masked keys.
inline Floats exponential(Floats given) {
    Floats x = given > 88.0f ? Floats() + 88.0f : given;  // NaN stays NaN
    x = x < -87.0f ? Floats() - 87.0f : x;
    const Floats n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = Floats() + 1.9875691500e-4f;
    for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + factor;
    p = p * r * r + r + 1.0f;
    const Places power = (__builtin_convertvector(n, Places) + 127) << 23;
    return given < -87.0f ? Floats() : p * (Floats)power;
}

// Replaces each x of `vectors` * 16 numbers (`vectors` >= 1) by exp(scale (x - highest x)); returns the sum.
inline float exponentials(float* x, int64_t vectors, float scale) {
    const float most = highest(x, vectors);
    Floats total = {};
    for (int64_t i = 0; i < vectors; i++) {
        const Floats y = exponential((load_vector(x + i * LANES, LANES) - most) * scale);
        store_vector(x + i * LANES, y, LANES);
        total += y;
    }
    return sum_of(total);
}

// 32 numbers. For bfloat16, `a` has the even indices and `b` the odd ones: loading either takes one instruction.
// Queries, keys and values have the same order, so dot products and sums stay right.
struct Pair {
    Floats a, b;
};

inline Pair load_pair(const float* x) {
    Pair pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
}

inline Pair load_pair(const BFloat16* x) {
    Bits bits;
    std::memcpy(&bits, x, sizeof bits);
    return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}

inline void store_pair(float* x, Pair pair) { std::memcpy(x, &pair, sizeof pair); }

inline void store_pair(BFloat16* x, Pair pair) {
    for (int64_t i = 0; i < LANES; i++) {
        store(x + 2 * i, pair.a[i]);
        store(x + 2 * i + 1, pair.b[i]);
    }
}

// Loads the last `n` < 32 numbers of a row; the others are 0.
template <class T>
inline Pair load_some(const T* x, int64_t n) {
    T padded[PAIR] = {};
    std::memcpy(padded, x, n * sizeof(T));
    return load_pair(padded);
}

// 32 factors of a dot product: bfloat16 if the processor has an instruction for dot products of bfloat16, else float32.
#ifdef __AVX512BF16__
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, BFloat16>, __m512bh, Pair>;

inline __m512bh load_factor(const BFloat16* x) { return (__m512bh)_mm512_loadu_si512(x); }

inline __m512bh repeated(const BFloat16* two) {
    int32_t both;
    std::memcpy(&both, two, sizeof both);
    return (__m512bh)(Places() + both);
}

inline Floats add_product(Floats sum, __m512bh x, __m512bh y) { return (Floats)_mm512_dpbf16_ps((__m512)sum, x, y); }
#else
template <class T>
using Factor = Pair;

inline Pair load_factor(const BFloat16* x) { return load_pair(x); }
#endif

inline Pair load_factor(const float* x) { return load_pair(x); }

inline Floats add_product(Floats sum, Pair x, Pair y) { return sum + (x.a * y.a + x.b * y.b); }

template <class T>
inline Factor<T> load_some_factor(const T* x, int64_t n) {
    T padded[PAIR] = {};
    std::memcpy(padded, x, n * sizeof(T));
    return load_factor(padded);
}

// Returns the sums of 16 vectors: number i is the sum of x[i]. Processors have instructions for all these permutations.
inline Floats sums_of(const Floats* x) {
    const Places ones = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const Places twos = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const Places fours = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    auto halved = [](const Floats* two, Places first, int32_t by) {
        return permuted(two[0], two[1], first) + permuted(two[0], two[1], first + by);
    };
    Floats y[8], z[4], last[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) y[i] = halved(x + 2 * i, ones, 2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) z[i] = halved(y + 2 * i, twos, 2);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) last[i] = halved(z + 2 * i, fours, 4);
    return halved(last, fours, 4);
}

// Returns whether all numbers are at least 0 and below `end`.
inline bool inside(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return number >= 0 && number < end; });
}

// In the functions below with `omp for`, the threads of the calling parallel region share the rows.

// Rotates the first `size` numbers of a head in place, with cosines and sines [size], as transformers does.
template <class T>
inline void rotate_head(T* x, const T* c, const T* s, int64_t size) {
    const int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float low = load(x[i]), high = load(x[i + half]);
        store(x + i, low * load(c[i]) - high * load(s[i]));
        store(x + i + half, high * load(c[i + half]) + low * load(s[i + half]));
    }
}

// Rotates the first `rotary` numbers of the first `heads` heads [size] of each row. cosines, sines: [rows, rotary].
template <class T>
void rotate(T* states, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t size, int64_t rotary,
            int64_t row_stride) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            rotate_head(states + row * row_stride + head * size, cosines + row * rotary, sines + row * rotary, rotary);
}

// Applies LayerNorm if there is a bias, else RMSNorm. `to` may equal `from`.
template <class T>
inline void normalize_row(const T* from, const float* weight, const float* bias, T* to, int64_t size, float epsilon) {
    float mean = 0, square = 0;
    if (bias) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < size; i++) mean += load(from[i]);
        mean /= float(size);
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < size; i++) {
        const float off = load(from[i]) - mean;
        square += off * off;
    }
    const float scale = 1 / std::sqrt(square / float(size) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        const float value = (load(from[i]) - mean) * scale * weight[i];
        store(to + i, bias ? value + bias[i] : value);
    }
}

template <class T>
void normalize(const T* x, const float* weight, const float* bias, T* out, int64_t rows, int64_t size, float epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        normalize_row(x + row * size, weight, bias, out + row * size, size, epsilon);
}

// Applies RMSNorm to the first `groups` groups [size] of each row, in place.
template <class T>
void normalize_groups(T* x, const float* weight, int64_t rows, int64_t groups, int64_t size, int64_t row_stride,
                      float epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t group = 0; group < groups; group++) {
            T* mine = x + row * row_stride + group * size;
            normalize_row<T>(mine, weight, nullptr, mine, size, epsilon);
        }
}

// Computes out = x + y for `count` numbers. `out` may equal x or y.
template <class T>
void add(const T* x, const T* y, T* out, int64_t count) {
#pragma omp for simd schedule(static)
    for (int64_t i = 0; i < count; i++) store(out + i, load(x[i]) + load(y[i]));
}

// Computes silu(gate) * up, or gelu(gate) * up: tanh gelu is silu with another exponent. A row of x is [gate, up].
template <class T>
void gate(const T* x, T* out, int64_t rows, int64_t size, bool gelu) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            const T* gates = x + row * 2 * size + i;
            const Floats g = load_vector(gates, size - i);
            const Floats by = gelu ? -1.5957691216f * (g + 0.044715f * g * g * g) : -g;  // 2 sqrt(2 / pi)
            store_vector(out + row * size + i, g / (1 + exponential(by)) * load_vector(gates + size, size - i), size - i);
        }
}

}  // namespace
