// Whole decoder layers, over one new token a row or over prompts, in one parallel region: the same operations as the
// separate kernels, without calls between them and in memory that is kept.

#pragma once

#include <vector>

#include "attention.h"
#include "products.h"
#include "prompt_attention.h"
#include "quantized.h"
#include "rows.h"

#if CAN_MULTIPLY

namespace {

typedef const BFloat16* Numbers;

// Where the norms of attention and feed-forward lie, as in layer_weights.py.
enum Placement : int64_t { INPUT = 0, RESIDUAL = 1, OUTPUT = 2 };

// As native_stack.py lays it out. Weights are packed for products; queries, keys and values are one, and so are gate
// and up.
struct Layer {
    Numbers attention_norm, attention_norm_bias, mlp_norm, mlp_norm_bias;  // no bias: RMSNorm
    Numbers query_norm, key_norm;  // RMSNorm of queries and keys, or null
    Numbers qkv, qkv_bias, output, output_bias, up, up_bias, down, down_bias;
    int64_t hidden, heads, group, size, intermediate;
    int64_t gated;         // silu(gate) * up; else relu(up)
    int64_t placement;     // a Placement
    int64_t joined_heads;  // whether query_norm and key_norm are of all heads together, not of each head
    int64_t rope;          // whether queries and keys are rotated
    int64_t window;        // slots that a token attends to at most; 0: all
    int64_t quantized;     // whether the products' weights are those of quantized.h
    float attention_epsilon, mlp_epsilon, head_epsilon, scale;
};

// One new token a row, or several: then rows of this struct share a place, at slots one behind another.
struct Step {
    BFloat16* hidden;        // [rows, hidden], input and output
    Numbers cosines, sines;  // [rows, rotary], or null
    BFloat16 *keys, *values; // of a layer, [places, heads, held, size] each, of one layout
    const int64_t* places;   // [rows], in keys and values
    const int64_t* slots;    // [rows], of the new token, the last that it attends to
    BFloat16* workspace;     // see `Workspace`
    int64_t rotary, rows, held, buffer_row, buffer_head, width;  // width: slots up to the last of any row
    int64_t shared;          // whether rows share a place
};

// Prompts one behind another: prompt p is tokens starts[p] ... starts[p + 1] - 1.
struct Prompts {
    BFloat16* hidden;        // [tokens, hidden], input and output
    Numbers cosines, sines;  // [tokens, rotary], or null
    BFloat16 *keys, *values; // [places, heads, held, size] each, of one layout, or null
    const int64_t *starts;   // [prompts + 1]
    const int64_t *places;   // [rows], in keys and values
    const int64_t *sources;  // [rows], the prompt of each row
    BFloat16* workspace;     // see `Workspace`
    Prefix prefix;           // of all prompts, or null and 0; the slots before `keys` and `values` hold it already
    int64_t rotary, prompts, rows, buffer_row, buffer_head;
};

constexpr int64_t TOKENS = 256;  // run together where prompts allow: intermediate results stay in the second cache
constexpr int64_t FEWEST = 64;   // of a thread's own, which reads all weights for them

// Intermediate results between products, in memory that the caller keeps.
struct Workspace {
    BFloat16 *normed, *between, *qkv, *attended, *up, *gated, *codes;
    int64_t queries, states, wide;  // numbers of a token in attended, qkv and up
    int64_t together;               // tokens in the feed-forward at once
    int64_t numbers;                // in all

    Workspace(const Layer& l, int64_t tokens, BFloat16* memory)
        : queries(l.heads * l.group * l.size), states(queries + 2 * l.heads * l.size),
          wide(l.gated ? 2 * l.intermediate : l.intermediate), together(std::min(tokens, TOKENS)),
          numbers(tokens * (2 * l.hidden + states + queries) + together * (wide + l.intermediate) + codes_of(l, tokens)) {
        normed = memory;
        between = normed + tokens * l.hidden;
        qkv = between + tokens * l.hidden;
        attended = qkv + tokens * states;
        up = attended + tokens * queries;
        gated = up + together * wide;
        codes = gated + together * l.intermediate;
    }

    // For the largest input of a quantized product. Also of a layer that has none: others of the stack may, and
    // memory that no layer touches costs nothing.
    int64_t codes_of(const Layer& l, int64_t tokens) const {
#if CAN_QUANTIZE
        return std::max(numbers_of_codes(tokens, std::max(l.hidden, queries)), numbers_of_codes(together, l.intermediate));
#else
        return 0;
#endif
    }
};

// The following functions are called by all threads of a parallel region.

inline void norm(const Layer& l, Numbers from, BFloat16* to, int64_t tokens, bool of_attention) {
    if (of_attention)
        normalize(from, l.attention_norm, l.attention_norm_bias, to, tokens, l.hidden, l.attention_epsilon);
    else
        normalize(from, l.mlp_norm, l.mlp_norm_bias, to, tokens, l.hidden, l.mlp_epsilon);
}

// A product of a layer; its numbers are quantized first where its weights are.
inline void multiply(const Layer& l, const Workspace& w, const Product& p, int64_t rows) {
#if CAN_QUANTIZE
    if (l.quantized) {
        const Codes codes = codes_in(w.codes, rows, p.inputs);
        quantize(p.x, rows, p.inputs, codes);
        return multiply({codes, (const char*)p.weight, p.bias, p.residual, p.out, p.inputs, p.outputs, p.relu}, rows);
    }
#endif
    multiply(p, rows);
}

// hidden -> w.qkv, with norms of queries and keys
inline void project(const Layer& l, const Workspace& w, Numbers hidden, int64_t tokens) {
    const bool first = l.placement == INPUT;
    if (first) norm(l, hidden, w.normed, tokens, true);
    multiply(l, w, {first ? w.normed : hidden, l.qkv, l.qkv_bias, nullptr, w.qkv, l.hidden, w.states, false}, tokens);
    if (!l.query_norm) return;
    const int64_t queries = l.heads * l.group, joined = l.joined_heads;
    normalize_groups(w.qkv, l.query_norm, tokens, joined ? 1 : queries, joined ? queries * l.size : l.size, w.states,
                     l.head_epsilon);
    normalize_groups(w.qkv + w.queries, l.key_norm, tokens, joined ? 1 : l.heads, joined ? l.heads * l.size : l.size,
                     w.states, l.head_epsilon);
}

// w.attended and hidden -> hidden
inline void finish(const Layer& l, const Workspace& w, BFloat16* hidden, int64_t tokens) {
    const bool output = l.placement == OUTPUT, input = l.placement == INPUT;
    multiply(l, w, {w.attended, l.output, l.output_bias, output ? nullptr : hidden, w.between, w.queries, l.hidden, false},
             tokens);
    norm(l, w.between, w.normed, tokens, !input);
    if (output) add(hidden, w.normed, w.between, tokens * l.hidden);
    for (int64_t first = 0; first < tokens; first += w.together) {
        const int64_t some = std::min(w.together, tokens - first), at = first * l.hidden;
        BFloat16 *normed = w.normed + at, *between = w.between + at;
        multiply(l, w, {output ? between : normed, l.up, l.up_bias, nullptr, w.up, l.hidden, w.wide, !l.gated}, some);
        if (l.gated) gate(w.up, w.gated, some, l.intermediate);
        multiply(l, w, {l.gated ? w.gated : w.up, l.down, l.down_bias, output ? nullptr : input ? between : normed,
                  output ? normed : input ? hidden + at : between, l.intermediate, l.hidden, false}, some);
    }
    if (input) return;
    if (!output) return norm(l, w.between, hidden, tokens, false);
    norm(l, w.normed, w.normed, tokens, false);
    add(w.between, w.normed, hidden, tokens * l.hidden);
}

inline void step_layer(const Layer& l, const Workspace& w, const Step& s) {
    auto before = [&](int64_t row, int64_t head) {
        BFloat16* mine = w.qkv + row * w.states;
        BFloat16 *key = mine + w.queries + head * l.size, *value = key + l.heads * l.size;
        if (l.rope) {
            Numbers cosines = s.cosines + row * s.rotary, sines = s.sines + row * s.rotary;
            for (int64_t g = 0; g < l.group; g++)
                rotate_head(mine + (head * l.group + g) * l.size, cosines, sines, s.rotary);
            rotate_head(key, cosines, sines, s.rotary);
        }
        const int64_t to = s.places[row] * s.buffer_row + head * s.buffer_head + s.slots[row] * l.size;
        std::memcpy(s.keys + to, key, l.size * sizeof *key);
        std::memcpy(s.values + to, value, l.size * sizeof *value);
    };
    const Attention<BFloat16> attention{
        w.qkv, s.keys, s.values, nullptr, w.attended, s.rows, l.heads, l.group, s.width, l.size, w.states,
        s.buffer_row, s.buffer_head, l.size, s.buffer_row, s.buffer_head, l.size, 0, l.scale, s.places, s.slots, l.window};
    project(l, w, s.hidden, s.rows);
    if (s.shared) {  // a token attends to keys that another thread may write
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.rows * l.heads; task++) before(task / l.heads, task % l.heads);
        attend(attention, [](int64_t, int64_t) {});
    } else
        attend(attention, before);
    finish(l, w, s.hidden, s.rows);
}

// Of one layer, [places, heads, held, size] each, of one layout; keys are null where there are none.
struct Buffers {
    BFloat16 *keys, *values;
    int64_t places, held, row, head;
};

// A layer's part of a step of all rows: the youngest ones, `rows` of them.
inline Step part_of(const Step& all, const Layer& l, const Buffers& b, int64_t rows) {
    const int64_t first = all.rows - rows;
    Step s = all;
    s.hidden += first * l.hidden;
    if (s.cosines) s.cosines += first * s.rotary, s.sines += first * s.rotary;
    s.places += first, s.slots += first;
    s.keys = b.keys, s.values = b.values;
    s.rows = rows, s.held = b.held, s.buffer_row = b.row, s.buffer_head = b.head;
    s.width = std::min(s.width, b.held);
    return s;
}

// Layer i over the counts[i] youngest rows, none where that is 0; all layers have one shape, some of them plain weights
// and others quantized ones.
// Returns whether all places and slots lie in buffers; if not, nothing is done.
bool run_steps(const Layer* layers, const Buffers* buffers, const int64_t* counts, int64_t count, const Step& all) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = all.rows - counts[i];
        if (counts[i] && !(buffers[i].keys && inside(all.places + first, counts[i], buffers[i].places) &&
                           inside(all.slots + first, counts[i], buffers[i].held)))
            return false;
    }
    const Workspace w(layers[0], all.rows, all.workspace);
#pragma omp parallel
    for (int64_t i = 0; i < count; i++)
        if (counts[i]) step_layer(layers[i], w, part_of(all, layers[i], buffers[i], counts[i]));
    return true;
}

// Prompts that are run together: group g is prompts firsts[g] ... firsts[g + 1] - 1.
struct Groups {
    std::vector<int64_t> firsts;
    int64_t most = 0;     // tokens of a group
    int64_t threads = 1;  // groups that are run at once, each by one thread; 1: all threads run each group

    // About TOKENS tokens a group, or one longer prompt, and equally many to each thread. Where there are too few tokens
    // for that, or a prompt is too long, all threads run each group, and how many threads there are cuts none smaller.
    explicit Groups(const Prompts& p) {
        const int64_t all = p.starts[p.prompts], available = omp_get_max_threads();
        const int64_t rounds = std::max<int64_t>(1, (all / available + TOKENS / 2) / TOKENS), count = rounds * available;
        cut(p, count);
        if (all >= FEWEST * available && most * count <= all + all / 8)
            threads = available;
        else
            cut(p, std::max<int64_t>(1, (all + TOKENS / 2) / TOKENS));
    }

    // Into at most `count` groups, of equally many tokens where prompts allow.
    void cut(const Prompts& p, int64_t count) {
        const int64_t all = p.starts[p.prompts];
        firsts = {0}, most = 0;
        for (int64_t prompt = 1; prompt < p.prompts; prompt++) {
            const int64_t middle = (p.starts[prompt] + p.starts[prompt + 1]) / 2;
            if (middle * count >= int64_t(firsts.size()) * all) firsts.push_back(prompt);
        }
        firsts.push_back(p.prompts);
        for (size_t g = 0; g + 1 < firsts.size(); g++) most = std::max(most, p.starts[firsts[g + 1]] - p.starts[firsts[g]]);
    }
};

// Numbers of the workspace of all groups that are run at once.
inline int64_t numbers_for(const Layer& l, const Groups& g) {
    return g.threads * rounded_up(Workspace(l, g.most, nullptr).numbers, 2 * LANES);
}

// A layer over prompts first ... last - 1, by all threads of the calling parallel region.
inline void run_group(const Layer& l, const Prompts& p, const Workspace& w, int64_t first, int64_t last) {
    BFloat16 *keys = w.qkv + w.queries, *values = keys + l.heads * l.size;
    const int64_t start = p.starts[first], tokens = p.starts[last] - start;
    BFloat16* hidden = p.hidden + start * l.hidden;
    project(l, w, hidden, tokens);
    if (l.rope)
        rotate(w.qkv, p.cosines + start * p.rotary, p.sines + start * p.rotary, tokens, l.heads * (l.group + 1), l.size,
               p.rotary, w.states);
    if (p.keys) {
        fill(keys, p.keys, p.starts, p.places, p.sources, first, last, p.rows, l.heads, l.size, w.states, p.buffer_row,
             p.buffer_head);
        fill(values, p.values, p.starts, p.places, p.sources, first, last, p.rows, l.heads, l.size, w.states, p.buffer_row,
             p.buffer_head);
    }
    attend_prompts({w.qkv, keys, values, p.starts + first, w.attended, last - first, l.heads, l.group, l.size, w.states,
                    w.states, w.states, l.scale, p.prefix});
    finish(l, w, hidden, tokens);
}

void run_prompts(const Layer& l, const Prompts& p) {
    const Groups groups(p);
    const int64_t count = groups.firsts.size() - 1, numbers = numbers_for(l, groups) / groups.threads;
    if (groups.threads == 1) {
        const Workspace w(l, groups.most, p.workspace);
#pragma omp parallel
        for (int64_t g = 0; g < count; g++) run_group(l, p, w, groups.firsts[g], groups.firsts[g + 1]);
        return;
    }
#pragma omp parallel
    {
        const Workspace w(l, groups.most, p.workspace + omp_get_thread_num() * numbers);
#pragma omp for schedule(dynamic)
        for (int64_t g = 0; g < count; g++) {
#pragma omp parallel num_threads(1)
            run_group(l, p, w, groups.firsts[g], groups.firsts[g + 1]);
        }
    }
}

}  // namespace

#endif
