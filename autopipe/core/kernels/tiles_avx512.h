// Rows times blocks with AVX-512: 32 registers hold the sums of all blocks of a tile at once. Included inside an
// isa_*.cpp, after fetch.h.

constexpr int kMaxTileRows = 12;   // 12 rows x 2 blocks: 24 of 32 registers accumulate
constexpr int kWideTileRows = 3;   // up to so many rows take 4 blocks at once, to hide the latency of fma
constexpr int kWideBlocks = 4;
constexpr int kBlocks = 2;
constexpr int kAttentionPairs = 6;  // (row, query head) pairs summed at once
constexpr int kKeyBlocks = 2;       // over so many blocks of keys
constexpr int kValueBlocks = 4;     // or of values

// One tile: R rows times N blocks; sums to out[R][N][16]. `ahead`: where the `Fetched` blocks begin that are fetched
// meanwhile.
template <class M, int R, int N, int Fetched>
void tile(const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps, const char* ahead,
          float* out) {
    const size_t block = static_cast<size_t>(steps) * M::kInputs * kLanes;
    constexpr int kStep = M::kInputs * kLanes;
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) acc[r][b] = zero();
    for (int k = 0; k < steps; ++k) {
        typename M::Loaded weights[N];
#pragma GCC unroll 4
        for (int b = 0; b < N; ++b) {
            weights[b] = M::load_weights(w + b * block + k * kStep);
            if (b < Fetched) __builtin_prefetch(ahead + (b * block + k * kStep) * sizeof(typename M::Weight), 0, 2);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const typename M::Input input = M::load_input(x + r * x_stride + k * M::kInputs);
#pragma GCC unroll 4
            for (int b = 0; b < N; ++b) acc[r][b] = M::accumulate(acc[r][b], weights[b], input);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) store(out + (r * N + b) * kLanes, acc[r][b]);
}

// A tile, its part of the fetching in whole blocks.
template <class M, int R, int N>
void fetching_tile(const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                   const Fetch& fetch, float* out) {
    const Ahead ahead(fetch);
    if (ahead.blocks == N)
        tile<M, R, N, N>(x, x_stride, w, steps, ahead.from, out);
    else if (ahead.blocks == 1)
        tile<M, R, N, 1>(x, x_stride, w, steps, ahead.from, out);
    else
        tile<M, R, N, 0>(x, x_stride, w, steps, nullptr, out);
}

// acc[h][b] += one step of block b times the inputs x[h] + at.
template <class M, int H, int N>
inline void add_blocks(Vec (&acc)[H][N], const typename M::Weight* w, size_t block, const float* const* x, int at) {
    typename M::Loaded loaded[N];
    for (int b = 0; b < N; ++b) loaded[b] = M::load_weights(w + b * block);
    for (int h = 0; h < H; ++h) {
        const typename M::Input input = M::load_input(x[h] + at);
        for (int b = 0; b < N; ++b) acc[h][b] = M::accumulate(acc[h][b], loaded[b], input);
    }
}

// The same of block b alone.
template <class M, int H, int N>
inline void add_block(Vec (&acc)[H][N], int b, const typename M::Weight* w, const float* const* x, int at) {
    const typename M::Loaded loaded = M::load_weights(w);
    for (int h = 0; h < H; ++h) acc[h][b] = M::accumulate(acc[h][b], loaded, M::load_input(x[h] + at));
}
