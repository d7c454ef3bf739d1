// Gumbel noise as a pure function of (key, token id); the definition is autopipe/core/noise.py, and every float
// operation here has its twin there. Built with -ffp-contract=off: a fused multiply-add would give other bits.
#include "common.h"

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIVERSION
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kBlock = 1024;  // tokens at a time: the scratch arrays stay in the first-level cache
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;
constexpr float kLn2 = 0.693147182464599609375f;

INLINE uint64_t mix(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
}

INLINE int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE int32_t exponent_of(float x) { return (bits_of(x) - 0x3F3504F3) >> 23; }

INLINE float fraction_of(float x, int32_t exponent) { return float_of(bits_of(x) - exponent * (1 << 23)) - 1.0f; }

INLINE float log1p_small(float f) {
    const float s = f / (2.0f + f);
    const float z = s * s;
    float series = float(1.0 / 9.0);
    series = series * z + float(1.0 / 7.0);
    series = series * z + float(1.0 / 5.0);
    series = series * z + float(1.0 / 3.0);
    const float twice = s + s;
    return twice + twice * (z * series);
}

INLINE float gumbel_of(int32_t high, int32_t low) {
    // Selections are on integers: compilers may not vectorise a float comparison that could trap.
    const int32_t below_1 = 0x3F7FFFFF;  // the sum can round to 1
    const int32_t sum = bits_of(float(high) * 0x1p-24f + (float(low) * 2.0f + 1.0f) * 0x1p-48f);
    const float v = float_of(sum < below_1 ? sum : below_1);
    const float rest = 1.0f - v;
    const int32_t exponent = exponent_of(rest);
    const int32_t exact = -int32_t(exponent == 0);  // all ones where -v, which is not rounded, serves
    const float fraction = float_of((bits_of(-v) & exact) | (bits_of(fraction_of(rest, exponent)) & ~exact));
    const float exponential = -(float(exponent) * kLn2 + log1p_small(fraction));
    const int32_t outer = exponent_of(exponential);
    return -(float(outer) * kLn2 + log1p_small(fraction_of(exponential, outer)));
}

// Noise of the token ids id(0) to id(count - 1); count <= kBlock.
template <typename Id>
INLINE void block(uint64_t key, Id id, int64_t count, float* out) {
    alignas(64) int32_t high[kBlock];
    alignas(64) int32_t low[kBlock];
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t bits = mix(key + id(i) * kGamma);
        high[i] = int32_t(bits >> 40);
        low[i] = int32_t((bits >> 17) & 0x7FFFFF);
    }
    for (int64_t i = 0; i < count; ++i) out[i] = gumbel_of(high[i], low[i]);
}

}  // namespace

// Noise of some token ids [count].
AUTOPIPE_API MULTIVERSION void autopipe_gumbel(uint64_t key, const int64_t* ids, int64_t count, float* out) {
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t size = count - first < kBlock ? count - first : kBlock;
        const int64_t* some = ids + first;
        block(key, [some](int64_t i) { return uint64_t(some[i]); }, size, out + first);
    }
}

// The token id with the largest score + noise, the lowest of equals; 0 when every sum is -inf.
AUTOPIPE_API MULTIVERSION int64_t autopipe_gumbel_argmax(uint64_t key, const float* scores, int64_t count) {
    alignas(64) float sums[kBlock];
    float best = -std::numeric_limits<float>::infinity();
    int64_t best_id = 0;
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t size = count - first < kBlock ? count - first : kBlock;
        block(key, [first](int64_t i) { return uint64_t(first + i); }, size, sums);
        for (int64_t i = 0; i < size; ++i) sums[i] += scores[first + i];
        // Sixteen running maxima, so that the compiler need not reorder one.
        float lanes[16];
        for (int lane = 0; lane < 16; ++lane) lanes[lane] = -std::numeric_limits<float>::infinity();
        int64_t i = 0;
        for (; i + 16 <= size; i += 16)
            for (int lane = 0; lane < 16; ++lane)
                lanes[lane] = sums[i + lane] > lanes[lane] ? sums[i + lane] : lanes[lane];
        for (; i < size; ++i) lanes[0] = sums[i] > lanes[0] ? sums[i] : lanes[0];
        float block_best = lanes[0];
        for (int lane = 1; lane < 16; ++lane) block_best = lanes[lane] > block_best ? lanes[lane] : block_best;
        if (block_best > best) {
            best = block_best;
            int64_t j = 0;
            while (sums[j] != block_best) ++j;
            best_id = first + j;
        }
    }
    return best_id;
}
