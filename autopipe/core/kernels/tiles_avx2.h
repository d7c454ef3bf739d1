// Rows times blocks with AVX2: a vector of 16 takes two of 16 registers, so sums are few. Inputs are taken one by one, and
// blocks one after another where not all sums fit. Included inside isa_avx2.cpp, after weights.h.

constexpr int kMaxTileRows = 5;   // 5 rows x 1 block: 10 of 16 registers accumulate; with 12, compilers spill some
constexpr int kWideTileRows = 0;
constexpr int kWideBlocks = 2;
constexpr int kBlocks = 2;
constexpr int kMaxQuantisedRows = 4;  // 4 rows x 1 block: 8 of 16 registers accumulate integers, 4 hold weights
constexpr int kQuantisedBlocks = 1;
constexpr int kPairs = 5;
constexpr int kKeyBlocks = 1;
constexpr int kValueBlocks = 1;

// acc[r][b] += input `Input` of one step of block b times x(r)[Input].
template <class M, int Input, int R, int N, class Rows>
inline void add_input(Vec (&acc)[R][N], int b, const typename M::Weight* w, const Rows& x) {
    const Vec weights = M::template load_weights_of<Input>(w);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r][b] = fma(weights, splat(x(r)[Input]), acc[r][b]);
}

template <class M, int R, int N, class Rows>
inline void add_step(Vec (&acc)[R][N], const typename M::Weight* w, size_t block, const Rows& x) {
#pragma GCC unroll 2
    for (int b = 0; b < N; ++b) add_input<M, 0>(acc, b, w + b * block, x);
    if constexpr (M::kInputs == 2) {
#pragma GCC unroll 2
        for (int b = 0; b < N; ++b) add_input<M, 1>(acc, b, w + b * block, x);
    }
}

// R rows times N blocks; sums to out[R][of][16], from the first block's on. Meanwhile `fetched` bytes per step are fetched.
template <class M, int R, int N>
void sum_blocks(const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                const char* next, int fetched, float* out, int of) {
    const size_t block = static_cast<size_t>(steps) * M::kInputs * kLanes;
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) acc[r][b] = zero();
    for (int k = 0; k < steps; ++k) {
#pragma GCC unroll 2
        for (int b = 0; b < N; ++b) __builtin_prefetch(next + 64 * b, 0, 2);
        next += fetched;
        add_step<M>(acc, w + k * M::kInputs * kLanes, block, [&](int r) { return x + r * x_stride + k * M::kInputs; });
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) store(out + (r * of + b) * kLanes, acc[r][b]);
}

// A tile of `rows` rows, at most R, times N blocks; sums to out[rows][N][16].
template <class M, int N, int R>
void tile_of_rows(int rows, const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                  const Fetch& fetch, float* out) {
    if (rows == R) {
        constexpr int kAtOnce = R <= 2 ? N : 1;
        // The next blocks lie one after another: each pass over this tile's blocks fetches an equal part of them.
        const int passes = fetch.tiles * (N / kAtOnce);
        const size_t part = fetch.blocks * fetch.block_bytes / passes;
        const char* next = reinterpret_cast<const char*>(w);
        int fetched = 0;  // nothing new, where there is nothing to fetch
        if (fetch.next != nullptr) {
            next = fetch.next + fetch.tile * (N / kAtOnce) * part;
            fetched = static_cast<int>(part / steps);
        }
        const size_t block = static_cast<size_t>(steps) * M::kInputs * kLanes;
        for (int b = 0; b < N; b += kAtOnce, next += fetch.next != nullptr ? part : 0)
            sum_blocks<M, R, kAtOnce>(x, x_stride, w + b * block, steps, next, fetched, out + b * kLanes, N);
    } else if constexpr (R > 1) {
        tile_of_rows<M, N, R - 1>(rows, x, x_stride, w, steps, fetch, out);
    }
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
