// What a decode step on a CPU needs beside products of matrices: attention of one token a row over the cache,
// norms, rotary turns, gates. Arrays are row-major; strides count numbers, not bytes; sums are float32.
// A row's result hangs on that row alone, whatever else is in the batch and however many threads there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

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

inline void store(BFloat16* place, float value) {  // to the nearest, ties to even; what is no number stays none
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

// 16 numbers each; GCC and Clang turn them into what the processor has.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Places __attribute__((vector_size(64)));

constexpr int64_t LANES = 16, PAIR = 2 * LANES;

// 32 numbers in an order of their own, the same for queries, keys and values: for bfloat16 even and odd ones apart,
// which takes one instruction each.
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
    T room[PAIR] = {};
    std::memcpy(room, x, n * sizeof(T));
    return load_pair(room);
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

// What one key/value head of one row reads: slots first ... last - 1.
template <class T>
struct Head {
    const T *query, *keys, *values;
    T* out;
    int64_t first, last;
};

// Queries [group, size] of a head over its slots, 16 at a time. PAIRS: of 32 numbers, that `size` takes; TAIL: the
// last one in part.
template <class T, int PAIRS, bool TAIL>
void attend_head(const Head<T>& head, const T* next_keys, int64_t next_count, int64_t group, int64_t size,
                 int64_t key_slot, int64_t value_slot, float scale, float* room) {
    const int64_t count = head.last - head.first, blocks = (count + LANES - 1) / LANES, tail = size % PAIR;
    const int whole = TAIL ? PAIRS - 1 : PAIRS;
    Pair* queries = (Pair*)room;                        // [group, PAIRS]
    Pair* sums = queries + group * PAIRS;               // [group, PAIRS]
    float* scores = (float*)(sums + group * PAIRS);     // [group, blocks * 16]
    auto read = [&](const T* x, int p) { return p < whole ? load_pair(x + p * PAIR) : load_some(x + p * PAIR, tail); };
    for (int64_t g = 0; g < group; g++)
        for (int p = 0; p < PAIRS; p++) {
            queries[g * PAIRS + p] = read(head.query + g * size, p);
            sums[g * PAIRS + p] = Pair();
        }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = head.first + block * LANES, held = std::min(LANES, head.last - begin);
        prefetch(head.values + begin * value_slot, held * size * sizeof(T));
        for (int64_t g = 0; g < group; g++) {
            Floats dots[LANES];
#pragma GCC unroll 16
            for (int64_t k = 0; k < LANES; k++) {
                const T* key = head.keys + (begin + std::min(k, held - 1)) * key_slot;
                Floats dot = {};
                for (int p = 0; p < PAIRS; p++) {
                    const Pair one = read(key, p), q = queries[g * PAIRS + p];
                    dot += one.a * q.a + one.b * q.b;
                }
                dots[k] = dot;
            }
            // a tree whose last vector holds the 16 dots in their order
            for (int i = 0; i < 8; i++) dots[i] = sums_of_neighbours(dots[2 * i], dots[2 * i + 1]);
            for (int i = 0; i < 4; i++) dots[i] = sums_of_neighbours(dots[2 * i], dots[2 * i + 1]);
            for (int i = 0; i < 2; i++) dots[i] = sums_of_neighbours(dots[2 * i], dots[2 * i + 1]);
            dots[0] = sums_of_neighbours(dots[0], dots[1]);
            std::memcpy(scores + (g * blocks + block) * LANES, dots, sizeof dots[0]);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float* s = scores + g * blocks * LANES;
        float most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
        for (int64_t k = 0; k < count; k++) most = std::max(most, s[k]);
#pragma omp simd reduction(+ : total)
        for (int64_t k = 0; k < count; k++) {
            s[k] = exponential((s[k] - most) * scale);
            total += s[k];
        }
        const float inverse = 1 / total;
        for (int64_t k = 0; k < count; k++) s[k] *= inverse;
    }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = head.first + block * LANES, held = std::min(LANES, head.last - begin);
        if (block * LANES < next_count)
            prefetch(next_keys + block * LANES * key_slot, std::min(LANES, next_count - block * LANES) * size * sizeof(T));
        for (int64_t g = 0; g < group; g++) {
            const float* weights = scores + (g * blocks + block) * LANES;
            Pair sum[PAIRS];
            std::memcpy(sum, sums + g * PAIRS, sizeof sum);
            for (int64_t k = 0; k < held; k++) {
                const T* value = head.values + (begin + k) * value_slot;
                for (int p = 0; p < PAIRS; p++) {
                    const Pair one = read(value, p);
                    sum[p].a += weights[k] * one.a;
                    sum[p].b += weights[k] * one.b;
                }
            }
            std::memcpy(sums + g * PAIRS, sum, sizeof sum);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int p = 0; p < PAIRS; p++) {
            T whole_pair[PAIR];
            store_pair(whole_pair, sums[g * PAIRS + p]);
            std::memcpy(head.out + g * size + p * PAIR, whole_pair, (p < whole ? PAIR : tail) * sizeof(T));
        }
}

template <class T>
void attend(const T* query, const T* keys, const T* values, const uint8_t* seen, T* out, int64_t rows, int64_t heads,
            int64_t group, int64_t width, int64_t size, int64_t query_row, int64_t key_row, int64_t key_head,
            int64_t key_slot, int64_t value_row, int64_t value_head, int64_t value_slot, int64_t seen_row, float scale) {
    static constexpr decltype(&attend_head<T, 1, false>) forms[][2] = {
        {attend_head<T, 1, false>, attend_head<T, 1, true>}, {attend_head<T, 2, false>, attend_head<T, 2, true>},
        {attend_head<T, 3, false>, attend_head<T, 3, true>}, {attend_head<T, 4, false>, attend_head<T, 4, true>},
        {attend_head<T, 5, false>, attend_head<T, 5, true>}, {attend_head<T, 6, false>, attend_head<T, 6, true>},
        {attend_head<T, 7, false>, attend_head<T, 7, true>}, {attend_head<T, 8, false>, attend_head<T, 8, true>}};
    const int64_t pairs = (size + PAIR - 1) / PAIR;
    const auto run = forms[pairs - 1][size % PAIR != 0];
    auto head_of = [&](int64_t task) {
        const int64_t row = task / heads, head = task % heads;
        int64_t first = 0, last = width;
        if (seen) {
            const uint8_t* mine = seen + row * seen_row;
            while (first < last - 1 && !mine[first]) first++;
            while (last > first + 1 && !mine[last - 1]) last--;
        }
        return Head<T>{query + row * query_row + head * group * size, keys + row * key_row + head * key_head,
                       values + row * value_row + head * value_head, out + task * group * size, first, last};
    };
#pragma omp parallel if (rows * heads * width * size > 4096)
    {
        std::vector<Floats> room(group * (4 * pairs + (width + LANES - 1) / LANES));
#pragma omp for schedule(static)
        for (int64_t task = 0; task < rows * heads; task++) {
            const Head<T> head = head_of(task), next = task + 1 < rows * heads ? head_of(task + 1) : head;
            run(head, next.keys + next.first * key_slot, next.last - next.first, group, size, key_slot, value_slot, scale,
                (float*)room.data());
        }
    }
}

// Whether every slot lies in the buffers, `held` slots long; if not, nothing is written.
template <class T>
bool append(const T* keys, const T* values, T* key_buffer, T* value_buffer, const int64_t* slots, int64_t rows,
            int64_t heads, int64_t size, int64_t held, int64_t key_row, int64_t value_row, int64_t buffer_row,
            int64_t buffer_head) {
    for (int64_t row = 0; row < rows; row++)
        if (slots[row] < 0 || slots[row] >= held) return false;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = row * buffer_row + head * buffer_head + slots[row] * size;
            std::memcpy(key_buffer + to, keys + row * key_row + head * size, size * sizeof(T));
            std::memcpy(value_buffer + to, values + row * value_row + head * size, size * sizeof(T));
        }
    return true;
}

// Turns the first `heads` heads of each row in place, as transformers' apply_rotary_pos_emb does.
template <class T>
void rotate(T* states, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t size, int64_t row_stride,
            int64_t turn_stride) {
    const int64_t half = size / 2;
#pragma omp parallel for if (rows * heads * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cosines + row * turn_stride, *s = sines + row * turn_stride;
        for (int64_t head = 0; head < heads; head++) {
            T* x = states + row * row_stride + head * size;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float low = load(x[i]), high = load(x[i + half]);
                store(x + i, low * load(c[i]) - high * load(s[i]));
                store(x + i + half, high * load(c[i + half]) + low * load(s[i + half]));
            }
        }
    }
}

// LayerNorm with a bias, RMSNorm without.
template <class T>
void normalize(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size, float epsilon) {
#pragma omp parallel for if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * size;
        T* to = out + row * size;
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
}

// silu(gate) * up; x holds [gate, up] of each row.
template <class T>
void gate(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const T *gates = x + row * 2 * size, *ups = gates + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            const float g = load(gates[i]);
            store(to + i, g / (1 + exponential(-g)) * load(ups[i]));
        }
    }
}

}  // namespace

#define KERNELS(T, NAME) \
    extern "C" void attend_##NAME(const T* q, const T* k, const T* v, const uint8_t* seen, T* out, int64_t rows, \
                                  int64_t heads, int64_t group, int64_t width, int64_t size, int64_t q_row, \
                                  int64_t k_row, int64_t k_head, int64_t k_slot, int64_t v_row, int64_t v_head, \
                                  int64_t v_slot, int64_t seen_row, float scale) { \
        attend(q, k, v, seen, out, rows, heads, group, width, size, q_row, k_row, k_head, k_slot, v_row, v_head, \
               v_slot, seen_row, scale); \
    } \
    extern "C" bool append_##NAME(const T* k, const T* v, T* keys, T* values, const int64_t* slots, int64_t rows, \
                                  int64_t heads, int64_t size, int64_t held, int64_t k_row, int64_t v_row, \
                                  int64_t row, int64_t head) { \
        return append(k, v, keys, values, slots, rows, heads, size, held, k_row, v_row, row, head); \
    } \
    extern "C" void rotate_##NAME(T* x, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t size, \
                                  int64_t row, int64_t turn) { \
        rotate(x, cosines, sines, rows, heads, size, row, turn); \
    } \
    extern "C" void normalize_##NAME(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size, \
                                     float epsilon) { \
        normalize(x, weight, bias, out, rows, size, epsilon); \
    } \
    extern "C" void gate_##NAME(const T* x, T* out, int64_t rows, int64_t size) { gate(x, out, rows, size); }

extern "C" int64_t threads() { return omp_get_max_threads(); }

KERNELS(BFloat16, bfloat16)
KERNELS(float, float32)
