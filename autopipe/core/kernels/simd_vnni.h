// Integer products for quantised weights with AVX-512 VNNI. Included inside isa_avx512vnni.cpp, after simd_avx512.h.

constexpr bool kWeightsUnsigned = true;  // dot_int8 takes the stored bytes, weight + 128, as they are

struct Ints {
    __m512i v;
};
struct Bytes {
    __m512i v;
};

inline Ints splat_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(0x0f))}; }
inline Bytes high_nibbles(Bytes w) {
    return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(0x0f))};
}
inline Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }

// Lane i: sum + the products of the lane's four bytes with the four signed bytes of x.
inline Ints dot_unsigned(Ints sum, Bytes w, int32_t x) {
    return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
}
inline Ints dot_int8(Ints sum, Bytes w, int32_t x) { return dot_unsigned(sum, w, x); }

// Sixteen floats in [-127, 127], rounded to nearest even.
inline void store_int8(int8_t* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline Vec load_scales(const uint16_t* p) {  // sixteen bf16
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
