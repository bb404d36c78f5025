// Attention of one token a row over the live slots of a strided cache.

#pragma once

#include <vector>

#include "numbers.h"

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
void attend_head(const Head<T>& head, const T* next_keys, int64_t next_count, int64_t group, int64_t size,
                 int64_t key_slot, int64_t value_slot, float scale, float* workspace) {
    const int64_t count = head.last - head.first, blocks = (count + LANES - 1) / LANES, tail = size % PAIR;
    const int whole = TAIL ? PAIRS - 1 : PAIRS;
    constexpr int CHAINS = PAIRS == 1 ? 4 : PAIRS <= 3 ? 2 : 1;  // independent sums, which the processor adds in parallel
    Factor<T>* queries = (Factor<T>*)workspace;                   // [group, PAIRS]
    Pair* sums = (Pair*)(workspace + 2 * LANES * group * PAIRS);  // [group, PAIRS]
    float* scores = (float*)(sums + group * PAIRS);          // [group, blocks * 16]
    float* totals = scores + group * blocks * LANES;         // [group]
    auto read = [&](const T* x, int p) { return p < whole ? load_pair(x + p * PAIR) : load_some(x + p * PAIR, tail); };
    auto prefetch_slots = [](const T* from, int64_t slot) {  // 16, some of which may lie behind the last one
#pragma GCC unroll 16
        for (int64_t k = 0; k < LANES; k++)
            for (int64_t at = 0; at < PAIRS * PAIR; at += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k * slot + at, 0, 2);
    };
    for (int64_t g = 0; g < group; g++)
        for (int p = 0; p < PAIRS; p++) {
            queries[g * PAIRS + p] = p < whole ? load_factor(head.query + g * size + p * PAIR)
                                               : load_some_factor(head.query + g * size + p * PAIR, tail);
            sums[g * PAIRS + p] = Pair();
        }
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = head.first + block * LANES, held = std::min(LANES, head.last - begin);
        prefetch_slots(head.values + begin * value_slot, value_slot);
        for (int64_t g = 0; g < group; g++) {
            Floats dots[LANES];
            auto multiply = [&](int64_t k, const T* key) {
                Floats dot = {};
                for (int p = 0; p < PAIRS; p++)
                    dot = add_product(dot, queries[g * PAIRS + p],
                                      p < whole ? load_factor(key + p * PAIR) : load_some_factor(key + p * PAIR, tail));
                dots[k] = dot;
            };
            const T* key = head.keys + begin * key_slot;
            if (held == LANES) {
#pragma GCC unroll 16
                for (int64_t k = 0; k < LANES; k++) multiply(k, key + k * key_slot);
            } else {
                for (int64_t k = 0; k < LANES; k++) multiply(k, key + std::min(k, held - 1) * key_slot);
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
        if (block * LANES < next_count) prefetch_slots(next_keys + block * LANES * key_slot, key_slot);
        for (int64_t g = 0; g < group; g++) {
            const float* weights = scores + (g * blocks + block) * LANES;
            Pair sum[CHAINS][PAIRS] = {};
            std::memcpy(sum, sums + g * PAIRS, sizeof *sum);
            auto add = [&](int64_t k, Pair* to) {
                const T* value = head.values + (begin + k) * value_slot;
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

template <class T>
struct Attention {
    const T *query, *keys, *values;  // [rows, heads, group, size], [rows, heads, width, size] each
    const uint8_t* seen;             // [rows, width], the slots a row attends to, without gaps; null: see `slots`
    T* out;                          // [rows, heads, group, size], without strides
    int64_t rows, heads, group, width, size;
    int64_t query_row, key_row, key_head, key_slot, value_row, value_head, value_slot, seen_row;
    float scale;
    const int64_t* places = nullptr; // [rows], in keys and values; null: those of the rows
    const int64_t* slots = nullptr;  // [rows], the last slot a row attends to; null: all
    int64_t window = 0;              // how many slots it attends to at most, with `slots`; 0: all up to the last
};

// All rows, divided among the threads of the calling parallel region. `before(row, head)` runs before a head is read.
template <class T, class Before>
void attend(const Attention<T>& a, Before before) {
    static constexpr decltype(&attend_head<T, 1, false>) forms[][2] = {
        {attend_head<T, 1, false>, attend_head<T, 1, true>}, {attend_head<T, 2, false>, attend_head<T, 2, true>},
        {attend_head<T, 3, false>, attend_head<T, 3, true>}, {attend_head<T, 4, false>, attend_head<T, 4, true>},
        {attend_head<T, 5, false>, attend_head<T, 5, true>}, {attend_head<T, 6, false>, attend_head<T, 6, true>},
        {attend_head<T, 7, false>, attend_head<T, 7, true>}, {attend_head<T, 8, false>, attend_head<T, 8, true>}};
    const int64_t pairs = (a.size + PAIR - 1) / PAIR, tasks = a.rows * a.heads;
    const auto run = forms[pairs - 1][a.size % PAIR != 0];
    auto head_of = [&](int64_t task) {
        const int64_t row = task / a.heads, head = task % a.heads, place = a.places ? a.places[row] : row;
        int64_t first = 0, last = a.width;
        if (a.seen) {
            const uint8_t* mine = a.seen + row * a.seen_row;
            while (first < last - 1 && !mine[first]) first++;
            while (last > first + 1 && !mine[last - 1]) last--;
        } else if (a.slots) {
            last = a.slots[row] + 1;
            if (a.window) first = std::max<int64_t>(0, last - a.window);
        }
        return Head<T>{a.query + row * a.query_row + head * a.group * a.size,
                       a.keys + place * a.key_row + head * a.key_head,
                       a.values + place * a.value_row + head * a.value_head, a.out + task * a.group * a.size, first, last};
    };
    static thread_local std::vector<Floats> workspace;
    const size_t needed = a.group * (4 * pairs + (a.width + LANES - 1) / LANES + 1);
    if (workspace.size() < needed) workspace.resize(needed);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; task++) {
        const Head<T> head = head_of(task), next = task + 1 < tasks ? head_of(task + 1) : head;
        before(task / a.heads, task % a.heads);
        run(head, next.keys + next.first * a.key_slot, next.last - next.first, a.group, a.size, a.key_slot, a.value_slot,
            a.scale, (float*)workspace.data());
    }
}

}  // namespace
