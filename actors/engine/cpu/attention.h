// Attention in a decode step (one token per row, over the used slots of a strided KV cache) and over whole prompts.

#pragma once

#include "products.h"

namespace {

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys and values of a prefix that all prompts share. Each head is packed separately.
template <class T>
struct Prefix {
    const T *keys, *values;  // keys [heads, size, width], values [heads, size rounded up, width], from pack_prefix
    int64_t tokens;
};

// A decoder layer with packed weights. Layout: `_Layer` in stack.py. qkv: queries, keys, values. up: gate, up.
template <class T>
struct Layer {
    const float *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;  // null: no norm; null bias: RMSNorm
    const float *query_norm, *key_norm;        // RMSNorm of queries and keys; null: no norm
    const float *attention_after, *mlp_after;  // RMSNorm of the blocks' outputs; null: no norm
    const T *qkv, *qkv_bias, *output, *output_bias, *up, *up_bias, *down, *down_bias;
    int64_t hidden, heads, group, size, intermediate;
    int64_t gated;           // 1: silu(gate) * up; 2: gelu(gate) * up; 0: relu(up)
    int64_t norms_residual;  // whether attention_norm and mlp_norm come after the residuals, not before the blocks
    int64_t joined_heads;    // whether query_norm and key_norm apply to all heads together, not to each head
    int64_t rope;            // number of the rotary table for queries and keys, counted from 1; 0: no rotation
    int64_t window;          // maximum number of slots that a token attends to; 0: no maximum
    int64_t quantized;       // whether the packed weights are int8
    float attention_epsilon, mlp_epsilon, head_epsilon, scale;
};

// KV cache of a layer: keys and values, [places, heads, held, size] each. `row` and `head` are strides. null: no slots.
template <class T>
struct Buffers {
    T *keys, *values;
    int64_t places, held, row, head;
};

// A decode step. Each row has one new token. Layout: `_Step` in stack.py.
template <class T>
struct Step {
    T* hidden;                 // [rows, hidden], output
    const T* rotations;        // for each table, cosines [rows, rotary], then sines [rows, rotary]; set by `run_step`
    const int64_t* tokens;     // [rows]
    const int64_t* places;     // [rows], index of each row in keys and values
    const int64_t* slots;      // [rows], slot (= position) of the new token, and last slot that it attends to
    int64_t rotary, rows;
};

// The tables from which the first layer's input is computed. Layout: `_Inputs` in stack.py.
template <class T>
struct Inputs {
    const T *embeddings, *learned;  // [embedded, hidden]; position embeddings [positions, hidden], or null
    const T* rotations;             // cosines and sines [tables, 2, positions, rotary], or null
    int64_t embedded, positions, rotary, tables;
    float scale;                    // factor for `embeddings`
};

// Concatenated prompts: prompt p has the tokens starts[p] ... starts[p + 1] - 1. Layout: `_Prompts` in stack.py.
template <class T>
struct Prompts {
    T* hidden;                 // [tokens, hidden], input and output
    const T *cosines, *sines;  // [tokens, rotary], or null
    T *keys, *values;          // [places, heads, held, size] each, with equal strides, or null
    const int64_t* starts;     // [prompts + 1]
    const int64_t* places;     // [rows], index of each row in keys and values
    const int64_t* sources;    // [rows], index of each row's prompt
    Prefix<T> prefix;          // 0 tokens: no prefix. `keys` and `values` begin after the stored prefix
    int64_t rotary, prompts, rows, buffer_row, buffer_head;
};

constexpr int64_t TOKENS = 256;  // tokens that run together where possible: their intermediate results fit the L2 cache

// Memory for the intermediate results of a layer. If `memory` is null, computes only the total size.
template <class T>
struct Workspace {
    T *normed, *between, *qkv, *attended, *up, *gated;
    char* codes;                    // 8-bit codes of the largest input of a product with int8 weights
    float* scratch;                 // for attention: `scratch_each` numbers per thread
    int64_t queries, states, wide;  // numbers per token in attended, qkv and up
    int64_t together;               // maximum number of tokens that run through the feed-forward block at once
    int64_t scratch_each, bytes;

    Workspace(const Layer<T>& l, int64_t tokens, int64_t scratch_each, int64_t threads, char* memory)
        : queries(l.heads * l.group * l.size), states(queries + 2 * l.heads * l.size),
          wide(l.gated ? 2 * l.intermediate : l.intermediate), together(std::min(tokens, TOKENS)), scratch_each(scratch_each) {
        char* at = memory;
        auto take = [&](auto*& part, int64_t count) {
            part = (std::decay_t<decltype(part)>)at;
            at += rounded_up(count * sizeof *part, 64);
        };
        take(normed, tokens * l.hidden), take(between, tokens * l.hidden), take(qkv, tokens * states);
        take(attended, tokens * queries), take(up, together * wide), take(gated, together * l.intermediate);
        take(scratch, threads * scratch_each);
#if CAN_QUANTIZE  // for all layers, because some layers may have int8 weights, and unused memory costs nothing
        take(codes, std::max(bytes_of_codes(tokens, std::max(l.hidden, queries)), bytes_of_codes(together, l.intermediate)));
#endif
        bytes = at - memory;
    }
};

// Inputs and output of attention for one key/value head of one row. The row attends to slots first ... last - 1.
template <class T>
struct Head {
    const T *query, *keys, *values;
    T* out;
    int64_t first, last;
};

// Computes attention of a head's queries [group, size] over its slots, 16 slots at a time. Prefetches `next_keys`.
// PAIRS: number of vectors of 32 numbers that hold `size` numbers. TAIL: whether the last vector is partly filled.
template <class T, int PAIRS, bool TAIL>
void attend_head(const Head<T>& head, const T* next_keys, int64_t next_count, int64_t group, int64_t size, float scale,
                 float* workspace) {
    const int64_t count = head.last - head.first, blocks = (count + LANES - 1) / LANES, tail = size % PAIR;
    const int whole = TAIL ? PAIRS - 1 : PAIRS;
    constexpr int CHAINS = PAIRS == 1 ? 4 : PAIRS <= 3 ? 2 : 1;  // independent sums, which run in parallel
    Factor<T>* queries = (Factor<T>*)workspace;                   // [group, PAIRS]
    Pair* sums = (Pair*)(workspace + 2 * LANES * group * PAIRS);  // [group, PAIRS]
    float* scores = (float*)(sums + group * PAIRS);               // [group, blocks * 16]
    float* totals = scores + group * blocks * LANES;              // [group]
    auto read = [&](const T* x, int p) { return p < whole ? load_pair(x + p * PAIR) : load_some(x + p * PAIR, tail); };
    auto prefetch_slots = [=](const T* from) {  // 16 slots; some may lie after the last slot, which does no harm
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
        std::fill(s + count, s + blocks * LANES, -INFINITY);  // fill up the last vector
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

// Returns the number of float32 numbers of `workspace` in attend_head, for rows with up to `width` slots.
inline int64_t step_scratch(int64_t group, int64_t size, int64_t width) {
    return group * (4 * ((size + PAIR - 1) / PAIR) + (width + LANES - 1) / LANES + 1) * LANES;
}

// Computes attention for a decode step's rows from `first` on: w.qkv -> w.attended. The threads of the calling parallel
// region share the work. Calls `before(row, head)` before a head is read.
template <class T, class Before>
void attend(const Layer<T>& l, const Buffers<T>& b, const Workspace<T>& w, const Step<T>& all, int64_t first, Before before) {
    static constexpr decltype(&attend_head<T, 1, false>) forms[][2] = {
        {attend_head<T, 1, false>, attend_head<T, 1, true>}, {attend_head<T, 2, false>, attend_head<T, 2, true>},
        {attend_head<T, 3, false>, attend_head<T, 3, true>}, {attend_head<T, 4, false>, attend_head<T, 4, true>},
        {attend_head<T, 5, false>, attend_head<T, 5, true>}, {attend_head<T, 6, false>, attend_head<T, 6, true>},
        {attend_head<T, 7, false>, attend_head<T, 7, true>}, {attend_head<T, 8, false>, attend_head<T, 8, true>}};
    const auto run = forms[(l.size + PAIR - 1) / PAIR - 1][l.size % PAIR != 0];
    auto head_of = [&](int64_t task) {
        const int64_t row = task / l.heads, head = task % l.heads, last = all.slots[first + row] + 1;
        const int64_t at = all.places[first + row] * b.row + head * b.head;
        return Head<T>{w.qkv + row * w.states + head * l.group * l.size, b.keys + at, b.values + at,
                       w.attended + task * l.group * l.size, l.window ? std::max<int64_t>(0, last - l.window) : 0, last};
    };
    const int64_t tasks = (all.rows - first) * l.heads;
    float* scratch = w.scratch + omp_get_thread_num() * w.scratch_each;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
        const Head<T> head = head_of(task), next = task + 1 < tasks ? head_of(task + 1) : head;
        before(task / l.heads, task % l.heads);
        run(head, next.keys + next.first * l.size, next.last - next.first, l.group, l.size, l.scale, scratch);
    }
}

// Causal attention of prompts uses the panel products of products.h. A head's keys and values are packed once. Then
// each block of queries is multiplied with them, up to the last key that it attends to. Scores and sums are float32.

constexpr int64_t QUERIES = 32;  // queries in a block

// Packs keys [tokens, size] -> [tokens / 48 rounded up, size / FACTORS, 48, FACTORS]. Writes nothing beyond `tokens`.
template <class T>
inline void pack_keys(const T* keys, int64_t key_token, int64_t tokens, int64_t size, T* packed) {
    for (int64_t token = 0; token < tokens; token++) {
        T* to = packed + token / PANEL * PANEL * size + token % PANEL * FACTORS<T>;
        for (int64_t d = 0; d < size; d += FACTORS<T>) std::memcpy(to + d * PANEL, keys + token * key_token + d, 4);
    }
}

// Packs values [tokens, size] -> [size / 48 rounded up, even / FACTORS, 48, FACTORS], with zeros beyond `tokens`.
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

// Packs contiguous keys and values [heads, tokens, size] of a shared prefix. The output memory must hold zeros.
template <class T>
inline void pack_prefix(const T* keys, const T* values, int64_t tokens, int64_t heads, int64_t size, T* packed_keys,
                        T* packed_values) {
    const int64_t width = rounded_up(tokens, PANEL), wide = rounded_up(size, PANEL);
    for (int64_t head = 0; head < heads; head++) {
        pack_keys(keys + head * tokens * size, size, tokens, size, packed_keys + head * width * size);
        pack_values(values + head * tokens * size, size, tokens, size, width, packed_values + head * width * wide);
    }
}

// Returns the attention weights in `scores` as type T: `scores` itself if T is float, else a copy in `memory`.
template <class T>
inline const T* weights_of(const float* scores, T* memory, int64_t width) {
    if constexpr (std::is_same_v<T, float>) {
        return scores;
    } else {
        for (int64_t k = 0; k < width; k += LANES) store_vector(memory + k, load_vector(scores + k, LANES), LANES);
        return memory;
    }
}

// Writes (sums + before) / total for `count` numbers. If `before` is null, it counts as 0.
template <class T>
inline void write_mean(const float* sums, const float* before, float total, int64_t count, T* out) {
    for (int64_t d = 0; d < count; d += LANES) {
        const Floats sum = load_vector(sums + d, count - d);
        store_vector(out + d, (before ? sum + load_vector(before + d, count - d) : sum) / total, count - d);
    }
}

template <class T>
int64_t longest_of(const Prompts<T>& p, int64_t first, int64_t last) {
    int64_t longest = 0;
    for (int64_t i = first; i < last; i++) longest = std::max(longest, p.starts[i + 1] - p.starts[i]);
    return longest;
}

// A thread's memory for attention in prompts of up to `longest` tokens. If `memory` is null, computes only the size.
template <class T>
struct PromptScratch {
    T *keys, *values, *weights;
    float *scores, *sums, *sums_before, *totals;
    int64_t width, size, numbers;  // length of a row of scores, length of a row of sums, float32 numbers in all

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

// Computes attention of prompts first ... last - 1: w.qkv -> w.attended. The calling threads share the work.
template <class T>
inline void attend_prompts(const Layer<T>& l, const Prompts<T>& p, const Workspace<T>& w, int64_t first, int64_t last) {
    const int64_t *starts = p.starts + first, size = l.size, longest = longest_of(p, first, last);
    const T *all_keys = w.qkv + w.queries, *all_values = all_keys + l.heads * size;
    const PromptScratch<T> s(longest, p.prefix.tokens, size, w.scratch + omp_get_thread_num() * w.scratch_each);
    const int64_t before = rounded_up(p.prefix.tokens, PANEL);
    // if there are fewer heads than threads, several tasks share the query blocks of a head
    const int64_t heads = (last - first) * l.heads, parts = (omp_get_num_threads() + heads - 1) / heads;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < heads * parts; task++) {
        const int64_t* mine = starts + task / parts / l.heads;
        const int64_t start = mine[0] - starts[0], tokens = mine[1] - mine[0];
        const int64_t head = task / parts % l.heads, even = rounded_up(tokens, FACTORS<T>);
        const int64_t begin_at = task % parts * QUERIES;
        if (begin_at >= tokens) continue;
        pack_keys(all_keys + start * w.states + head * size, w.states, tokens, size, s.keys);
        pack_values(all_values + start * w.states + head * size, w.states, tokens, size, even, s.values);
        const T *keys_before = p.prefix.keys + head * before * size;
        const T *values_before = p.prefix.values + head * before * s.size;
        for (int64_t g = 0; g < l.group; g++) {
            const T* query = w.qkv + start * w.states + (head * l.group + g) * size;
            T* out = w.attended + start * w.queries + (head * l.group + g) * size;
            for (int64_t begin = begin_at; begin < tokens; begin += parts * QUERIES) {
                const int64_t end = std::min(begin + QUERIES, tokens), held = end - begin;
                const int64_t seen_keys = rounded_up(end, FACTORS<T>), weighed = before + seen_keys;
                auto score = [&](const T* panel, int64_t at) {
                    const Keep kept{s.scores + at, s.width};
                    sum_panel(query + begin * w.states, w.states, panel, size, held, kept, kept);
                };
                for (int64_t key = 0; key < before; key += PANEL) score(keys_before + key * size, key);
                for (int64_t key = 0; key < end; key += PANEL) score(s.keys + key * size, before + key);
                const T* weights = nullptr;  // [held, s.width]
                for (int64_t m = 0; m < held; m++) {
                    float* scores = s.scores + m * s.width;
                    const int64_t seen = before + begin + m + 1, whole = rounded_up(seen, LANES);
                    std::fill(scores + seen, scores + whole, -INFINITY);
                    std::fill(scores + p.prefix.tokens, scores + before, -INFINITY);
                    if (l.window) {  // exclude keys before the first key that the token attends to
                        const int64_t first = std::max<int64_t>(0, p.prefix.tokens + begin + m + 1 - l.window);
                        std::fill(scores, scores + std::min(first, p.prefix.tokens), -INFINITY);
                        std::fill(scores + before, scores + before + std::max<int64_t>(0, first - p.prefix.tokens), -INFINITY);
                    }
                    s.totals[m] = exponentials(scores, whole / LANES, l.scale);
                    std::fill(scores + whole, scores + std::max(whole, rounded_up(weighed, LANES)), 0.0f);
                    const T* row = weights_of(scores, s.weights + m * s.width, rounded_up(weighed, LANES));
                    if (m == 0) weights = row;
                }
                auto mean = [&](const T* by, const T* panel, int64_t keys, float* to) {
                    sum_panel(by, s.width, panel, keys, held, Keep{to, s.size}, Keep{to, s.size});
                };
                for (int64_t d = 0; d < size; d += PANEL) {
                    mean(weights + before, s.values + d * even, seen_keys, s.sums + d);
                    if (before) mean(weights, values_before + d * before, before, s.sums_before + d);
                }
                for (int64_t m = 0; m < held; m++)
                    write_mean(s.sums + m * s.size, before ? s.sums_before + m * s.size : nullptr, s.totals[m], size,
                               out + (begin + m) * w.queries);
            }
        }
    }
}

}  // namespace
