// AVX2 with FMA, bf16 weights widened to fp32.
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
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace autopipe {
namespace {

#include "simd_avx2.h"
#include "elementwise.h"
#include "weights.h"
#include "fetch.h"
#include "tiles_avx2.h"
#include "matmul.h"
#include "simd_int_avx2.h"
#include "quantised.h"
#include "screen.h"
#include "attention.h"
#define AUTOPIPE_SCREENS 1
#include "forward_impl.h"
}  // namespace

void forward_avx2(void* job, Team& team, int thread) {
    switch (static_cast<ForwardJob*>(job)->model->format) {
        case kFormatInt4: return forward_share<Int4>(job, team, thread);
        case kFormatInt8: return forward_share<Int8>(job, team, thread);
        case kFormatBf16: return forward_share<Widened>(job, team, thread);
    }
    forward_share<Fp32>(job, team, thread);
}

void matmul_avx2(void* job, Team& team, int thread) {
    switch (static_cast<MatmulJob*>(job)->format) {
        case kFormatInt4: return matmul_share<Int4>(job, team, thread);
        case kFormatInt8: return matmul_share<Int8>(job, team, thread);
        case kFormatBf16: return matmul_share<Widened>(job, team, thread);
    }
    matmul_share<Fp32>(job, team, thread);
}

}  // namespace autopipe

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
