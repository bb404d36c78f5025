// bfloat16 and float32 numbers and vectors, whose sums and functions are computed in float32, and the operations between
// products: norms, rope, gates, and the writing of keys and values to the cache.

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

// Cephes' expf, in a form that compilers turn into vector code: relative error below 2e-7, and 0 below -87: a key that is
// masked has no weight at all.
inline float exponential(float given) {
    float x = std::min(std::max(given, -87.0f), 88.0f);
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
    return given < -87.0f ? 0.0f : p * scale;
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

#ifdef __AVX512F__
inline __mmask16 first_lanes(int64_t n) { return n >= LANES ? 0xffff : (1 << n) - 1; }

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// `exponential` of 16 numbers, which compilers do not find.
inline __m512 exponential(__m512 x) {
    const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));  // NaN stays NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    const __m512 near = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), near);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(seen, p, n);
}
#endif

// x -> exp(scale (x - the highest of x)) of `vectors` (at least one) times 16 numbers; returns their sum.
inline float exponentials(float* x, int64_t vectors, float scale) {
#ifdef __AVX512F__
    __m512 most = _mm512_loadu_ps(x), total = _mm512_setzero_ps();
    for (int64_t i = 1; i < vectors; i++) most = _mm512_max_ps(most, _mm512_loadu_ps(x + i * LANES));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < vectors; i++) {
        const __m512 below = _mm512_sub_ps(_mm512_loadu_ps(x + i * LANES), most);
        const __m512 y = exponential(_mm512_mul_ps(below, _mm512_set1_ps(scale)));
        _mm512_storeu_ps(x + i * LANES, y);
        total = _mm512_add_ps(total, y);
    }
    return _mm512_reduce_add_ps(total);
#else
    const float most = highest(x, vectors);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < vectors * LANES; k++) {
        x[k] = exponential((x[k] - most) * scale);
        total += x[k];
    }
    return total;
#endif
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

// The sums of 16 vectors, in their order.
#ifdef __AVX512F__
inline Floats sums_of(const Floats* given) {
    const __m512* x = (const __m512*)given;
    __m512 fours[4], eights[2];  // sums of each four numbers of four vectors; of each eight of eight
    for (int i = 0; i < 4; i++) {
        __m512d twos[2];
        for (int j = 0; j < 2; j++) {
            const __m512 a = x[4 * i + 2 * j], b = x[4 * i + 2 * j + 1];
            twos[j] = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        }
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(twos[0], twos[1])),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(twos[0], twos[1])));
    }
    auto halves = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    for (int i = 0; i < 2; i++) eights[i] = halves(fours[2 * i], fours[2 * i + 1]);
    return (Floats)halves(eights[0], eights[1]);
}
#else
inline Floats sums_of_neighbours(Floats x, Floats y) {
    const Places even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#ifdef __clang__
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, even + 1);
#endif
}

inline Floats sums_of(const Floats* x) {
    Floats sums[LANES];
    std::memcpy(sums, x, sizeof sums);
    for (int64_t count = LANES / 2; count; count /= 2)
        for (int64_t i = 0; i < count; i++) sums[i] = sums_of_neighbours(sums[2 * i], sums[2 * i + 1]);
    return sums[0];
}
#endif

// The following operations divide rows among the threads of the calling parallel region.


// Whether every number lies below `end`, and none below 0.
inline bool inside(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return number >= 0 && number < end; });
}

// Prompts' tokens [heads, size], one prompt behind another, to the first slots of their rows. Row r lies at places[r] of
// the buffer and has prompt sources[r], tokens starts[p] ... starts[p + 1] - 1 of all; states hold prompts first ...
// last - 1.
template <class T>
void fill(const T* states, T* buffer, const int64_t* starts, const int64_t* places, const int64_t* sources, int64_t first,
          int64_t last, int64_t rows, int64_t heads, int64_t size, int64_t token, int64_t buffer_row,
          int64_t buffer_head) {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < rows * heads; task++) {
        const int64_t row = task / heads, head = task % heads, prompt = sources[row];
        if (prompt < first || prompt >= last) continue;
        const T* from = states + (starts[prompt] - starts[first]) * token + head * size;
        T* to = buffer + places[row] * buffer_row + head * buffer_head;
        for (int64_t slot = 0; slot < starts[prompt + 1] - starts[prompt]; slot++)
            std::memcpy(to + slot * size, from + slot * token, size * sizeof(T));
    }
}

// Rotates the first `size` numbers of a head in place by cosines and sines [size], as transformers' apply_rotary_pos_emb.
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

// The first `rotary` numbers of the first `heads` heads [size] of each row; cosines and sines [rows, rotary].
template <class T>
void rotate(T* states, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t size, int64_t rotary,
            int64_t row_stride) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            rotate_head(states + row * row_stride + head * size, cosines + row * rotary, sines + row * rotary, rotary);
}

// LayerNorm with a bias, RMSNorm without; `to` may be `from`.
template <class T>
inline void normalize_row(const T* from, const T* weight, const T* bias, T* to, int64_t size, float epsilon) {
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
        const float value = (load(from[i]) - mean) * scale * load(weight[i]);
        store(to + i, bias ? value + load(bias[i]) : value);
    }
}

template <class T>
void normalize(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size, float epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        normalize_row(x + row * size, weight, bias, out + row * size, size, epsilon);
}

// RMSNorm of the first `groups` groups [size] of each row, in place.
template <class T>
void normalize_groups(T* x, const T* weight, int64_t rows, int64_t groups, int64_t size, int64_t row_stride,
                      float epsilon) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t group = 0; group < groups; group++) {
            T* mine = x + row * row_stride + group * size;
            normalize_row(mine, weight, (const T*)nullptr, mine, size, epsilon);
        }
}

// x + y of `count` numbers; `out` may be x or y.
template <class T>
void add(const T* x, const T* y, T* out, int64_t count) {
#pragma omp for simd schedule(static)
    for (int64_t i = 0; i < count; i++) store(out + i, load(x[i]) + load(y[i]));
}

template <class T>
inline void gate_row(const T* gates, const T* ups, T* to, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        const float g = load(gates[i]);
        store(to + i, g / (1 + exponential(-g)) * load(ups[i]));
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline void gate_row(const BFloat16* gates, const BFloat16* ups, BFloat16* to, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 g = widen(_mm256_maskz_loadu_epi16(mask, gates + i)), up = widen(_mm256_maskz_loadu_epi16(mask, ups + i));
        const __m512 divisor = _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), g)));
        const __m512 y = _mm512_mul_ps(_mm512_div_ps(g, divisor), up);
        _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
}
#endif

// silu(gate) * up; x holds [gate, up] of each row.
template <class T>
void gate(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) gate_row(x + row * 2 * size, x + (row * 2 + 1) * size, out + row * size, size);
}

}  // namespace
