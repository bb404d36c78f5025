// The CPU's kernels, callable by C. Arrays are row-major; strides count numbers, not bytes.
// A row's result depends on that row alone, not on the batch or the number of threads.

#include <omp.h>
#include <vector>

#include "attention.h"
#include "greedy.h"
#include "layer.h"
#include "products.h"
#include "prompt_attention.h"
#include "quantized.h"
#include "rows.h"
#include "sampling.h"
#include "screen.h"

#define KERNELS(T, NAME) \
    extern "C" void attend_##NAME(const T* q, const T* k, const T* v, const uint8_t* seen, T* out, int64_t rows, \
                                  int64_t heads, int64_t group, int64_t width, int64_t size, int64_t q_row, \
                                  int64_t k_row, int64_t k_head, int64_t k_slot, int64_t v_row, int64_t v_head, \
                                  int64_t v_slot, int64_t seen_row, float scale) { \
        const Attention<T> attention{q,     k,     v,      seen,   out,   rows,   heads,  group,    width, size, \
                                     q_row, k_row, k_head, k_slot, v_row, v_head, v_slot, seen_row, scale}; \
        _Pragma("omp parallel if (rows * heads * width * size > 4096)") attend(attention, [](int64_t, int64_t) {}); \
    } \
    extern "C" bool append_##NAME(const T* k, const T* v, T* keys, T* values, const int64_t* slots, int64_t rows, \
                                  int64_t heads, int64_t size, int64_t held, int64_t k_row, int64_t v_row, \
                                  int64_t row, int64_t head) { \
        if (!inside(slots, rows, held)) return false; \
        append(k, v, keys, values, slots, rows, heads, size, k_row, v_row, row, head); \
        return true; \
    } \
    extern "C" void rotate_##NAME(T* x, const T* cosines, const T* sines, int64_t rows, int64_t heads, int64_t size, \
                                  int64_t rotary, int64_t row) { \
        _Pragma("omp parallel if (rows * heads * size > 16384)") \
        rotate(x, cosines, sines, rows, heads, size, rotary, row); \
    } \
    extern "C" void normalize_##NAME(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size, \
                                     float epsilon) { \
        _Pragma("omp parallel if (rows * size > 16384)") normalize(x, weight, bias, out, rows, size, epsilon); \
    } \
    extern "C" void normalize_groups_##NAME(T* x, const T* weight, int64_t rows, int64_t groups, int64_t size, \
                                            int64_t row, float epsilon) { \
        _Pragma("omp parallel if (rows * groups * size > 16384)") \
        normalize_groups(x, weight, rows, groups, size, row, epsilon); \
    } \
    extern "C" void gate_##NAME(const T* x, T* out, int64_t rows, int64_t size) { \
        _Pragma("omp parallel if (rows * size > 8192)") gate(x, out, rows, size); \
    } \
    extern "C" void sample_##NAME(const T* logits, const int64_t* places, const SamplingParameters* parameters, \
                                  const int64_t* drawn, const int64_t* change_bounds, const int64_t* change_tokens, \
                                  const float* change_values, const uint32_t* masks, const int64_t* mask_rows, \
                                  int64_t* tokens, float* logprobs, float* choice_logprobs, int64_t* top_ids, \
                                  float* top_logprobs, int64_t rows, int64_t width, int64_t words, int64_t most, \
                                  int64_t wants_logprobs) { \
        const Sampling<T> all{logits,        places,  parameters, drawn,    change_bounds,   change_tokens, \
                              change_values, masks,   mask_rows,  tokens,   logprobs,        choice_logprobs, \
                              top_ids,       top_logprobs, rows,  width,    words,           most, wants_logprobs}; \
        _Pragma("omp parallel if (rows * width > 16384)") sample_rows(all); \
    }

KERNELS(BFloat16, bfloat16)
KERNELS(float, float32)

extern "C" int64_t threads() { return omp_get_max_threads(); }

extern "C" bool can_multiply() { return CAN_MULTIPLY; }

extern "C" bool can_quantize() { return CAN_QUANTIZE; }

#if CAN_MULTIPLY
extern "C" void multiply_bfloat16(const BFloat16* x, const BFloat16* weight, const BFloat16* bias,
                                  const BFloat16* residual, BFloat16* out, int64_t rows, int64_t inputs,
                                  int64_t outputs, int64_t relu) {
#pragma omp parallel if (rows * inputs * outputs > 65536)
    multiply({x, weight, bias, residual, out, inputs, outputs, relu != 0}, rows);
}

extern "C" void attend_prompts_bfloat16(const BFloat16* q, const BFloat16* k, const BFloat16* v, const int64_t* starts,
                                        BFloat16* out, const BFloat16* prefix_keys, const BFloat16* prefix_values,
                                        int64_t prefix, int64_t prompts, int64_t heads, int64_t group, int64_t size,
                                        int64_t q_token, int64_t k_token, int64_t v_token, float scale) {
    const PromptAttention attention{q,     k,    v,       starts,  out,     prompts, heads,
                                    group, size, q_token, k_token, v_token, scale,   {prefix_keys, prefix_values, prefix}};
#pragma omp parallel if (starts[prompts] * heads * group * size > 16384)
    attend_prompts(attention);
}

extern "C" void pack_prefix_bfloat16(const BFloat16* k, const BFloat16* v, BFloat16* keys, BFloat16* values,
                                     int64_t tokens, int64_t heads, int64_t size) {
    pack_prefix(k, v, tokens, heads, size, keys, values);
}

// Numbers of the workspace for a step of `rows` tokens, and for these prompts.
extern "C" int64_t step_workspace_bfloat16(const Layer* layer, int64_t rows) {
    return Workspace(*layer, rows, nullptr).numbers;
}

extern "C" int64_t prompts_workspace_bfloat16(const Layer* layer, const Prompts* prompts) {
    return numbers_for(*layer, Groups(*prompts));
}

extern "C" bool layers_step_bfloat16(const Layer* layers, const Buffers* buffers, const int64_t* counts,
                                     const Step* step, int64_t count) {
    return run_steps(layers, buffers, counts, count, *step);
}

extern "C" void layer_prompts_bfloat16(const Layer* layer, const Prompts* prompts) { run_prompts(*layer, *prompts); }
#endif

#if CAN_QUANTIZE
extern "C" void multiply_int8_bfloat16(const BFloat16* x, const char* weight, const BFloat16* bias,
                                       const BFloat16* residual, BFloat16* out, int64_t rows, int64_t inputs,
                                       int64_t outputs, int64_t relu) {
    std::vector<BFloat16> memory(numbers_of_codes(rows, inputs));
    const Codes codes = codes_in(memory.data(), rows, inputs);
#pragma omp parallel if (rows * inputs * outputs > 65536)
    {
        quantize(x, rows, inputs, codes);
        multiply({codes, weight, bias, residual, out, inputs, outputs, relu != 0}, rows);
    }
}

extern "C" void likeliest_bfloat16(const BFloat16* x, const BFloat16* weight, const char* packed, const float* norms,
                                   int64_t* tokens, int64_t* candidates, int64_t rows, int64_t inputs, int64_t outputs,
                                   int64_t most) {
    for (int64_t row = 0; row < rows; row += MOST_ROWS)
        likeliest({x + row * inputs, weight, packed, norms, tokens + row, candidates + row,
                   std::min(MOST_ROWS, rows - row), inputs, outputs, most});
}

extern "C" bool greedy_steps_bfloat16(const Layer* layers, const Buffers* buffers, const int64_t* counts, const Step* step,
                                      const Ends* ends, BFloat16* normed, int64_t* tokens, int64_t* candidates,
                                      int64_t count, int64_t number) {
    return run_greedy(layers, buffers, counts, count, *step, *ends, normed, tokens, candidates, number);
}
#endif
