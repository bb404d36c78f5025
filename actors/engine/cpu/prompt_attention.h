// Causal attention of whole prompts in bfloat16, by the tiles of products: a head's keys and values are packed once and
// multiplied with blocks of its queries, up to the last key that a block attends to. Scores and sums are float32.

#pragma once

#include <vector>

#include "products.h"

#if CAN_MULTIPLY

namespace {

// Keys and values of the tokens that precede all prompts, packed head by head.
struct Prefix {
    const BFloat16 *keys, *values;  // [heads, size, width], [heads, size rounded up, width]: see pack_prefix
    int64_t tokens;
};

// Prompts lie one behind another: prompt p is tokens starts[p] - starts[0] ... starts[p + 1] - starts[0] - 1.
struct PromptAttention {
    const BFloat16 *query, *keys, *values;  // [tokens, heads, group, size], [tokens, heads, size] each
    const int64_t* starts;                  // [prompts + 1]
    BFloat16* out;                          // [tokens, heads, group, size], without strides
    int64_t prompts, heads, group, size;
    int64_t query_token, key_token, value_token;
    float scale;
    Prefix prefix;
};

constexpr int64_t QUERIES = 32;  // in a block

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys [tokens, size] -> [tokens / 48 rounded up, size / 2, 48, 2]; slots behind the last token stay unchanged.
inline void pack_keys(const BFloat16* keys, int64_t key_token, int64_t tokens, int64_t size, BFloat16* packed) {
    for (int64_t token = 0; token < tokens; token++) {
        BFloat16* to = packed + (token / PANEL * size / 2 * PANEL + token % PANEL) * 2;
        for (int64_t d = 0; d < size; d += 2) std::memcpy(to + d * PANEL, keys + token * key_token + d, 4);
    }
}

// Values [tokens, size] -> [size / 48 rounded up, even / 2, 48, 2], `even` tokens, with zeros behind the last one.
inline void pack_values(const BFloat16* values, int64_t value_token, int64_t tokens, int64_t size, int64_t even,
                        BFloat16* packed) {
    for (int64_t token = 0; token < even; token += 2)
        for (int64_t d = 0; d < size; d += LANES) {
            const BFloat16* from = values + token * value_token + d;
            const __mmask16 all = first_lanes(size - d), some = token < tokens ? all : 0;
            const __mmask16 other = token + 1 < tokens ? all : 0;
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(other, from + value_token));
            BFloat16* to = packed + ((d / PANEL * even / 2 + token / 2) * PANEL + d % PANEL) * 2;
            _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

// Keys and values [heads, tokens, size], without strides, of a shared prefix; `packed` holds zeros.
inline void pack_prefix(const BFloat16* keys, const BFloat16* values, int64_t tokens, int64_t heads, int64_t size,
                        BFloat16* packed_keys, BFloat16* packed_values) {
    const int64_t width = rounded_up(tokens, PANEL), wide = rounded_up(size, PANEL);
    for (int64_t head = 0; head < heads; head++) {
        pack_keys(keys + head * tokens * size, size, tokens, size, packed_keys + head * width * size);
        pack_values(values + head * tokens * size, size, tokens, size, width, packed_values + head * width * wide);
    }
}

// exp(scale (score - highest)) of the first `seen` scores as bfloat16, 0 up to `width`; returns their sum. Both arrays
// are padded to whole vectors.
inline float weights_of(float* scores, BFloat16* out, int64_t seen, int64_t width, float scale) {
    const int64_t whole = rounded_up(seen, LANES);
    if (whole > seen) {
        float* last = scores + whole - LANES;
        _mm512_store_ps(last, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first_lanes(seen - (whole - LANES)), _mm512_load_ps(last)));
    }
    const float total = exponentials(scores, whole / LANES, scale);
    for (int64_t k = 0; k < width; k += LANES) {
        const __m512 y = k < whole ? _mm512_load_ps(scores + k) : _mm512_setzero_ps();
        _mm256_storeu_si256((__m256i*)(out + k), (__m256i)_mm512_cvtneps_pbh(y));
    }
    return total;
}

// All prompts, divided among the threads of the calling parallel region.
inline void attend_prompts(const PromptAttention& a) {
    int64_t longest = 0;
    for (int64_t p = 0; p < a.prompts; p++) longest = std::max(longest, a.starts[p + 1] - a.starts[p]);
    const int64_t own = rounded_up(longest, PANEL), size = rounded_up(a.size, PANEL);
    const int64_t before = rounded_up(a.prefix.tokens, PANEL), width = before + own;  // of scores
    const int64_t out_token = a.heads * a.group * a.size;
    static thread_local std::vector<BFloat16> workspace;
    static thread_local std::vector<float> float_workspace;
    workspace.resize(std::max<size_t>(workspace.size(), own * (a.size + size) + width * QUERIES + 64));
    float_workspace.resize(std::max<size_t>(float_workspace.size(), QUERIES * (width + 2 * size + 1) + 32));
    auto aligned = [](auto* x) { return (decltype(x))(((uintptr_t)x + 63) / 64 * 64); };
    BFloat16* keys = aligned(workspace.data());
    BFloat16* values = keys + own * a.size;
    BFloat16* weights = values + own * size;
    float* scores = aligned(float_workspace.data());
    float* sums = scores + QUERIES * width;
    float* sums_before = sums + QUERIES * size;
    float* totals = sums_before + QUERIES * size;
    // with fewer heads than threads, the blocks of a head's queries are divided among several tasks
    const int64_t heads = a.prompts * a.heads, parts = (omp_get_num_threads() + heads - 1) / heads;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < heads * parts; task++) {
        const int64_t* mine = a.starts + task / parts / a.heads;
        const int64_t start = mine[0] - a.starts[0], tokens = mine[1] - mine[0];
        const int64_t head = task / parts % a.heads, even = rounded_up(tokens, 2);
        const int64_t begin_at = task % parts * QUERIES;
        if (begin_at >= tokens) continue;
        pack_keys(a.keys + start * a.key_token + head * a.size, a.key_token, tokens, a.size, keys);
        pack_values(a.values + start * a.value_token + head * a.size, a.value_token, tokens, a.size, even, values);
        const BFloat16 *keys_before = a.prefix.keys + head * before * a.size;
        const BFloat16 *values_before = a.prefix.values + head * before * size;
        for (int64_t g = 0; g < a.group; g++) {
            const BFloat16* query = a.query + start * a.query_token + (head * a.group + g) * a.size;
            BFloat16* out = a.out + start * out_token + (head * a.group + g) * a.size;
            for (int64_t begin = begin_at; begin < tokens; begin += parts * QUERIES) {
                const int64_t end = std::min(begin + QUERIES, tokens), held = end - begin;
                auto score = [&](const BFloat16* panel, int64_t at) {
                    const Keep kept{scores + at, width};
                    sum_panel(query + begin * a.query_token, a.query_token, panel, a.size, held, kept, kept);
                };
                auto mean = [&](const BFloat16* by, const BFloat16* panel, int64_t keys, float* to) {
                    sum_panel(by, width, panel, keys, held, Keep{to, size}, Keep{to, size});
                };
                for (int64_t key = 0; key < before; key += PANEL) score(keys_before + key * a.size, key);
                for (int64_t key = 0; key < end; key += PANEL) score(keys + key * a.size, before + key);
                for (int64_t m = 0; m < held; m++) {
                    if (before) std::fill(scores + m * width + a.prefix.tokens, scores + m * width + before, -INFINITY);
                    totals[m] = weights_of(scores + m * width, weights + m * width, before + begin + m + 1,
                                            before + rounded_up(end, 2), a.scale);
                }
                for (int64_t d = 0; d < a.size; d += PANEL) {
                    mean(weights + before, values + d * even, rounded_up(end, 2), sums + d);
                    if (before) mean(weights, values_before + d * before, before, sums_before + d);
                }
                for (int64_t m = 0; m < held; m++)
                    for (int64_t d = 0; d < a.size; d += LANES) {
                        __m512 sum = _mm512_load_ps(sums + m * size + d);
                        if (before) sum = _mm512_add_ps(sum, _mm512_load_ps(sums_before + m * size + d));
                        const __m256i quotient = (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(sum, _mm512_set1_ps(totals[m])));
                        _mm256_mask_storeu_epi16(out + (begin + m) * out_token + d, first_lanes(a.size - d), quotient);
                    }
            }
        }
    }
}

}  // namespace

#endif
