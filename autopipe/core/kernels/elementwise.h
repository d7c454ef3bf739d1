// Element-wise steps on padded rows. Included inside an isa_*.cpp, after its simd_*.h.

inline uint16_t to_bf16(float x) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep a NaN one
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void put(float* p, float x) { *p = x; }
inline void put(uint16_t* p, float x) { *p = to_bf16(x); }
inline float get(const float* p) { return *p; }
inline float get(const uint16_t* p) { return from_bf16(*p); }

inline void store_as(float* p, Vec a) { store(p, a); }
inline void store_as(uint16_t* p, Vec a) { store_bf16(p, a); }

// The lanes in one fixed order of additions: the upper half on the lower one, and so on.
inline float sum_lanes(Vec a) {
    const __m256 eight = _mm256_add_ps(lower(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(Vec a) {
    const __m256 eight = _mm256_max_ps(lower(a), upper(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x within 2 units in the last place; arguments are clamped to where the result is a normal float. The argument
// is reduced by a multiple of ln 2 (in two parts) to |r| <= ln(2)/2, where seven terms of the series are enough.
inline Vec exponential(Vec x) {
    x = min(max(x, splat(-87.0f)), splat(88.0f));
    const Vec n = round_nearest(mul(x, splat(1.44269504f)));
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec series = splat(1.0f / 5040);
    series = fma(series, r, splat(1.0f / 720));
    series = fma(series, r, splat(1.0f / 120));
    series = fma(series, r, splat(1.0f / 24));
    series = fma(series, r, splat(1.0f / 6));
    series = fma(series, r, splat(0.5f));
    series = fma(series, r, splat(1.0f));
    series = fma(series, r, splat(1.0f));
    return scale_by_power(series, n);
}

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exponential(sub(zero(), x)))); }

// out = x / sqrt(mean(x^2) + epsilon) * weight over `width` numbers in a row padded to a multiple of 32.
template <class X>
void rms_norm(const float* x, const float* weight, int width, float epsilon, X* out) {
    Vec first = zero(), second = zero();
    const int padded = round_up(width, 32);
    for (int i = 0; i < padded; i += 2 * kLanes) {
        const Vec a = load(x + i), b = load(x + i + kLanes);
        first = fma(a, a, first);
        second = fma(b, b, second);
    }
    const float mean = sum_lanes(add(first, second)) / static_cast<float>(width);
    const Vec scale = splat(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int i = 0; i < padded; i += kLanes) store_as(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// In place, one head: optional RMS norm, rotation of the pairs (i, i + half) by the position's angle, scale.
inline void rotate_head(float* x, const float* norm, int head_dim, float epsilon, const float* cos, const float* sin,
                        float scale) {
    if (norm != nullptr) {
        float sum = 0;
        for (int i = 0; i < head_dim; ++i) sum += x[i] * x[i];
        const float inverse = 1.0f / __builtin_sqrtf(sum / static_cast<float>(head_dim) + epsilon);
        for (int i = 0; i < head_dim; ++i) x[i] = x[i] * inverse * norm[i];
    }
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}
