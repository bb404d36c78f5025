// Decoder layers, in a decode step (one new token per row) or over prompts. One parallel region runs all operations.

#pragma once

#include <memory>
#include <vector>

#include "attention.h"

namespace {

constexpr int64_t FEWEST = 64;  // minimum tokens per thread for separate groups; each thread then reads all weights

// Memory of one thread, aligned to 64 bytes. It is kept between calls.
class Kept {
  public:
    char* at_least(size_t bytes) {
        if (bytes > size) {
            held.reset(), size = 0;  // free the smaller memory before allocating
            held.reset(new char[bytes + 64]), size = bytes;
        }
        return (char*)(((uintptr_t)held.get() + 63) / 64 * 64);
    }

    void trim() {
        if (size > (size_t(1) << 28)) held.reset(), size = 0;  // keep at most 256 MiB
    }

  private:
    std::unique_ptr<char[]> held;
    size_t size = 0;
};

// In a parallel region, all threads must call each of the following functions.

template <class T>
inline void norm(const Layer<T>& l, const T* from, T* to, int64_t tokens, bool of_attention) {
    if (of_attention)
        normalize(from, l.attention_norm, l.attention_norm_bias, to, tokens, l.hidden, l.attention_epsilon);
    else
        normalize(from, l.mlp_norm, l.mlp_norm_bias, to, tokens, l.hidden, l.mlp_epsilon);
}

// Computes one of a layer's matrix products. If the layer's weights are quantized, quantizes the inputs first.
template <class T>
inline void multiply(const Layer<T>& l, const Workspace<T>& w, const Product<T>& p, int64_t rows) {
#if CAN_QUANTIZE
    if constexpr (std::is_same_v<T, BFloat16>)
        if (l.quantized) {
            const Codes codes = codes_in(w.codes, rows, p.inputs);
            quantize(p.x, rows, p.inputs, codes);
            return multiply(QuantizedProduct{p, codes}, rows);
        }
#endif
    multiply(p, rows);
}

// Runs the first part of a layer, up to the norms of queries and keys: hidden -> w.qkv.
template <class T>
inline void project(const Layer<T>& l, const Workspace<T>& w, const T* hidden, int64_t tokens) {
    const bool first = l.attention_norm && !l.norms_residual;
    if (first) norm(l, hidden, w.normed, tokens, true);
    multiply(l, w, {first ? w.normed : hidden, l.qkv, l.qkv_bias, nullptr, w.qkv, l.hidden, w.states, false}, tokens);
    if (!l.query_norm) return;
    const int64_t queries = l.heads * l.group, joined = l.joined_heads;
    normalize_groups(w.qkv, l.query_norm, tokens, joined ? 1 : queries, joined ? queries * l.size : l.size, w.states,
                     l.head_epsilon);
    normalize_groups(w.qkv + w.queries, l.key_norm, tokens, joined ? 1 : l.heads, joined ? l.heads * l.size : l.size,
                     w.states, l.head_epsilon);
}

// Runs the part of a layer after attention: w.attended and hidden -> hidden.
template <class T>
inline void finish(const Layer<T>& l, const Workspace<T>& w, T* hidden, int64_t tokens) {
    const bool after = l.attention_after, residual = l.norms_residual;
    multiply(l, w, {w.attended, l.output, l.output_bias, after ? nullptr : hidden, w.between, w.queries, l.hidden, false},
             tokens);
    if (after) {
        normalize<T>(w.between, l.attention_after, nullptr, w.normed, tokens, l.hidden, l.attention_epsilon);
        add(hidden, w.normed, w.between, tokens * l.hidden);
    }
    if (l.mlp_norm) norm(l, w.between, w.normed, tokens, residual);
    for (int64_t first = 0; first < tokens; first += w.together) {
        const int64_t some = std::min(w.together, tokens - first), at = first * l.hidden;
        T *normed = w.normed + at, *between = w.between + at;
        multiply(l, w, {l.mlp_norm ? normed : between, l.up, l.up_bias, nullptr, w.up, l.hidden, w.wide, !l.gated}, some);
        if (l.gated) gate(w.up, w.gated, some, l.intermediate, l.gated == 2);
        multiply(l, w, {l.gated ? w.gated : w.up, l.down, l.down_bias, after ? nullptr : residual ? normed : between,
                  after ? normed : residual ? between : hidden + at, l.intermediate, l.hidden, false}, some);
    }
    if (residual) norm(l, w.between, hidden, tokens, false);
    if (!after) return;
    normalize<T>(w.normed, l.mlp_after, nullptr, w.normed, tokens, l.hidden, l.mlp_epsilon);
    add(w.between, w.normed, hidden, tokens * l.hidden);
}

// Runs one layer over the last `rows` rows of a decode step.
template <class T>
inline void step_layer(const Layer<T>& l, const Buffers<T>& b, const Workspace<T>& w, const Step<T>& all, int64_t rows) {
    const int64_t first = all.rows - rows, *places = all.places + first, *slots = all.slots + first;
    auto before = [&](int64_t row, int64_t head) {
        T* mine = w.qkv + row * w.states;
        T *key = mine + w.queries + head * l.size, *value = key + l.heads * l.size;
        if (l.rope) {
            const T* cosines = all.rotations + ((l.rope - 1) * 2 * all.rows + first + row) * all.rotary;
            const T* sines = cosines + all.rows * all.rotary;
            for (int64_t g = 0; g < l.group; g++)
                rotate_head(mine + (head * l.group + g) * l.size, cosines, sines, all.rotary);
            rotate_head(key, cosines, sines, all.rotary);
        }
        const int64_t to = places[row] * b.row + head * b.head + slots[row] * l.size;
        std::memcpy(b.keys + to, key, l.size * sizeof *key);
        std::memcpy(b.values + to, value, l.size * sizeof *value);
    };
    T* hidden = all.hidden + first * l.hidden;
    project(l, w, hidden, rows);
    attend(l, b, w, all, first, before);
    finish(l, w, hidden, rows);
}

// Writes each row's embedding to `s.hidden`, and its cosines and sines to `to_tables` [tables, 2, rows, rotary]. If a
// token or position is out of range, writes nothing and returns false.
template <class T>
bool embed(const Inputs<T>& e, int64_t size, const Step<T>& s, T* to_tables) {
    if (!inside(s.tokens, s.rows, e.embedded) || !inside(s.slots, s.rows, e.positions)) return false;
    for (int64_t row = 0; row < s.rows; row++) {
        const int64_t token = s.tokens[row], position = s.slots[row];
        T* to = s.hidden + row * size;
        std::memcpy(to, e.embeddings + token * size, size * sizeof(T));
        if (e.scale != 1)
            for (int64_t i = 0; i < size; i++) store(to + i, load(to[i]) * e.scale);
        if (e.learned) add(to, e.learned + position * size, to, size);
        for (int64_t table = 0; table < 2 * e.tables; table++)
            std::memcpy(to_tables + (table * s.rows + row) * e.rotary,
                        e.rotations + (table * e.positions + position) * e.rotary, e.rotary * sizeof(T));
    }
    return true;
}

// Runs each layer i over the last counts[i] rows. All layers have the same shape; some may have quantized weights. If a
// token, place or slot is out of range, does nothing and returns false.
template <class T>
bool run_step(const Layer<T>* layers, const Buffers<T>* buffers, const int64_t* counts, int64_t count, Step<T> s,
              const Inputs<T>& inputs) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = s.rows - counts[i];
        if (counts[i] && !(buffers[i].keys && inside(s.places + first, counts[i], buffers[i].places) &&
                           inside(s.slots + first, counts[i], buffers[i].held)))
            return false;
    }
    const int64_t width = 1 + *std::max_element(s.slots, s.slots + s.rows), threads = omp_get_max_threads();
    const int64_t scratch = step_scratch(layers->group, layers->size, width);
    const int64_t tables = rounded_up(2 * inputs.tables * s.rows * inputs.rotary * sizeof(T), 64);
    static thread_local Kept kept;
    char* memory = kept.at_least(tables + Workspace<T>(*layers, s.rows, scratch, threads, nullptr).bytes);
    const Workspace<T> w(*layers, s.rows, scratch, threads, memory + tables);
    if (!embed(inputs, layers->hidden, s, (T*)memory)) return false;
    s.rotary = inputs.rotary, s.rotations = (T*)memory;
#pragma omp parallel
    for (int64_t i = 0; i < count; i++)
        if (counts[i]) step_layer(layers[i], buffers[i], w, s, counts[i]);
    kept.trim();
    return true;
}

// Groups of prompts that run together. Group g has the prompts firsts[g] ... firsts[g + 1] - 1.
struct Groups {
    std::vector<int64_t> firsts;
    int64_t most = 0;     // maximum number of tokens in a group
    int64_t threads = 1;  // number of groups that run in parallel, in one thread each; 1: all threads share each group

    // A group has about TOKENS tokens or is one longer prompt, and each thread gets the same number of groups. If there
    // are too few tokens for that, or a prompt is too long, groups run one after the other, each in all threads.
    template <class T>
    explicit Groups(const Prompts<T>& p) {
        const int64_t all = p.starts[p.prompts], available = omp_get_max_threads();
        const int64_t rounds = std::max<int64_t>(1, (all / available + TOKENS / 2) / TOKENS), count = rounds * available;
        cut(p, count);
        if (all >= FEWEST * available && most * count <= all + all / 8)
            threads = available;
        else
            cut(p, std::max<int64_t>(1, (all + TOKENS / 2) / TOKENS));
    }

    // Cuts the prompts into at most `count` groups with about equally many tokens.
    template <class T>
    void cut(const Prompts<T>& p, int64_t count) {
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

// Writes the keys and values of prompts first ... last - 1 to the first slots of the prompts' rows.
template <class T>
void keep(const Layer<T>& l, const Prompts<T>& p, const Workspace<T>& w, int64_t first, int64_t last) {
#pragma omp for schedule(static)
    for (int64_t task = 0; task < p.rows * l.heads; task++) {
        const int64_t row = task / l.heads, head = task % l.heads, prompt = p.sources[row];
        if (prompt < first || prompt >= last) continue;
        const T* key = w.qkv + (p.starts[prompt] - p.starts[first]) * w.states + w.queries + head * l.size;
        const int64_t to = p.places[row] * p.buffer_row + head * p.buffer_head;
        for (int64_t slot = 0; slot < p.starts[prompt + 1] - p.starts[prompt]; slot++, key += w.states) {
            std::memcpy(p.keys + to + slot * l.size, key, l.size * sizeof(T));
            std::memcpy(p.values + to + slot * l.size, key + l.heads * l.size, l.size * sizeof(T));
        }
    }
}

// Runs a layer over prompts first ... last - 1. All threads of the calling parallel region share the work.
template <class T>
inline void run_group(const Layer<T>& l, const Prompts<T>& p, const Workspace<T>& w, int64_t first, int64_t last) {
    const int64_t start = p.starts[first], tokens = p.starts[last] - start;
    T* hidden = p.hidden + start * l.hidden;
    project(l, w, hidden, tokens);
    if (l.rope)
        rotate(w.qkv, p.cosines + start * p.rotary, p.sines + start * p.rotary, tokens, l.heads * (l.group + 1), l.size,
               p.rotary, w.states);
    if (p.keys) keep(l, p, w, first, last);
    attend_prompts(l, p, w, first, last);
    finish(l, w, hidden, tokens);
}

template <class T>
void run_prompts(const Layer<T>& l, const Prompts<T>& p) {
    const Groups groups(p);
    const int64_t count = groups.firsts.size() - 1, threads = groups.threads == 1 ? omp_get_max_threads() : 1;
    const int64_t scratch = PromptScratch<T>(longest_of(p, 0, p.prompts), p.prefix.tokens, l.size, nullptr).numbers;
    const int64_t bytes = Workspace<T>(l, groups.most, scratch, threads, nullptr).bytes;
    static thread_local Kept kept;
    char* memory = kept.at_least(groups.threads * bytes);
    if (groups.threads == 1) {
        const Workspace<T> w(l, groups.most, scratch, threads, memory);
#pragma omp parallel
        for (int64_t g = 0; g < count; g++) run_group(l, p, w, groups.firsts[g], groups.firsts[g + 1]);
    } else {
#pragma omp parallel
        {
            const Workspace<T> w(l, groups.most, scratch, threads, memory + omp_get_thread_num() * bytes);
#pragma omp for schedule(dynamic)
            for (int64_t g = 0; g < count; g++) {
#pragma omp parallel num_threads(1)
                run_group(l, p, w, groups.firsts[g], groups.firsts[g + 1]);
            }
        }
    }
    kept.trim();
}

// If `attended` is null, runs the part of a layer before attention: hidden -> rotated queries, keys and values in `qkv`
// [tokens, states]. Else runs the part after attention: `attended` [tokens, queries] and hidden -> hidden.
template <class T>
void run_half(const Layer<T>& l, T* hidden, const T* cosines, const T* sines, T* qkv, T* attended, int64_t tokens,
              int64_t rotary) {
    static thread_local Kept kept;
    Workspace<T> w(l, tokens, 0, 0, kept.at_least(Workspace<T>(l, tokens, 0, 0, nullptr).bytes));
#pragma omp parallel firstprivate(w)
    if (attended) {
        w.attended = attended;
        finish(l, w, hidden, tokens);
    } else {
        w.qkv = qkv;
        project(l, w, hidden, tokens);
        if (l.rope) rotate(qkv, cosines, sines, tokens, l.heads * (l.group + 1), l.size, rotary, w.states);
    }
    kept.trim();
}

}  // namespace
