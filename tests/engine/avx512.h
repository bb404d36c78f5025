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

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int64_t L __attribute__((vector_size(64)));
typedef double D __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

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
template <class V>
inline void put(void* to, V x) {
    std::memcpy(to, &x, sizeof x);
}
template <class V, class Of>
inline V each(int n, Of of) {
    V x;
    for (int i = 0; i < n; i++) x[i] = of(i);
    return x;
}
inline __m512i bits(I x) { return as<__m512i>(x); }
inline I ints(__m512i x) { return as<I>(x); }

// Moves blocks of 16 bytes, or numbers within them.
template <class V>
inline V unpack(V x, V y, int high) {
    constexpr int n = 16 / sizeof(x[0]);
    return each<V>(64 / sizeof(x[0]), [&](int i) { return (i % 2 ? y : x)[i / n * n + high * n / 2 + i % n / 2]; });
}
template <class V>
inline V shuffle(V x, V y, int how) {
    return each<V>(16, [&](int i) { return (i < 8 ? x : y)[(how >> i / 4 * 2 & 3) * 4 + i % 4]; });
}

inline __m512 set1(float x) { return each<F>(16, [=](int) { return x; }); }
inline __m512i set1(int32_t x) { return bits(each<I>(16, [=](int) { return x; })); }
inline __m512 fma(F x, F y, F z) { return each<F>(16, [&](int i) { return std::fma(x[i], y[i], z[i]); }); }
inline __m512 max(F x, F y) { return each<F>(16, [&](int i) { return x[i] > y[i] ? x[i] : y[i]; }); }
inline __m512 min(F x, F y) { return each<F>(16, [&](int i) { return x[i] < y[i] ? x[i] : y[i]; }); }
inline __m512 where(uint16_t mask, F x, F y) { return each<F>(16, [&](int i) { return mask >> i & 1 ? x[i] : y[i]; }); }
inline float highest(F x) {
    float most = x[0];
    for (int i = 1; i < 16; i++) most = std::fmax(most, x[i]);
    return most;
}
inline float sum(F x) {  // in the order of the compiler's own
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}
inline __m256bh narrow(F x) {  // to the nearest, ties to even; NaN stays NaN
    return as<__m256bh>(each<H>(16, [&](int i) {
        const uint32_t b = as<uint32_t>(float(x[i]));
        return uint16_t(x[i] == x[i] ? (b + 0x7fff + (b >> 16 & 1)) >> 16 : 0x7fc0);
    }));
}
inline __m512 dot(__m512 sums, __m512bh x, __m512bh y) {
    const U a = as<U>(x), b = as<U>(y), high = U() + 0xffff0000u;
    const F odd = fma((F)(a & high), (F)(b & high), sums);
    return fma((F)(a << 16), (F)(b << 16), odd);
}
inline __m256i load16(uint16_t mask, const void* from) {
    return as<__m256i>(each<H>(16, [&](int i) { return mask >> i & 1 ? get<uint16_t>((const uint16_t*)from + i) : 0; }));
}
inline void store16(void* to, uint16_t mask, H x) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) put<uint16_t>((uint16_t*)to + i, x[i]);
}
inline __m512i load32(uint16_t mask, const void* from) {
    return bits(each<I>(16, [&](int i) { return mask >> i & 1 ? get<int32_t>((const int32_t*)from + i) : 0; }));
}
inline __m128i saturated(U x) {
    uint8_t y[16];
    for (int i = 0; i < 16; i++) y[i] = x[i] > 255 ? 255 : x[i];
    return get<__m128i>(y);
}

}  // namespace emulated

namespace {

inline void add_quads(__m512i& sums, __m512i codes, __m512i weights) {
    emulated::I all = emulated::ints(sums);
    const uint8_t* x = (const uint8_t*)&codes;
    const int8_t* y = (const int8_t*)&weights;
    for (int i = 0; i < 64; i++) all[i / 4] += x[i] * y[i];
    sums = emulated::bits(all);
}
inline void load_sums(__m512i& sums, const int8_t* from) { sums = emulated::get<__m512i>(from); }

}  // namespace

#define E_ emulated::
#define _mm256_mask_storeu_epi16(to, mask, x) E_ store16(to, mask, E_ as<E_ H>(x))
#define _mm256_maskz_loadu_epi16 E_ load16
#define _mm512_abs_ps(x) ((__m512)(E_ as<E_ U>(x) & 0x7fffffffu))
#define _mm512_add_epi32(x, y) E_ bits(E_ ints(x) + E_ ints(y))
#define _mm512_add_ps(x, y) ((__m512)((E_ F)(x) + (E_ F)(y)))
#define _mm512_andnot_si512(x, y) ((__m512i)(~(E_ L)(x) & (E_ L)(y)))
#define _mm512_castpd_ps(x) E_ as<__m512>(x)
#define _mm512_castps_pd(x) E_ as<__m512d>(x)
#define _mm512_castps_si512(x) E_ as<__m512i>(x)
#define _mm512_castsi512_ps(x) E_ as<__m512>(x)
#define _mm512_cmp_ps_mask(x, y, how) E_ not_below(x, y)
#define _mm512_cvtepi32_epi16(x) E_ low16(E_ ints(x))
#define _mm512_cvtepi32_ps(x) ((__m512)__builtin_convertvector(E_ ints(x), E_ F))
#define _mm512_cvtepu16_epi32(x) E_ bits(E_ wide(E_ as<E_ H>(x)))
#define _mm512_cvtneps_pbh E_ narrow
#define _mm512_cvtps_epi32(x) E_ bits(E_ nearest_ints(x))
#define _mm512_cvtusepi32_epi8(x) E_ saturated(E_ as<E_ U>(x))
#define _mm512_div_ps(x, y) ((__m512)((E_ F)(x) / (E_ F)(y)))
#define _mm512_dpbf16_ps E_ dot
#define _mm512_fmadd_ps E_ fma
#define _mm512_fnmadd_ps(x, y, z) E_ fma(-(E_ F)(x), y, z)
#define _mm512_load_ps(from) E_ get<__m512>(from)
#define _mm512_loadu_ps(from) E_ get<__m512>(from)
#define _mm512_load_si512(from) E_ get<__m512i>(from)
#define _mm512_loadu_si512(from) E_ get<__m512i>(from)
#define _mm512_mask_add_ps(z, mask, x, y) E_ where(mask, _mm512_add_ps(x, y), z)
#define _mm512_mask_max_ps(z, mask, x, y) E_ where(mask, E_ max(x, y), z)
#define _mm512_mask_mov_ps(z, mask, x) E_ where(mask, x, z)
#define _mm512_maskz_loadu_epi32 E_ load32
#define _mm512_maskz_scalef_ps(mask, x, n) E_ where(mask, E_ scaled(x, n), E_ F())
#define _mm512_max_epi32(x, y) E_ bits(E_ ints(x) > E_ ints(y) ? E_ ints(x) : E_ ints(y))
#define _mm512_max_ps E_ max
#define _mm512_min_ps E_ min
#define _mm512_mul_ps(x, y) ((__m512)((E_ F)(x) * (E_ F)(y)))
#define _mm512_or_si512(x, y) ((__m512i)((E_ L)(x) | (E_ L)(y)))
#define _mm512_reduce_add_ps E_ sum
#define _mm512_reduce_max_epi32(x) E_ highest_int(E_ ints(x))
#define _mm512_reduce_max_ps E_ highest
#define _mm512_roundscale_ps(x, how) E_ nearest(x)
#define _mm512_set1_epi32(x) E_ set1(int32_t(x))
#define _mm512_set1_ps(x) E_ set1(float(x))
#define _mm512_setzero_ps() ((__m512)(E_ F()))
#define _mm512_setzero_si512() ((__m512i)(E_ L()))
#define _mm512_shuffle_f32x4(x, y, how) ((__m512)E_ shuffle((E_ F)(x), (E_ F)(y), how))
#define _mm512_shuffle_i32x4(x, y, how) E_ bits(E_ shuffle(E_ ints(x), E_ ints(y), how))
#define _mm512_slli_epi32(x, n) E_ bits(E_ ints(x) << (n))
#define _mm512_srai_epi32(x, n) E_ bits(E_ ints(x) >> (n))
#define _mm512_srli_epi32(x, n) E_ as<__m512i>(E_ as<E_ U>(x) >> (n))
#define _mm512_store_ps(to, x) E_ put<__m512>(to, x)
#define _mm512_storeu_ps(to, x) E_ put<__m512>(to, x)
#define _mm512_store_si512(to, x) E_ put<__m512i>(to, x)
#define _mm512_sub_ps(x, y) ((__m512)((E_ F)(x) - (E_ F)(y)))
#define _mm512_unpackhi_epi32(x, y) E_ bits(E_ unpack(E_ ints(x), E_ ints(y), 1))
#define _mm512_unpacklo_epi32(x, y) E_ bits(E_ unpack(E_ ints(x), E_ ints(y), 0))
#define _mm512_unpackhi_epi64(x, y) ((__m512i)E_ unpack((E_ L)(x), (E_ L)(y), 1))
#define _mm512_unpacklo_epi64(x, y) ((__m512i)E_ unpack((E_ L)(x), (E_ L)(y), 0))
#define _mm512_unpackhi_pd(x, y) ((__m512d)E_ unpack((E_ D)(x), (E_ D)(y), 1))
#define _mm512_unpacklo_pd(x, y) ((__m512d)E_ unpack((E_ D)(x), (E_ D)(y), 0))
#define _mm512_unpackhi_ps(x, y) ((__m512)E_ unpack((E_ F)(x), (E_ F)(y), 1))
#define _mm512_unpacklo_ps(x, y) ((__m512)E_ unpack((E_ F)(x), (E_ F)(y), 0))

namespace emulated {

inline uint16_t not_below(F x, F y) {
    uint16_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= !(x[i] < y[i]) << i;
    return mask;
}
inline __m256i low16(I x) { return as<__m256i>(each<H>(16, [&](int i) { return uint16_t(x[i]); })); }
inline I wide(H x) { return each<I>(16, [&](int i) { return x[i]; }); }
inline I nearest_ints(F x) { return each<I>(16, [&](int i) { return int32_t(std::nearbyint(x[i])); }); }
inline __m512 nearest(F x) { return each<F>(16, [&](int i) { return std::nearbyint(x[i]); }); }
inline F scaled(F x, F n) { return each<F>(16, [&](int i) { return std::ldexp(x[i], int(n[i])); }); }
inline int32_t highest_int(I x) {
    int32_t most = x[0];
    for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
    return most;
}

}  // namespace emulated
