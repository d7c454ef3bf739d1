// AVX-512 with bf16 products: two inputs a step, for CPUs that do one such step a cycle (AMD); all have VNNI.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common.h"
#include "model.h"
#include "team.h"

#if AUTOPIPE_X86
#include <immintrin.h>

// From here on only: inline functions of the headers above must stay runnable on any CPU.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")
#endif

namespace autopipe {
namespace {

#include "simd_avx512.h"
#include "elementwise.h"
#include "weights.h"
#include "fetch.h"
#include "tiles_avx512.h"
#include "matmul.h"
#include "simd_vnni.h"
#include "quantised.h"
#include "screen.h"
#include "attention.h"
#define AUTOPIPE_SCREENS 1
#include "forward_impl.h"

// bf16 weights [blocks][inputs/2][16][2] and bf16 activations, summed in fp32 two inputs at a time.
struct DotProduct {
    using Weight = uint16_t;
    using Activation = uint16_t;
    using Embedding = uint16_t;
    using Cache = uint16_t;
    using CacheMode = Widened;
    using Head = DotProduct;
    static constexpr bool kQuantised = false;
    static constexpr int kInputs = 2;
    static constexpr int kCacheInputs = 2;
    struct Loaded {
        __m512i w;
    };
    static Loaded load_weights(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
    struct Input {
        __m512i x;
    };
    static Input load_input(const uint16_t* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return {_mm512_set1_epi32(pair)};
    }
    static Vec accumulate(Vec acc, const Loaded& w, const Input& x) {
        return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.w), reinterpret_cast<__m512bh>(x.x))};
    }
};
}  // namespace

void forward_avx512bf16(void* job, Team& team, int thread) {
    if (static_cast<ForwardJob*>(job)->model->format == kFormatBf16)
        forward_share<DotProduct>(job, team, thread);
    else
        forward_share<Fp32>(job, team, thread);
}

void matmul_avx512bf16(void* job, Team& team, int thread) {
    if (static_cast<MatmulJob*>(job)->format == kFormatBf16)
        matmul_share<DotProduct>(job, team, thread);
    else
        matmul_share<Fp32>(job, team, thread);
}

}  // namespace autopipe

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
