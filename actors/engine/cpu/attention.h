// Attention of one token a row over the live slots of a strided cache, and of whole prompts.

#pragma once

#include "products.h"

namespace {

// The inputs and output of one key/value head of one row; it attends to slots first ... last - 1.
template <class T>
struct Head {
    const T *query, *keys, *values;
    T* out;
    int64_t first, last;
};

// Attention of the queries [group, size] of a head over its slots, 16 at a time. PAIRS: `size` in vectors of 32 numbers,
// rounded up; TAIL: whether the last vector is partly filled.
template <class T, int PAIRS, bool TAIL>
void attend_head(const Head<T>& head, const T* next_keys, int64_t next_count, int64_t group, int64_t size, float scale,
                 float* workspace) {
    const int64_t count = head.last - head.first, blocks = (count + LANES - 1) / LANES, tail = size % PAIR;
    const int whole = TAIL ? PAIRS - 1 : PAIRS;
    constexpr int CHAINS = PAIRS == 1 ? 4 : PAIRS <= 3 ? 2 : 1;  // independent sums, which the processor adds in parallel
    Factor<T>* queries = (Factor<T>*)workspace;                   // [group, PAIRS]
    Pair* sums = (Pair*)(workspace + 2 * LANES * group * PAIRS);  // [group, PAIRS]
    float* scores = (float*)(sums + group * PAIRS);          // [group, blocks * 16]
    float* totals = scores + group * blocks * LANES;         // [group]
    auto read = [&](const T* x, int p) { return p < whole ? load_pair(x + p * PAIR) : load_some(x + p * PAIR, tail); };
    auto prefetch_slots = [=](const T* from) {  // 16, some of which may lie behind the last one
#pragma GCC unroll 16
        for (int64_t k = 0; k < LANES; k++)
            for (int64_t at = 0; at < PAIRS * PAIR; at += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k * size + at, 0, 2);
    };
    for (int64_t g = 0; g < group; g++)
        for (int p = 0; p < PAIRS; p++) {
            queries[g * PAIRS + p] = p < whole ? load_factor(head.query + g * size + p * PAIR)
                                               : load_some_factor(head.query + g * size + p * PAIR, tail);
            sums[g * PAIRS + p] = Pair();
        }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = head.first + block * LANES, held = std::min(LANES, head.last - begin);
        prefetch_slots(head.values + begin * size);
        for (int64_t g = 0; g < group; g++) {
            Floats dots[LANES];
            auto multiply = [&](int64_t k, const T* key) {
                Floats dot = {};
                for (int p = 0; p < PAIRS; p++)
                    dot = add_product(dot, queries[g * PAIRS + p],
                                      p < whole ? load_factor(key + p * PAIR) : load_some_factor(key + p * PAIR, tail));
                dots[k] = dot;
            };
            const T* key = head.keys + begin * size;
            if (held == LANES) {
#pragma GCC unroll 16
                for (int64_t k = 0; k < LANES; k++) multiply(k, key + k * size);
            } else {
                for (int64_t k = 0; k < LANES; k++) multiply(k, key + std::min(k, held - 1) * size);
            }
            const Floats sum = sums_of(dots);
            std::memcpy(scores + (g * blocks + block) * LANES, &sum, sizeof sum);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float* s = scores + g * blocks * LANES;
        std::fill(s + count, s + blocks * LANES, -INFINITY);  // whole vectors from here on
        totals[g] = exponentials(s, blocks, scale);
    }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = head.first + block * LANES, held = std::min(LANES, head.last - begin);
        if (block * LANES < next_count) prefetch_slots(next_keys + block * LANES * size);
        for (int64_t g = 0; g < group; g++) {
            const float* weights = scores + (g * blocks + block) * LANES;
            Pair sum[CHAINS][PAIRS] = {};
            std::memcpy(sum, sums + g * PAIRS, sizeof *sum);
            auto add = [&](int64_t k, Pair* to) {
                const T* value = head.values + (begin + k) * size;
                for (int p = 0; p < PAIRS; p++) {
                    const Pair one = read(value, p);
                    to[p].a += weights[k] * one.a;
                    to[p].b += weights[k] * one.b;
                }
            };
            if (held == LANES) {
#pragma GCC unroll 16
                for (int64_t k = 0; k < LANES; k++) add(k, sum[k % CHAINS]);
            } else {
                for (int64_t k = 0; k < held; k++) add(k, sum[0]);
            }
            for (int c = 1; c < CHAINS; c++)
                for (int p = 0; p < PAIRS; p++) sum[0][p].a += sum[c][p].a, sum[0][p].b += sum[c][p].b;
            std::memcpy(sums + g * PAIRS, sum, sizeof *sum);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int p = 0; p < PAIRS; p++) {
            const float inverse = 1 / totals[g];
            T whole_pair[PAIR];
            store_pair(whole_pair, {sums[g * PAIRS + p].a * inverse, sums[g * PAIRS + p].b * inverse});
            std::memcpy(head.out + g * size + p * PAIR, whole_pair, (p < whole ? PAIR : tail) * sizeof(T));
        }
}

// Queries of rows of `query_row` numbers; keys and values [places, heads, slots, size] each, of one layout.
template <class T>
struct Attention {
    const T *query, *keys, *values;
    T* out;  // [rows, heads, group, size]
    int64_t rows, heads, group, size, query_row, buffer_row, buffer_head;
    const int64_t* places;  // [rows], in keys and values
    const int64_t* slots;   // [rows], the last slot a row attends to
    int64_t window;         // slots that it attends to at most; 0: all up to the last
    float scale;
    float* scratch;         // of every thread, `scratch_of` numbers
    int64_t scratch_each;
};

// float32 numbers that a thread needs for rows of up to `width` slots.
inline int64_t step_scratch(int64_t group, int64_t size, int64_t width) {
    return group * (4 * ((size + PAIR - 1) / PAIR) + (width + LANES - 1) / LANES + 1) * LANES;
}

// All rows, divided among the threads of the calling parallel region. `before(row, head)` runs before a head is read.
template <class T, class Before>
void attend(const Attention<T>& a, Before before) {
    static constexpr decltype(&attend_head<T, 1, false>) forms[][2] = {
        {attend_head<T, 1, false>, attend_head<T, 1, true>}, {attend_head<T, 2, false>, attend_head<T, 2, true>},
        {attend_head<T, 3, false>, attend_head<T, 3, true>}, {attend_head<T, 4, false>, attend_head<T, 4, true>},
        {attend_head<T, 5, false>, attend_head<T, 5, true>}, {attend_head<T, 6, false>, attend_head<T, 6, true>},
        {attend_head<T, 7, false>, attend_head<T, 7, true>}, {attend_head<T, 8, false>, attend_head<T, 8, true>}};
    const auto run = forms[(a.size + PAIR - 1) / PAIR - 1][a.size % PAIR != 0];
    auto head_of = [&](int64_t task) {
        const int64_t row = task / a.heads, head = task % a.heads, last = a.slots[row] + 1;
        const int64_t at = a.places[row] * a.buffer_row + head * a.buffer_head;
        return Head<T>{a.query + row * a.query_row + head * a.group * a.size, a.keys + at, a.values + at,
                       a.out + task * a.group * a.size, a.window ? std::max<int64_t>(0, last - a.window) : 0, last};
    };
    const int64_t tasks = a.rows * a.heads;
    float* scratch = a.scratch + omp_get_thread_num() * a.scratch_each;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
        const Head<T> head = head_of(task), next = task + 1 < tasks ? head_of(task + 1) : head;
        before(task / a.heads, task % a.heads);
        run(head, next.keys + next.first * a.size, next.last - next.first, a.group, a.size, a.scale, scratch);
    }
}

// Causal attention of prompts, by the tiles of products: a head's keys and values are packed once and multiplied with
// blocks of its queries, up to the last key that a block attends to. Scores and sums are float32.

// Keys and values of the tokens that precede all prompts, packed head by head.
template <class T>
struct Prefix {
    const T *keys, *values;  // [heads, size, width], [heads, size rounded up, width]: see pack_prefix
    int64_t tokens;
};

// Prompts lie one behind another: prompt p is tokens starts[p] - starts[0] ... starts[p + 1] - starts[0] - 1.
template <class T>
struct PromptAttention {
    const T *query, *keys, *values;  // [tokens, heads, group, size], [tokens, heads, size] each
    const int64_t* starts;           // [prompts + 1]
    T* out;                          // [tokens, heads, group, size], contiguous
    int64_t prompts, heads, group, size;
    int64_t token;   // numbers from token to token in query, keys and values
    int64_t window;  // tokens that a token attends to at most; 0: all before it
    float scale;
    Prefix<T> prefix;
    float* scratch;  // of every thread, `prompt_scratch` numbers
    int64_t scratch_each;
};

constexpr int64_t QUERIES = 32;  // in a block

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys [tokens, size] -> [tokens / 48 rounded up, size / FACTORS, 48, FACTORS]; slots behind the last token stay unchanged.
template <class T>
inline void pack_keys(const T* keys, int64_t key_token, int64_t tokens, int64_t size, T* packed) {
    for (int64_t token = 0; token < tokens; token++) {
        T* to = packed + token / PANEL * PANEL * size + token % PANEL * FACTORS<T>;
        for (int64_t d = 0; d < size; d += FACTORS<T>) std::memcpy(to + d * PANEL, keys + token * key_token + d, 4);
    }
}

// Values [tokens, size] -> [size / 48 rounded up, even / FACTORS, 48, FACTORS], with zeros behind the last of `even` tokens.
template <class T>
inline void pack_values(const T* values, int64_t value_token, int64_t tokens, int64_t size, int64_t even, T* packed) {
    constexpr int64_t FEW = FACTORS<T>;
    static constexpr T NONE[PANEL] = {};
    for (int64_t d = 0; d < size; d += PANEL)
        for (int64_t token = 0; token < even; token += FEW, packed += PANEL * FEW) {
            const T* from[FEW];
            for (int64_t f = 0; f < FEW; f++) from[f] = token + f < tokens ? values + (token + f) * value_token + d : NONE;
            for (int64_t i = 0; i < std::min(PANEL, size - d); i++)
                for (int64_t f = 0; f < FEW; f++) packed[i * FEW + f] = from[f][i];
        }
}

// Keys and values [heads, tokens, size], contiguous, of a shared prefix; `packed` holds zeros.
template <class T>
inline void pack_prefix(const T* keys, const T* values, int64_t tokens, int64_t heads, int64_t size, T* packed_keys,
                        T* packed_values) {
    const int64_t width = rounded_up(tokens, PANEL), wide = rounded_up(size, PANEL);
    for (int64_t head = 0; head < heads; head++) {
        pack_keys(keys + head * tokens * size, size, tokens, size, packed_keys + head * width * size);
        pack_values(values + head * tokens * size, size, tokens, size, width, packed_values + head * width * wide);
    }
}

// Weights of `width` scores, in the numbers of the values that they multiply: their own memory, or `memory`.
template <class T>
inline const T* weights_of(const float* scores, T* memory, int64_t width) {
    if constexpr (std::is_same_v<T, float>) {
        return scores;
    } else {
        for (int64_t k = 0; k < width; k += LANES) store_vector(memory + k, load_vector(scores + k, LANES), LANES);
        return memory;
    }
}

// (sums + before) / total of `count` numbers; before: null for 0.
template <class T>
inline void write_mean(const float* sums, const float* before, float total, int64_t count, T* out) {
    for (int64_t d = 0; d < count; d += LANES) {
        const Floats sum = load_vector(sums + d, count - d);
        store_vector(out + d, (before ? sum + load_vector(before + d, count - d) : sum) / total, count - d);
    }
}

// A thread's memory for prompts of up to `longest` tokens; without memory, its size.
template <class T>
struct PromptScratch {
    T *keys, *values, *weights;
    float *scores, *sums, *sums_before, *totals;
    int64_t width, size, numbers;  // of scores in a row and sums in a row; float32 numbers in all

    PromptScratch(int64_t longest, int64_t prefix, int64_t head_size, float* memory) {
        const int64_t own = rounded_up(longest, PANEL);
        width = rounded_up(prefix, PANEL) + own, size = rounded_up(head_size, PANEL);
        scores = memory, sums = scores + QUERIES * width, sums_before = sums + QUERIES * size;
        totals = sums_before + QUERIES * size;
        keys = (T*)(totals + QUERIES), values = keys + own * head_size, weights = values + own * size;
        numbers = (float*)(weights + (sizeof(T) < 4 ? width * QUERIES : 0)) - memory;
        numbers = rounded_up(numbers + LANES, LANES);
    }
};

// All prompts, divided among the threads of the calling parallel region.
template <class T>
inline void attend_prompts(const PromptAttention<T>& a) {
    int64_t longest = 0;
    for (int64_t p = 0; p < a.prompts; p++) longest = std::max(longest, a.starts[p + 1] - a.starts[p]);
    const PromptScratch<T> s(longest, a.prefix.tokens, a.size, a.scratch + omp_get_thread_num() * a.scratch_each);
    const int64_t before = rounded_up(a.prefix.tokens, PANEL), out_token = a.heads * a.group * a.size;
    // with fewer heads than threads, the blocks of a head's queries are divided among several tasks
    const int64_t heads = a.prompts * a.heads, parts = (omp_get_num_threads() + heads - 1) / heads;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < heads * parts; task++) {
        const int64_t* mine = a.starts + task / parts / a.heads;
        const int64_t start = mine[0] - a.starts[0], tokens = mine[1] - mine[0];
        const int64_t head = task / parts % a.heads, even = rounded_up(tokens, FACTORS<T>);
        const int64_t begin_at = task % parts * QUERIES;
        if (begin_at >= tokens) continue;
        pack_keys(a.keys + start * a.token + head * a.size, a.token, tokens, a.size, s.keys);
        pack_values(a.values + start * a.token + head * a.size, a.token, tokens, a.size, even, s.values);
        const T *keys_before = a.prefix.keys + head * before * a.size;
        const T *values_before = a.prefix.values + head * before * s.size;
        for (int64_t g = 0; g < a.group; g++) {
            const T* query = a.query + start * a.token + (head * a.group + g) * a.size;
            T* out = a.out + start * out_token + (head * a.group + g) * a.size;
            for (int64_t begin = begin_at; begin < tokens; begin += parts * QUERIES) {
                const int64_t end = std::min(begin + QUERIES, tokens), held = end - begin;
                const int64_t seen_keys = rounded_up(end, FACTORS<T>), weighed = before + seen_keys;
                auto score = [&](const T* panel, int64_t at) {
                    const Keep kept{s.scores + at, s.width};
                    sum_panel(query + begin * a.token, a.token, panel, a.size, held, kept, kept);
                };
                for (int64_t key = 0; key < before; key += PANEL) score(keys_before + key * a.size, key);
                for (int64_t key = 0; key < end; key += PANEL) score(s.keys + key * a.size, before + key);
                const T* weights = nullptr;  // [held, s.width]
                for (int64_t m = 0; m < held; m++) {
                    float* scores = s.scores + m * s.width;
                    const int64_t seen = before + begin + m + 1, whole = rounded_up(seen, LANES);
                    std::fill(scores + seen, scores + whole, -INFINITY);
                    std::fill(scores + a.prefix.tokens, scores + before, -INFINITY);
                    if (a.window) {  // keys before the first that the token attends to
                        const int64_t first = std::max<int64_t>(0, a.prefix.tokens + begin + m + 1 - a.window);
                        std::fill(scores, scores + std::min(first, a.prefix.tokens), -INFINITY);
                        std::fill(scores + before, scores + before + std::max<int64_t>(0, first - a.prefix.tokens), -INFINITY);
                    }
                    s.totals[m] = exponentials(scores, whole / LANES, a.scale);
                    std::fill(scores + whole, scores + std::max(whole, rounded_up(weighed, LANES)), 0.0f);
                    const T* row = weights_of(scores, s.weights + m * s.width, rounded_up(weighed, LANES));
                    if (m == 0) weights = row;
                }
                auto mean = [&](const T* by, const T* panel, int64_t keys, float* to) {
                    sum_panel(by, s.width, panel, keys, held, Keep{to, s.size}, Keep{to, s.size});
                };
                for (int64_t d = 0; d < a.size; d += PANEL) {
                    mean(weights + before, s.values + d * even, seen_keys, s.sums + d);
                    if (before) mean(weights, values_before + d * before, before, s.sums_before + d);
                }
                for (int64_t m = 0; m < held; m++)
                    write_mean(s.sums + m * s.size, before ? s.sums_before + m * s.size : nullptr, s.totals[m], a.size,
                               out + (begin + m) * out_token);
            }
        }
    }
}

}  // namespace
