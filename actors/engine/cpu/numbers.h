// bfloat16 and float32 numbers and vectors; sums and functions are computed in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512BF16__
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

// Cephes' expf, in a form that compilers turn into vector code: relative error below 2e-7.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// 16 numbers each; GCC and Clang compile them to the vectors of the processor.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Places __attribute__((vector_size(64)));

constexpr int64_t LANES = 16, PAIR = 2 * LANES;

// The highest of `vectors` (at least one) times 16 numbers; compilers do not vectorize a loop with max.
inline float highest(const float* x, int64_t vectors) {
    Floats most, next;
    std::memcpy(&most, x, sizeof most);
    for (int64_t i = 1; i < vectors; i++) {
        std::memcpy(&next, x + i * LANES, sizeof next);
        most = next > most ? next : most;
    }
    float found = most[0];
    for (int64_t i = 1; i < LANES; i++) found = std::max(found, most[i]);
    return found;
}

// 32 numbers, in the same order for queries, keys and values: of bfloat16 the even ones, then the odd ones, which takes
// one instruction each.
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

// The `n` last numbers of a vector whose size is no multiple of 32, and zeros.
template <class T>
inline Pair load_some(const T* x, int64_t n) {
    T padded[PAIR] = {};
    std::memcpy(padded, x, n * sizeof(T));
    return load_pair(padded);
}

// 32 factors of a dot product; they stay bfloat16 if the processor has an instruction for it.
#ifdef __AVX512BF16__
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, BFloat16>, __m512bh, Pair>;

inline __m512bh load_factor(const BFloat16* x) { return (__m512bh)_mm512_loadu_si512(x); }

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

inline Floats sums_of_neighbours(Floats x, Floats y) {
    const Places even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#ifdef __clang__
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, even + 1);
#endif
}

inline void prefetch(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at, 0, 2);
}

}  // namespace
