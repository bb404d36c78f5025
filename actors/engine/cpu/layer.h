// A whole decoder layer, over one new token a row or over prompts, in one parallel region: what its parts compute,
// without calls between them and in memory that is kept.

#pragma once

#include "attention.h"
#include "products.h"
#include "prompt_attention.h"
#include "rows.h"

#if CAN_MULTIPLY

namespace {

typedef const BFloat16* Numbers;

// As native_layer.py lays it out. Weights are packed for products; queries, keys and values are one, and so are gate
// and up.
struct Layer {
    Numbers attention_norm, attention_norm_bias, mlp_norm, mlp_norm_bias;  // no bias: RMSNorm
    Numbers qkv, qkv_bias, output, output_bias, up, up_bias, down, down_bias;
    int64_t hidden, heads, group, size, intermediate;
    int64_t gated;       // silu(gate) * up; else relu(up)
    int64_t norm_first;  // else behind the residual
    float attention_epsilon, mlp_epsilon, scale;
};

// One new token a row.
struct Step {
    Numbers hidden;          // [rows, hidden]
    BFloat16* out;           // [rows, hidden]
    Numbers cosines, sines;  // [rows, size], or null
    BFloat16 *keys, *values; // [rows, heads, held, size] each, of one layout
    const int64_t* slots;    // [rows], of the new token
    const uint8_t* seen;     // [rows, width - first], of slots first ... width - 1, or null
    BFloat16* room;          // as much as `Room` needs
    int64_t rows, held, buffer_row, buffer_head, first, width, seen_row;
};

// Prompts one behind another: prompt p is tokens starts[p] ... starts[p + 1] - 1.
struct Prompts {
    BFloat16* hidden;        // [tokens, hidden], which becomes what comes out
    Numbers cosines, sines;  // [tokens, size], or null
    BFloat16 *keys, *values; // [rows, heads, held, size] each, of one layout, or null
    const int64_t *starts;   // [prompts + 1]
    const int64_t *sources;  // [rows], the prompt of each row
    BFloat16* room;          // as much as `Room` needs
    Prefix prefix;           // of all prompts, or null and 0; it lies before `keys` and `values` already
    int64_t prompts, rows, buffer_row, buffer_head;
};

constexpr int64_t TOKENS = 1024;  // at once where prompts allow: what lies between products stays in the caches

// Where what lies between products is put, in memory that the caller keeps.
struct Room {
    BFloat16 *normed, *between, *qkv, *attended, *up, *gated;
    int64_t queries, states, wide;  // numbers of a token in attended, qkv and up
    int64_t together;               // tokens in the feed-forward at once
    int64_t numbers;                // in all

    Room(const Layer& l, int64_t tokens, BFloat16* memory)
        : queries(l.heads * l.group * l.size), states(queries + 2 * l.heads * l.size),
          wide(l.gated ? 2 * l.intermediate : l.intermediate), together(std::min(tokens, TOKENS)),
          numbers(tokens * (2 * l.hidden + states + queries) + together * (wide + l.intermediate)) {
        normed = memory;
        between = normed + tokens * l.hidden;
        qkv = between + tokens * l.hidden;
        attended = qkv + tokens * states;
        up = attended + tokens * queries;
        gated = up + together * wide;
    }
};

// The rest is called by all threads of a parallel region.

inline void norm(const Layer& l, Numbers from, BFloat16* to, int64_t tokens, bool of_attention) {
    if (of_attention)
        normalize(from, l.attention_norm, l.attention_norm_bias, to, tokens, l.hidden, l.attention_epsilon);
    else
        normalize(from, l.mlp_norm, l.mlp_norm_bias, to, tokens, l.hidden, l.mlp_epsilon);
}

// hidden -> room.qkv
inline void project(const Layer& l, const Room& room, Numbers hidden, int64_t tokens) {
    if (l.norm_first) norm(l, hidden, room.normed, tokens, true);
    multiply({l.norm_first ? room.normed : hidden, l.qkv, l.qkv_bias, nullptr, room.qkv, l.hidden, room.states, false},
             tokens);
}

// room.attended, hidden -> out, which may be hidden
inline void finish(const Layer& l, const Room& room, Numbers hidden, BFloat16* out, int64_t tokens) {
    multiply({room.attended, l.output, l.output_bias, hidden, room.between, room.queries, l.hidden, false}, tokens);
    norm(l, room.between, room.normed, tokens, !l.norm_first);
    for (int64_t first = 0; first < tokens; first += room.together) {
        const int64_t some = std::min(room.together, tokens - first), at = first * l.hidden;
        BFloat16 *normed = room.normed + at, *between = room.between + at;
        multiply({normed, l.up, l.up_bias, nullptr, room.up, l.hidden, room.wide, !l.gated}, some);
        if (l.gated) gate(room.up, room.gated, some, l.intermediate);
        // a norm behind the attention is what the residual is
        multiply({l.gated ? room.gated : room.up, l.down, l.down_bias, l.norm_first ? between : normed,
                  l.norm_first ? out + at : between, l.intermediate, l.hidden, false}, some);
    }
    if (!l.norm_first) norm(l, room.between, out, tokens, false);
}

inline void step_layer(const Layer& l, const Room& room, const Step& s) {
    auto before = [&](int64_t row, int64_t head) {
        BFloat16* mine = room.qkv + row * room.states;
        BFloat16 *key = mine + room.queries + head * l.size, *value = key + l.heads * l.size;
        if (s.cosines) {
            Numbers cosines = s.cosines + row * l.size, sines = s.sines + row * l.size;
            for (int64_t g = 0; g < l.group; g++)
                rotate_head(mine + (head * l.group + g) * l.size, cosines, sines, l.size);
            rotate_head(key, cosines, sines, l.size);
        }
        const int64_t to = row * s.buffer_row + head * s.buffer_head + s.slots[row] * l.size;
        std::memcpy(s.keys + to, key, l.size * sizeof *key);
        std::memcpy(s.values + to, value, l.size * sizeof *value);
    };
    const Attention<BFloat16> attention{
        room.qkv, s.keys + s.first * l.size, s.values + s.first * l.size, s.seen, room.attended, s.rows, l.heads,
        l.group, s.width - s.first, l.size, room.states, s.buffer_row, s.buffer_head, l.size, s.buffer_row,
        s.buffer_head, l.size, s.seen_row, l.scale};
    project(l, room, s.hidden, s.rows);
    attend(attention, before);
    finish(l, room, s.hidden, s.out, s.rows);
}

// Whether the slots lie in the buffers; if not, nothing is done.
bool run_step(const Layer& l, const Step& s) {
    if (!inside(s.slots, s.rows, s.held)) return false;
    const Room room(l, s.rows, s.room);
#pragma omp parallel
    step_layer(l, room, s);
    return true;
}

// Of one layer, [rows, heads, held, size] each, of one layout; keys are null where there are none.
struct Buffers {
    BFloat16 *keys, *values;
    int64_t held, row, head;
};

// A layer's part of a step of all rows: the youngest ones, `rows` of them.
inline Step part_of(const Step& all, const Layer& l, const Buffers& b, int64_t rows) {
    const int64_t first = all.rows - rows;
    Step s = all;
    s.hidden += first * l.hidden;
    s.out += first * l.hidden;
    if (s.cosines) s.cosines += first * l.size, s.sines += first * l.size;
    s.slots += first;
    if (s.seen) s.seen += first * s.seen_row;
    s.keys = b.keys + first * b.row;
    s.values = b.values + first * b.row;
    s.rows = rows, s.held = b.held, s.buffer_row = b.row, s.buffer_head = b.head;
    s.first = 0, s.width = std::min(s.width, b.held);
    return s;
}

// Layer i over the counts[i] youngest rows, none where that is 0; hidden and out are one, and layers of one shape.
// Whether all slots lie in buffers; if not, nothing is done.
bool run_steps(const Layer* layers, const Buffers* buffers, const int64_t* counts, int64_t count, const Step& all) {
    for (int64_t i = 0; i < count; i++)
        if (counts[i] && !(buffers[i].keys && inside(all.slots + all.rows - counts[i], counts[i], buffers[i].held)))
            return false;
    const Room room(layers[0], all.rows, all.room);
#pragma omp parallel
    for (int64_t i = 0; i < count; i++)
        if (counts[i]) step_layer(layers[i], room, part_of(all, layers[i], buffers[i], counts[i]));
    return true;
}

// The prompt behind those that are run together: whole ones up to so many tokens, or one that is longer.
inline int64_t end_of(const Prompts& p, int64_t first) {
    int64_t last = first + 1;
    while (last < p.prompts && p.starts[last + 1] - p.starts[first] <= TOKENS) last++;
    return last;
}

// Most tokens that are run together.
inline int64_t most_together(const Prompts& p) {
    int64_t most = 0;
    for (int64_t first = 0; first < p.prompts; first = end_of(p, first))
        most = std::max(most, p.starts[end_of(p, first)] - p.starts[first]);
    return most;
}

void run_prompts(const Layer& l, const Prompts& p) {
    const Room room(l, most_together(p), p.room);
    BFloat16 *keys = room.qkv + room.queries, *values = keys + l.heads * l.size;
#pragma omp parallel
    for (int64_t first = 0; first < p.prompts; first = end_of(p, first)) {
        const int64_t last = end_of(p, first), start = p.starts[first], tokens = p.starts[last] - start;
        BFloat16* hidden = p.hidden + start * l.hidden;
        project(l, room, hidden, tokens);
        if (p.cosines)
            rotate(room.qkv, p.cosines + start * l.size, p.sines + start * l.size, tokens, l.heads * (l.group + 1),
                   l.size, room.states, l.size);
        if (p.keys) {
            fill(keys, p.keys, p.starts, p.sources, first, last, p.rows, l.heads, l.size, room.states, p.buffer_row,
                 p.buffer_head);
            fill(values, p.values, p.starts, p.sources, first, last, p.rows, l.heads, l.size, room.states,
                 p.buffer_row, p.buffer_head);
        }
        attend_prompts({room.qkv, keys, values, p.starts + first, room.attended, last - first, l.heads, l.group, l.size,
                        room.states, room.states, room.states, l.scale, p.prefix});
        finish(l, room, hidden, hidden, tokens);
    }
}

}  // namespace

#endif
