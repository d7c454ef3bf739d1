// Integer products for quantised weights with AVX2. Included inside isa_avx2.cpp, after simd_avx2.h.

constexpr bool kWeightsUnsigned = false;  // dot_int8 takes 128 off the stored bytes itself

struct Ints {
    __m256i lo, hi;
};
struct Bytes {
    __m256i lo, hi;
};

inline Ints splat_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline Bytes low_nibbles(Bytes w) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
inline Bytes high_nibbles(Bytes w) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4), mask)};
}
inline Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// Pairs of products are added in 16 bits: they must stay below 2^15 (bytes of `w` up to 127 do).
inline __m256i dot_half(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline Ints dot_unsigned(Ints sum, Bytes w, int32_t x) {
    const __m256i wide = _mm256_set1_epi32(x);
    return {dot_half(sum.lo, w.lo, wide), dot_half(sum.hi, w.hi, wide)};
}
inline __m256i dot_signed_half(__m256i sum, __m256i w, __m256i x) {  // w x = |w| (sign of w times x)
    const __m256i weights = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
    return dot_half(sum, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
}
inline Ints dot_int8(Ints sum, Bytes w, int32_t x) {
    const __m256i wide = _mm256_set1_epi32(x);
    return {dot_signed_half(sum.lo, w.lo, wide), dot_signed_half(sum.hi, w.hi, wide)};
}

inline void store_int8(int8_t* p, Vec a) {
    const __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
}
inline __m256 widen_half(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_scales(const uint16_t* p) { return {widen_half(p), widen_half(p + 8)}; }
