// A whole decoder layer over one new token a row, in one parallel region: what its parts compute, without the calls.

#pragma once

#include <vector>

#include "attention.h"
#include "products.h"
#include "rows.h"

#if CAN_MULTIPLY

namespace {

typedef const BFloat16* Numbers;

// As kernels.py lays it out. Weights are packed for products; queries, keys and values are one, and so are gate and up.
struct Layer {
    Numbers attention_norm, attention_norm_bias, mlp_norm, mlp_norm_bias;  // no bias: RMSNorm
    Numbers qkv, qkv_bias, output, output_bias, up, up_bias, down, down_bias;
    int64_t hidden, heads, group, size, intermediate;
    int64_t gated;       // silu(gate) * up; else relu(up)
    int64_t norm_first;  // else behind the residual
    float attention_epsilon, mlp_epsilon, scale;
};

// What the rows bring.
struct Step {
    Numbers hidden;          // [rows, hidden]
    BFloat16* out;           // [rows, hidden]
    Numbers cosines, sines;  // [rows, size], or null
    BFloat16 *keys, *values; // [rows, heads, held, size] each, of one layout
    const int64_t* slots;    // [rows], of the new token
    const uint8_t* seen;     // [rows, width - first], of slots first ... width - 1, or null
    int64_t rows, held, buffer_row, buffer_head, first, width, seen_row;
};

void run_layer(const Layer& l, const Step& s) {
    const int64_t queries = l.heads * l.group * l.size, states = queries + 2 * l.heads * l.size;
    const int64_t wide = l.gated ? 2 * l.intermediate : l.intermediate;
    // kept from call to call; numbers that are not set lie in it
    static thread_local std::vector<BFloat16> room;
    const int64_t row_room = 2 * l.hidden + states + queries + wide + l.intermediate;
    if (int64_t(room.size()) < s.rows * row_room) room.resize(s.rows * row_room);
    BFloat16* normed = room.data();
    BFloat16* between = normed + s.rows * l.hidden;
    BFloat16* qkv = between + s.rows * l.hidden;
    BFloat16* attended = qkv + s.rows * states;
    BFloat16* up = attended + s.rows * queries;
    BFloat16* gated = up + s.rows * wide;
    auto before = [&](int64_t row, int64_t head) {
        BFloat16 *mine = qkv + row * states, *key = mine + queries + head * l.size, *value = key + l.heads * l.size;
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
        qkv, s.keys + s.first * l.size, s.values + s.first * l.size, s.seen, attended, s.rows, l.heads, l.group,
        s.width - s.first, l.size, states, s.buffer_row, s.buffer_head, l.size, s.buffer_row, s.buffer_head, l.size, s.seen_row,
        l.scale};
#pragma omp parallel
    {
        auto norm = [&](Numbers from, BFloat16* to, bool of_attention) {
            if (of_attention)
                normalize(from, l.attention_norm, l.attention_norm_bias, to, s.rows, l.hidden, l.attention_epsilon);
            else
                normalize(from, l.mlp_norm, l.mlp_norm_bias, to, s.rows, l.hidden, l.mlp_epsilon);
        };
        Numbers x = s.hidden;
        if (l.norm_first) norm(s.hidden, normed, true), x = normed;
        multiply({x, l.qkv, l.qkv_bias, nullptr, qkv, l.hidden, states, false}, s.rows);
        attend(attention, before);
        multiply({attended, l.output, l.output_bias, s.hidden, between, queries, l.hidden, false}, s.rows);
        norm(between, normed, !l.norm_first);
        multiply({normed, l.up, l.up_bias, nullptr, up, l.hidden, wide, !l.gated}, s.rows);
        if (l.gated) gate(up, gated, s.rows, l.intermediate);
        // a norm behind the attention is what the residual is
        multiply({l.gated ? gated : up, l.down, l.down_bias, l.norm_first ? between : normed,
                  l.norm_first ? s.out : between, l.intermediate, l.hidden, false}, s.rows);
        if (!l.norm_first) norm(between, s.out, false);
    }
}

}  // namespace

#endif
