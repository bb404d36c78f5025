// The instructions of AVX-512 that the kernels use, emulated by the compiler's vectors: included before the kernels, it
// lets their bfloat16 and int8 code be tested on any x86-64 processor, slowly.

#pragma once

#pragma GCC optimize("O1")  // emulated vectors take minutes to compile with more
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define EMULATED 1
#undef __AVX512F__
#undef __AVX512BF16__
#undef __AVX512BW__
#undef __AVX512VL__
#undef __AVX512VNNI__
#undef __AMX_BF16__
#define __AVX512F__ 1
#define __AVX512BF16__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1

namespace emulated {

template <class To, class From>
inline To as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
template <class V>
inline V get(const void* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline __m512i set1(int32_t number) {
    int32_t all[16];
    for (int32_t& one : all) one = number;
    return get<__m512i>(all);
}
inline __m512 dot(__m512 sums, __m512bh x, __m512bh y) {
    typedef float F __attribute__((vector_size(64)));
    typedef uint32_t U __attribute__((vector_size(64)));
    const U a = as<U>(x), b = as<U>(y), high = U() + 0xffff0000u;
    const F low[] = {(F)(a << 16), (F)(b << 16)}, odd[] = {(F)(a & high), (F)(b & high)};
    F all = as<F>(sums);
    for (int i = 0; i < 16; i++) all[i] = std::fma(low[0][i], low[1][i], std::fma(odd[0][i], odd[1][i], all[i]));
    return as<__m512>(all);
}

}  // namespace emulated

namespace {

inline void add_quads(__m512i& sums, __m512i codes, __m512i weights) {
    const uint8_t* x = (const uint8_t*)&codes;
    const int8_t* y = (const int8_t*)&weights;
    int32_t all[16];
    std::memcpy(all, &sums, sizeof all);
    for (int i = 0; i < 64; i++) all[i / 4] += x[i] * y[i];
    sums = emulated::get<__m512i>(all);
}
inline void load_sums(__m512i& sums, const int8_t* from) { sums = emulated::get<__m512i>(from); }

}  // namespace

#define _mm512_dpbf16_ps emulated::dot
#define _mm512_load_si512(from) emulated::get<__m512i>(from)
#define _mm512_loadu_si512(from) emulated::get<__m512i>(from)
#define _mm512_set1_epi32(x) emulated::set1(int32_t(x))
