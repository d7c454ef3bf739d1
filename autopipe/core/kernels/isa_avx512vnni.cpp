// AVX-512 with VNNI: four 8-bit products a lane and instruction, for quantised weights and to screen the output head.
// Other weights are computed with as in isa_avx512.cpp, bit for bit.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
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
}  // namespace

void forward_avx512vnni(void* job, Team& team, int thread) {
    switch (static_cast<ForwardJob*>(job)->model->format) {
        case kFormatInt4: return forward_share<Int4>(job, team, thread);
        case kFormatInt8: return forward_share<Int8>(job, team, thread);
        case kFormatBf16: return forward_share<Widened>(job, team, thread);
    }
    forward_share<Fp32>(job, team, thread);
}

void matmul_avx512vnni(void* job, Team& team, int thread) {
    if (static_cast<MatmulJob*>(job)->format == kFormatInt4)
        matmul_share<Int4>(job, team, thread);
    else
        matmul_share<Int8>(job, team, thread);
}

}  // namespace autopipe

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
