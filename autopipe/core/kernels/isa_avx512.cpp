// AVX-512, bf16 weights widened to fp32: on Intel CPUs twice as fast as their bf16 products.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "model.h"
#include "team.h"

#if AUTOPIPE_X86
#include <immintrin.h>

// From here on only: inline functions of the headers above must stay runnable on any CPU.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif

namespace autopipe {
namespace {

#include "simd_avx512.h"
#include "elementwise.h"
#include "weights.h"
#include "fetch.h"
#include "tiles_avx512.h"
#include "matmul.h"
#include "attention.h"
#define AUTOPIPE_SCREENS 0
#include "forward_impl.h"
}  // namespace

void forward_avx512(void* job, Team& team, int thread) {
    if (static_cast<ForwardJob*>(job)->model->format == kFormatBf16)
        forward_share<Widened>(job, team, thread);
    else
        forward_share<Fp32>(job, team, thread);
}

void matmul_avx512(void* job, Team& team, int thread) {
    if (static_cast<MatmulJob*>(job)->format == kFormatBf16)
        matmul_share<Widened>(job, team, thread);
    else
        matmul_share<Fp32>(job, team, thread);
}

}  // namespace autopipe

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
