// Rows times blocks with AVX2: a vector of 16 takes two of 16 registers, so sums are few. Inputs are taken one by one, and
// blocks one after another where not all sums fit. Included inside isa_avx2.cpp, after fetch.h.

constexpr int kMaxTileRows = 5;   // 5 rows x 1 block: 10 of 16 registers accumulate; with 12, compilers spill some
constexpr int kWideTileRows = 0;
constexpr int kWideBlocks = 2;
constexpr int kBlocks = 2;
constexpr int kAttentionPairs = 5;  // (row, query head) pairs summed at once, over one block of keys or of values
constexpr int kKeyBlocks = 1;
constexpr int kValueBlocks = 1;

// The weights of one input of a step.
template <int Input>
inline Vec weights_of(const float* w) { return load(w); }
template <int Input>
inline Vec weights_of(const uint16_t* w) {
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 16));
    if constexpr (Input == 0)
        return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))};
}

// acc[r][b] += input `Input` of one step of block b times x(r)[Input].
template <class M, int Input, int R, int N, class Rows>
inline void add_input(Vec (&acc)[R][N], int b, const typename M::Weight* w, const Rows& x) {
    const Vec weights = weights_of<Input>(w);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r][b] = fma(weights, splat(x(r)[Input]), acc[r][b]);
}

template <class M, int R, int N, class Rows>
inline void add_step(Vec (&acc)[R][N], const typename M::Weight* w, size_t block, const Rows& x) {
#pragma GCC unroll 2
    for (int b = 0; b < N; ++b) add_input<M, 0>(acc, b, w + b * block, x);
    if constexpr (M::kInputs == 2) {
        __asm__("" : "+r"(w));  // read again: kept, the other halves would take the registers of sums
#pragma GCC unroll 2
        for (int b = 0; b < N; ++b) add_input<M, 1>(acc, b, w + b * block, x);
    }
}

// R rows times N blocks; sums to out[R][of][16], from the first block's on. Meanwhile `fetched` bytes a step are fetched at
// `next`, and as many for each further block, a block further on: one stream a block is faster than one for both.
template <class M, int R, int N>
void sum_blocks(const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                const char* next, int fetched, float* out, int of) {
    const size_t block = static_cast<size_t>(steps) * M::kInputs * kLanes;
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) acc[r][b] = zero();
    for (int k = 0; k < steps; ++k) {
#pragma GCC unroll 2
        for (int b = 0; b < N; ++b) __builtin_prefetch(next + b * block * sizeof(typename M::Weight), 0, 2);
        next += fetched;
        add_step<M>(acc, w + k * M::kInputs * kLanes, block, [&](int r) { return x + r * x_stride + k * M::kInputs; });
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) store(out + (r * of + b) * kLanes, acc[r][b]);
}

// A tile: R rows times N blocks; sums to out[R][N][16]. Beside each block it fetches an equal part of the next ones.
template <class M, int R, int N>
void fetching_tile(const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                   const Fetch& fetch, float* out) {
    constexpr int kAtOnce = R <= 2 ? N : 1;
    const size_t block = static_cast<size_t>(steps) * M::kInputs * kLanes;
    const char* next = reinterpret_cast<const char*>(w);  // where there is nothing to fetch: once more what is there
    size_t part = 0;
    if (fetch.next != nullptr) {
        part = fetch.blocks * fetch.block_bytes / (fetch.tiles * N);
        next = fetch.next + fetch.tile * (N / kAtOnce) * part;
    }
    for (int b = 0; b < N; b += kAtOnce, next += part)
        sum_blocks<M, R, kAtOnce>(x, x_stride, w + b * block, steps, next, static_cast<int>(part / steps),
                                  out + b * kLanes, N);
}

// acc[h][b] += one step of block b times the inputs x[h] + at.
template <class M, int H, int N>
inline void add_blocks(Vec (&acc)[H][N], const typename M::Weight* w, size_t block, const float* const* x, int at) {
    add_step<M>(acc, w, block, [&](int h) { return x[h] + at; });
}

// The same of block b alone.
template <class M, int H, int N>
inline void add_block(Vec (&acc)[H][N], int b, const typename M::Weight* w, const float* const* x, int at) {
    const auto rows = [&](int h) { return x[h] + at; };
    add_input<M, 0>(acc, b, w, rows);
    if constexpr (M::kInputs == 2) add_input<M, 1>(acc, b, w, rows);
}
