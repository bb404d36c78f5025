// C interface of the CPU kernels. Arrays are row-major; strides count numbers, not bytes.
// A row's result depends only on that row, not on the batch or on the number of threads.

#include "layer.h"
#include "sampling.h"
#include "screen.h"

namespace {

enum Status : int64_t { DONE = 0, OUTSIDE = 1, NO_MEMORY = 2 };  // OUTSIDE: an index is out of range; see kernels.py

// Calls `run`, which returns false if an index is out of range. Catches exceptions, because C cannot handle them.
template <class Run>
int64_t status_of(Run run) {
    try {
        return run() ? DONE : OUTSIDE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

}  // namespace

#define KERNELS(T, NAME) \
    extern "C" int64_t step_##NAME(const Layer<T>* layers, const Buffers<T>* buffers, const int64_t* counts, \
                                   const Step<T>* step, const Inputs<T>* inputs, int64_t count) { \
        return status_of([=] { return run_step(layers, buffers, counts, count, *step, *inputs); }); \
    } \
    extern "C" int64_t prompts_##NAME(const Layer<T>* layer, const Prompts<T>* prompts) { \
        return status_of([=] { return run_prompts(*layer, *prompts), true; }); \
    } \
    extern "C" int64_t half_##NAME(const Layer<T>* layer, T* hidden, const T* cosines, const T* sines, T* qkv, T* attended, \
                                   int64_t tokens, int64_t rotary) { \
        return status_of([=] { return run_half(*layer, hidden, cosines, sines, qkv, attended, tokens, rotary), true; }); \
    } \
    extern "C" int64_t pack_prefix_##NAME(const T* k, const T* v, T* keys, T* values, int64_t tokens, int64_t heads, \
                                          int64_t size) { \
        pack_prefix(k, v, tokens, heads, size, keys, values); \
        return DONE; \
    } \
    extern "C" int64_t normalize_##NAME(const T* x, const float* weight, const float* bias, T* out, int64_t rows, int64_t size, \
                                        float epsilon) { \
        _Pragma("omp parallel if (rows * size > 16384)") normalize(x, weight, bias, out, rows, size, epsilon); \
        return DONE; \
    } \
    extern "C" int64_t multiply_##NAME(const T* x, const T* weight, const T* bias, const T* residual, T* out, int64_t rows, \
                                       int64_t inputs, int64_t outputs, int64_t relu) { \
        const Product<T> product{x, weight, bias, residual, out, inputs, outputs, relu != 0}; \
        _Pragma("omp parallel if (rows * inputs * outputs > 65536)") multiply(product, rows); \
        return DONE; \
    }

#define SAMPLING(T, NAME) \
    extern "C" int64_t sample_##NAME(const Sampling<T>* all) { return sample_rows(*all) ? DONE : NO_MEMORY; }

KERNELS(float, float32)
SAMPLING(float, float32)
SAMPLING(BFloat16, bfloat16)

extern "C" int64_t threads() { return omp_get_max_threads(); }

extern "C" int64_t can_multiply() { return CAN_MULTIPLY; }

extern "C" int64_t can_quantize() { return CAN_QUANTIZE; }

#if CAN_MULTIPLY
KERNELS(BFloat16, bfloat16)
#endif

#if CAN_QUANTIZE
extern "C" int64_t multiply_int8_bfloat16(const BFloat16* x, const BFloat16* weight, const BFloat16* bias,
                                          const BFloat16* residual, BFloat16* out, int64_t rows, int64_t inputs,
                                          int64_t outputs, int64_t relu) {
    return status_of([=] {
        Kept memory;
        const Codes codes = codes_in(memory.at_least(bytes_of_codes(rows, inputs)), rows, inputs);
        const QuantizedProduct product{{x, weight, bias, residual, out, inputs, outputs, relu != 0}, codes};
#pragma omp parallel if (rows * inputs * outputs > 65536)
        {
            quantize(x, rows, inputs, codes);
            multiply(product, rows);
        }
        return true;
    });
}

extern "C" int64_t likeliest_bfloat16(const Screen* screen, const BFloat16* hidden, int64_t* tokens, int64_t rows) {
    return status_of([=] {
        for (int64_t row = 0; row < rows; row += MOST_ROWS)
            likeliest(*screen, hidden + row * screen->inputs, tokens + row, std::min(MOST_ROWS, rows - row));
        return true;
    });
}
#endif
