// Finds the token with the highest logit without computing all logits in bfloat16. An 8-bit product gives bounds for
// all logits. Only logits that may be the highest are computed in bfloat16, with the same bits as in products.h.
//
// Let x' and w' be x and w rounded to 8 bits. Then x w = x' w' + (x - x') w + x' (w - w'), and by the Cauchy-Schwarz
// inequality |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'|. A bound for the rounding of the float32 sums is added.

#pragma once

#include "layer.h"

#if CAN_QUANTIZE

namespace {

// Layout: `_Screen` in executor.py.
struct Screen {
    const float *norm, *norm_bias;     // norm before the head; null bias: RMSNorm
    const BFloat16* weight;            // [outputs, inputs], the head's weight, not packed
    const char* packed;                // the head's weight, packed in int8
    const float* norms;                // [panels, 2, 48]: upper bounds of |w| and |w - w'|; 0 after the last output
    int64_t inputs, outputs, most;     // a row with more than `most` candidate tokens is undecided
    float epsilon;
};

// Error bound of a row: each logit is off by at most `outer` |w| + `inner` |w - w'|.
struct Error {
    float outer, inner;
};

inline Error error_of(const BFloat16* x, const Codes& codes, int64_t row, int64_t inputs) {
    const int64_t groups = groups_of(inputs);
    double own = 0, lost = 0, left = 0;
    for (int64_t i = 0; i < inputs; i++) {
        const double value = load(x[i]);
        const double rounded = (int(codes.codes[row * groups * GROUP + i]) - 128) *
                               double(codes.scales[row * groups + i / GROUP]);
        own += value * value, lost += (value - rounded) * (value - rounded), left += rounded * rounded;
    }
    // a sum of n float32 products is off by at most n 2^-24 times the sum of their magnitudes, which is at most |x| |w|
    const double sums = double(2 * inputs + 4 * groups + 16) / (1 << 24) * std::sqrt(std::max(own, left));
    return {float((std::sqrt(lost) + sums) * 1.0001), float((std::sqrt(left) + sums) * 1.0001)};
}

// Rounds each number up to bfloat16.
inline Halves rounded_up(Floats x) {
    const Bits bits = (Bits)x;
    return __builtin_convertvector((bits >> 31 ? bits : bits + 0xffff) >> 16, Halves);
}

inline uint16_t rounded_up(float x) { return rounded_up(Floats() + x)[0]; }

inline float as_number(uint16_t bits) { return load(BFloat16{bits}); }

// Bounds of the logits of up to MOST_ROWS rows. If `memory` is null, computes only the total size.
struct Bounds {
    BFloat16* x;         // [rows, inputs], hidden states after the norm
    Codes codes;
    Error* errors;       // [rows]
    uint16_t* upper;     // [panels, rows, PANEL], upper bounds of logits, rounded up to bfloat16
    float* panel_upper;  // [panels, rows], highest upper bound in a panel
    float* best;         // [threads, rows], lower bound of each thread's highest logit; finally best[0]: of all
    int32_t* found;      // [threads, most + PANEL], candidate tokens
    int64_t rows, bytes;

    Bounds(const Screen& s, int64_t rows, int64_t threads, char* memory) : rows(rows) {
        const int64_t panels = (s.outputs + PANEL - 1) / PANEL;
        char* at = memory;
        auto take = [&](auto*& part, int64_t count) {
            part = (std::decay_t<decltype(part)>)at;
            at += rounded_up(count * sizeof *part, 64);
        };
        take(x, rows * s.inputs), take(errors, rows), take(upper, panels * rows * PANEL);
        take(panel_upper, panels * rows), take(best, threads * rows), take(found, threads * (s.most + PANEL));
        codes = codes_in(at, rows, s.inputs);
        bytes = at + bytes_of_codes(rows, s.inputs) - memory;
    }
};

// Computes the bounds of all rows in one panel. best: [rows], the calling thread's part of `b.best`.
inline void bound_panel(const Screen& s, const Bounds& b, int64_t panel, float* best) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    const char* packed = s.packed + panel * panel_bytes(s.inputs);
    sum_quantized_panel(b.codes, 0, b.rows, s.inputs, packed, sums);
    const float* norms = s.norms + panel * 2 * PANEL;
    const Floats none = Floats() - INFINITY;
    const Places lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t row = 0; row < b.rows; row++) {
        const int64_t at = panel * b.rows + row;
        Floats high = none, low = none;
        for (int64_t n = 0; n < PANEL; n += LANES) {
            const int32_t left = int32_t(std::clamp<int64_t>(s.outputs - panel * PANEL - n, 0, LANES));
            const Floats value = load_vector(sums + row * PANEL + n, LANES) * load_vector((const float*)packed + n, LANES);
            const Floats length = load_vector(norms + n, LANES), lost = load_vector(norms + PANEL + n, LANES);
            const Floats error = b.errors[row].outer * length + b.errors[row].inner * lost;
            const Floats above = lanes < left ? value + error : none, below = lanes < left ? value - error : none;
            high = above > high ? above : high;
            low = below > low ? below : low;
            const Halves upper = rounded_up(above);
            std::memcpy(b.upper + at * PANEL + n, &upper, sizeof upper);
        }
        b.panel_upper[at] = as_number(rounded_up(highest_of(high)));
        best[row] = std::max(best[row], highest_of(low));
    }
}

// Runs one of the four steps (D = 8, 4, 2, 1) that transpose 16 vectors of 16 numbers in place.
template <int D>
inline void transpose(Floats* x) {
    const Places j = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Places low = j & D ? j + 16 - D : j, high = j & D ? j + 16 : j + D;
    for (int i = 0; i < 16; i++)
        if (!(i & D)) {
            const Floats first = permuted(x[i], x[i + D], low);
            x[i + D] = permuted(x[i], x[i + D], high), x[i] = first;
        }
}

// Computes the bfloat16 logits of up to 16 tokens. Each lane sums the pairs of one token, in the order of products.h.
inline void exact_logits(const Screen& s, const BFloat16* x, const int32_t* tokens, int64_t count, float* logits) {
    const int64_t pairs = s.inputs / 2;
    Floats sum = {};
    for (int64_t k = 0; k < pairs; k += LANES) {
        const int64_t some = std::min(LANES, pairs - k);
        Floats weights[LANES];
        for (int64_t i = 0; i < LANES; i++)  // lanes from `count` on repeat the last token
            weights[i] = load_vector((const float*)(s.weight + tokens[std::min(i, count - 1)] * s.inputs + 2 * k), some);
        transpose<8>(weights), transpose<4>(weights), transpose<2>(weights), transpose<1>(weights);
        for (int64_t i = 0; i < some; i++) sum = add_product(sum, (__m512bh)weights[i], repeated(x + 2 * (k + i)));
    }
    BFloat16 rounded[LANES];
    store_vector(rounded, sum, LANES);
    for (int64_t i = 0; i < count; i++) logits[i] = load(rounded[i]);
}

// Finds a row's likeliest token (of equal ones, the lowest id), or -1 if undecided. Candidates are the tokens whose
// upper bound (rounded up) is at least the best lower bound (rounded down). Tokens with the highest logit always are.
inline void choose(const Screen& s, const Bounds& b, int64_t row, int32_t* found, int64_t* token) {
    const int64_t panels = (s.outputs + PANEL - 1) / PANEL;
    const float least = -as_number(rounded_up(-b.best[row]));
    int64_t count = 0;
    *token = -1;
    if (!(least > -INFINITY)) return;
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t at = panel * b.rows + row;
        if (b.panel_upper[at] < least) continue;
        for (int64_t i = 0; i < PANEL; i++)
            if (as_number(b.upper[at * PANEL + i]) >= least) found[count++] = int32_t(panel * PANEL + i);
        if (count > s.most) return;
    }
    float highest = -INFINITY, logits[LANES];
    bool wrong = false;
    for (int64_t at = 0; at < count; at += LANES) {
        const int64_t some = std::min(LANES, count - at);
        exact_logits(s, b.x + row * s.inputs, found + at, some, logits);
        for (int64_t i = 0; i < some; i++) {
            wrong |= !(std::fabs(logits[i]) < INFINITY);
            if (logits[i] > highest) highest = logits[i], *token = found[at + i];
        }
    }
    if (wrong) *token = -1;
}

// Writes the likeliest token (see `choose`) of each hidden state [rows, inputs] before the norm. rows <= MOST_ROWS.
void likeliest(const Screen& s, const BFloat16* hidden, int64_t* tokens, int64_t rows) {
    const int64_t panels = (s.outputs + PANEL - 1) / PANEL, threads = omp_get_max_threads();
    static thread_local Kept kept;  // else the system would clear megabytes page by page at each call
    const Bounds b(s, rows, threads, kept.at_least(Bounds(s, rows, threads, nullptr).bytes));
    std::fill(b.best, b.best + threads * rows, -INFINITY);
#pragma omp parallel
    {
        normalize(hidden, s.norm, s.norm_bias, b.x, rows, s.inputs, s.epsilon);
        quantize(b.x, rows, s.inputs, b.codes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) b.errors[row] = error_of(b.x + row * s.inputs, b.codes, row, s.inputs);
        float* best = b.best + omp_get_thread_num() * rows;
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) bound_panel(s, b, panel, best);
#pragma omp single
        for (int64_t i = rows; i < threads * rows; i++) b.best[i % rows] = std::max(b.best[i % rows], b.best[i]);
        int32_t* found = b.found + omp_get_thread_num() * (s.most + PANEL);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < rows; row++) choose(s, b, row, found, tokens + row);
    }
}

}  // namespace

#endif
