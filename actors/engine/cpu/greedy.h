// Steps of greedy rows without a call between them: embeddings, layers, the last norm and the screened head. The tokens
// are those that the separate calls have.

#pragma once

#include <vector>

#include "layer.h"
#include "screen.h"

#if CAN_QUANTIZE

namespace {

// What lies before the first layer and behind the last, as greedy.py lays it out.
struct Ends {
    Numbers embeddings, learned;  // [embedded, hidden]; [positions, hidden], added by position, or null
    Numbers cosines, sines;       // [positions, rotary], or null
    Numbers norm, norm_bias;      // no bias: RMSNorm
    Numbers head;                 // [outputs, hidden], see `Screen`
    const char* packed;
    const float* norms;
    int64_t embedded, positions, rotary, outputs, most;
    float epsilon;
};

// Tokens `number` times, each the likeliest one behind the last. tokens: [number + 1, rows], of which the first `rows`
// are given; -1: not decided, see `Screen`; a step behind such a token takes 0. `all` has no hidden states and no cosines;
// its slots and width are the first step's, and slots are positions, of which those behind the last known are taken for
// it. normed: [rows, hidden], of the last step behind the norm. candidates: [rows], as in `Screen`, the last step's.
// Returns whether all tokens, places and slots exist; if not, steps from there on are not done.
bool run_greedy(const Layer* layers, const Buffers* buffers, const int64_t* counts, int64_t count, const Step& all,
                const Ends& e, BFloat16* normed, int64_t* tokens, int64_t* candidates, int64_t number) {
    const int64_t rows = all.rows, hidden = layers[0].hidden;
    static thread_local std::vector<BFloat16> memory;  // kept from call to call
    static thread_local std::vector<int64_t> slots;
    memory.resize(rows * (hidden + 2 * e.rotary));
    slots.assign(all.slots, all.slots + rows);
    Step s = all;
    BFloat16 *cosines = memory.data() + rows * hidden, *sines = cosines + rows * e.rotary;
    s.hidden = memory.data(), s.slots = slots.data(), s.rotary = e.rotary;
    s.cosines = e.rotary ? cosines : nullptr, s.sines = e.rotary ? sines : nullptr;
    for (int64_t step = 0; step < number; step++, tokens += rows, s.width++) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t token = step ? std::max<int64_t>(tokens[row], 0) : tokens[row];
            if (token < 0 || token >= e.embedded || slots[row] < 0) return false;
            const int64_t position = std::min(slots[row], e.positions - 1);
            std::memcpy(s.hidden + row * hidden, e.embeddings + token * hidden, hidden * sizeof(BFloat16));
            if (e.learned) add(s.hidden + row * hidden, e.learned + position * hidden, s.hidden + row * hidden, hidden);
            std::memcpy(cosines + row * e.rotary, e.cosines + position * e.rotary, e.rotary * sizeof(BFloat16));
            std::memcpy(sines + row * e.rotary, e.sines + position * e.rotary, e.rotary * sizeof(BFloat16));
        }
        if (!run_steps(layers, buffers, counts, count, s)) return false;
#pragma omp parallel if (rows * hidden > 16384)
        normalize(s.hidden, e.norm, e.norm_bias, normed, rows, hidden, e.epsilon);
        for (int64_t row = 0; row < rows; row += MOST_ROWS)
            likeliest({normed + row * hidden, e.head, e.packed, e.norms, tokens + rows + row, candidates + row,
                       std::min(MOST_ROWS, rows - row), hidden, e.outputs, e.most});
        for (int64_t& slot : slots) slot++;
    }
    return true;
}

}  // namespace

#endif
