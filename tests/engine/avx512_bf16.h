// The two instructions of AVX512-BF16 that the kernels use, emulated by AVX-512: included before the kernels, it lets
// their bfloat16 products be tested on processors that lack them.

#pragma once

#include <immintrin.h>

#ifndef __AVX512BF16__
#define __AVX512BF16__ 1

static inline __m512 emulated_dpbf16(__m512 sum, __m512bh x, __m512bh y) {
    const __m512i high = _mm512_set1_epi32(0xffff0000), a = (__m512i)x, b = (__m512i)y;
    sum = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high), (__m512)_mm512_and_si512(b, high), sum);
    return _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), sum);
}

// to the nearest, ties to even; NaN stays NaN
static inline __m256bh emulated_cvtneps(__m512 x) {
    const __m512i bits = (__m512i)x;
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), even));
    rounded = _mm512_srli_epi32(rounded, 16);
    rounded = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), 0x7fc0);
    return (__m256bh)_mm512_cvtepi32_epi16(rounded);
}

#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtneps_pbh emulated_cvtneps
#endif
