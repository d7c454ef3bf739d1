// Products of a few rows with packed weights. Each (row, output) is one chain of fused multiply-adds over the inputs in
// order, whatever the number of rows, their tiling or the thread: hence the same bits. Included inside an isa_*.cpp,
// after its tiles_*.h.

// A tile of `rows` rows, at most R, times N blocks; sums to out[rows][N][16].
template <class M, int N, int R>
void tile_of_rows(int rows, const typename M::Activation* x, size_t x_stride, const typename M::Weight* w, int steps,
                  const Fetch& fetch, float* out) {
    if (rows == R)
        fetching_tile<M, R, N>(x, x_stride, w, steps, fetch, out);
    else if constexpr (R > 1)
        tile_of_rows<M, N, R - 1>(rows, x, x_stride, w, steps, fetch, out);
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
            const Fetch fetch{ahead, row / most_rows, tiles, count, block_bytes};
            if (kWideTileRows > 0 && count == kWideBlocks && kWideBlocks != kBlocks)
                tile_of_rows<M, kWideBlocks, (kWideTileRows > 0 ? kWideTileRows : 1)>(height, tile_x, x_stride, w,
                                                                                      steps, fetch, sums);
            else if (count == kBlocks)
                tile_of_rows<M, kBlocks, kMaxTileRows>(height, tile_x, x_stride, w, steps, fetch, sums);
            else
                tile_of_rows<M, 1, kMaxTileRows>(height, tile_x, x_stride, w, steps, fetch, sums);
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
