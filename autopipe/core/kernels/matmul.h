// Products of a few rows with packed weights. Each (row, output) is one chain of fused multiply-adds over the inputs in
// order, whatever the number of rows, their tiling or the thread: hence the same bits. Included inside an isa_*.cpp.

// fp32 weights [blocks][inputs][16], fp32 activations.
struct Fp32 {
    using Weight = float;
    using Activation = float;
    using Embedding = float;
    using Cache = float;
    using CacheMode = Fp32;            // how attention reads the cache
    using Head = Fp32;                 // how the output head is packed
    static constexpr bool kQuantised = false;
    static constexpr int kInputs = 1;  // inputs per step
    static constexpr int kCacheInputs = 1;
    struct Loaded {
        Vec w;
    };
    static Loaded load_weights(const float* p) { return {load(p)}; }
    struct Input {
        Vec x;
    };
    static Input load_input(const float* p) { return {splat(p[0])}; }
    static Vec accumulate(Vec acc, const Loaded& w, const Input& x) { return fma(w.w, x.x, acc); }
    static Vec accumulate_first(Vec acc, const Loaded& w, Vec x) { return fma(w.w, x, acc); }
};

// bf16 weights [blocks][inputs/2][16][2] widened on the fly, fp32 activations.
struct Widened {
    using Weight = uint16_t;
    using Activation = float;
    using Embedding = uint16_t;
    using Cache = uint16_t;
    using CacheMode = Widened;
    using Head = Widened;
    static constexpr bool kQuantised = false;
    static constexpr int kInputs = 2;
    static constexpr int kCacheInputs = 2;
    struct Loaded {
        Vec even, odd;
    };
    static Loaded load_weights(const uint16_t* p) {
        Loaded w;
        widen(p, w.even, w.odd);
        return w;
    }
    struct Input {
        Vec even, odd;
    };
    static Input load_input(const float* p) { return {splat(p[0]), splat(p[1])}; }
    static Vec accumulate(Vec acc, const Loaded& w, const Input& x) {
        return fma(w.odd, x.odd, fma(w.even, x.even, acc));
    }
    static Vec accumulate_first(Vec acc, const Loaded& w, Vec x) { return fma(w.even, x, acc); }
};

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

// What a tile fetches for the next ones. Where several tiles of rows read the same blocks, each fetches a part: memory
// is the slower, so it must not pause while rows are computed.
struct Ahead {
    const char* from;
    int blocks;

    // Of tile `tile` of `tiles` that read the same `count` blocks of `block_bytes`.
    static Ahead part(const char* next, int tile, int tiles, int count, size_t block_bytes) {
        if (next == nullptr) return {nullptr, 0};
        if (tiles == 1) return {next, count};
        return {next + tile * block_bytes, tile < count ? 1 : 0};
    }
};

template <class M, int N, int R>
void tile_of_rows(int rows, const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                  const Ahead& ahead, float* out) {
    if (rows == R) {
        if (ahead.blocks == N)
            tile<M, R, N, N>(x, x_stride, w, steps, ahead.from, out);
        else if (ahead.blocks == 1)
            tile<M, R, N, 1>(x, x_stride, w, steps, ahead.from, out);
        else
            tile<M, R, N, 0>(x, x_stride, w, steps, nullptr, out);
    } else if constexpr (R > 1) {
        tile_of_rows<M, N, R - 1>(rows, x, x_stride, w, steps, ahead, out);
    }
}

// What thread `thread` of `threads` computes of `count` units: [begin, end).
struct Share {
    int begin, end;
    Share(int count, int thread, int threads)
        : begin(static_cast<int>(static_cast<int64_t>(count) * thread / threads)),
          end(static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads)) {}
};

template <class M>
constexpr size_t scale_bytes(int groups) {
    return (static_cast<size_t>(groups) * (M::kHasMinimum ? 2 : 1) * kLanes * 2 + 63) / 64 * 64;
}

// A packed matrix [outputs, inputs]; blocks are handed to threads in groups of `unit`.
template <class M>
struct Matrix {
    const typename M::Weight* data;
    int outputs, inputs, unit;

    int blocks() const { return round_up(blocks_of(outputs), unit); }
    int steps() const { return (inputs + M::kInputs - 1) / M::kInputs; }
    size_t block_elements() const {
        if constexpr (M::kQuantised) {  // of bytes; see quantised.h
            const int groups = (inputs + M::kGroup - 1) / M::kGroup;
            return scale_bytes<M>(groups) + static_cast<size_t>(groups) * (M::kGroup / M::kInputs) * 64;
        }
        return static_cast<size_t>(steps()) * M::kInputs * kLanes;
    }
    Share share(int thread, int threads) const {
        Share s(blocks() / unit, thread, threads);
        s.begin *= unit;
        s.end *= unit;
        return s;
    }
    const char* start_of_share(int thread, int threads) const {
        return reinterpret_cast<const char*>(data + share(thread, threads).begin * block_elements());
    }
};

template <class M, class Epilogue>
void multiply_quantised(const float* x, size_t x_stride, int rows, const Matrix<M>& matrix, const char* next,
                        int thread, int threads, const Epilogue& epilogue);

template <class M, class Epilogue>
void multiply_plain(const typename M::Activation* x, size_t x_stride, int rows, const Matrix<M>& matrix,
                    const char* next, int thread, int threads, const Epilogue& epilogue) {
    const Share share = matrix.share(thread, threads);
    const int steps = matrix.steps();
    const size_t block_bytes = matrix.block_elements() * sizeof(typename M::Weight);
    const int tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
    const int most_rows = (rows + tiles - 1) / tiles;
    const int wide = most_rows <= kWideTileRows ? kWideBlocks : kBlocks;
    float sums[kMaxTileRows * kWideBlocks * kLanes];
    for (int block = share.begin; block < share.end;) {
        const int left = share.end - block;
        const int count = left >= wide ? wide : left >= kBlocks ? kBlocks : 1;
        const typename M::Weight* w = matrix.data + block * matrix.block_elements();
        const bool last = block + count >= share.end;
        const char* ahead = last ? next : reinterpret_cast<const char*>(w + count * matrix.block_elements());
        for (int row = 0; row < rows; row += most_rows) {
            const int height = rows - row < most_rows ? rows - row : most_rows;
            const typename M::Activation* tile_x = x + row * x_stride;
            const Ahead part = Ahead::part(ahead, row / most_rows, tiles, count, block_bytes);
            if (kWideTileRows > 0 && count == kWideBlocks && kWideBlocks != kBlocks)
                tile_of_rows<M, kWideBlocks, (kWideTileRows > 0 ? kWideTileRows : 1)>(height, tile_x, x_stride, w,
                                                                                      steps, part, sums);
            else if (count == kBlocks)
                tile_of_rows<M, kBlocks, kMaxTileRows>(height, tile_x, x_stride, w, steps, part, sums);
            else
                tile_of_rows<M, 1, kMaxTileRows>(height, tile_x, x_stride, w, steps, part, sums);
            for (int r = 0; r < height; ++r) epilogue(row + r, block, count, sums + r * count * kLanes);
        }
        block += count;
    }
}

// This thread's share of x[rows, inputs] times the matrix. epilogue(row, block, blocks, sums) gets sums
// [blocks][16] of one row. `next` is where the thread's next matrix begins: fetched while the last blocks are computed.
template <class M, class Epilogue>
void multiply(const typename M::Activation* x, size_t x_stride, int rows, const Matrix<M>& matrix, const char* next,
              int thread, int threads, const Epilogue& epilogue) {
    if constexpr (M::kQuantised) {
        multiply_quantised(x, x_stride, rows, matrix, next, thread, threads, epilogue);
    } else {
        multiply_plain(x, x_stride, rows, matrix, next, thread, threads, epilogue);
    }
}
