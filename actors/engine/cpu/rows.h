// The operations between products: norms, rope, gates, and the writing of keys and values to the cache. Rows are divided
// among the threads of the calling parallel region.

#pragma once

#include "numbers.h"

namespace {

// Whether every number lies below `end`, and none below 0.
inline bool inside(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return number >= 0 && number < end; });
}

template <class T>
void append(const T* keys, const T* values, T* key_buffer, T* value_buffer, const int64_t* slots, int64_t rows,
            int64_t heads, int64_t size, int64_t key_row, int64_t value_row, int64_t buffer_row, int64_t buffer_head) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = row * buffer_row + head * buffer_head + slots[row] * size;
            std::memcpy(key_buffer + to, keys + row * key_row + head * size, size * sizeof(T));
            std::memcpy(value_buffer + to, values + row * value_row + head * size, size * sizeof(T));
        }
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
