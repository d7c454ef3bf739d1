// Products with quantised weights. Included inside an isa_*.cpp, after matmul.h and the integer products.
//
// For every output and group of inputs, int8: weight = scale q, q from -127 to 127; int4: weight = scale u + minimum, u
// from 0 to 15. Scales and minima are bf16. Activations are quantised to 8 bits per row and group as they come (as
// llama.cpp does). Sums within a group are of integers, hence exact; those over groups are one chain of fused
// multiply-adds in the order of the groups. So a row's result depends on neither the number of rows, their tiling, the
// thread, nor the instruction set.
//
// A block of 16 outputs: scales [groups][16] (int4: [groups][scale, minimum][16]) padded to 64 bytes; then steps of 64
// bytes. int8: 16 outputs times 4 inputs, stored as q + 128. int4: 16 outputs times 8 inputs, 4..7 in the upper halves.

struct Int8 {
    using Weight = uint8_t;
    using Activation = float;
    using Embedding = uint16_t;
    using Cache = uint16_t;
    using CacheMode = Widened;
    using Head = Int8;
    static constexpr bool kQuantised = true;
    static constexpr bool kHasMinimum = false;
    static constexpr int kInputs = 4, kCacheInputs = 2, kGroup = 32, kOffset = kWeightsUnsigned ? 128 : 0;
    template <int R, int N>
    static void add(Ints (&sums)[R][N], const Bytes (&w)[N], const int8_t* x, size_t x_stride) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            int32_t four;
            std::memcpy(&four, x + r * x_stride, 4);
            for (int b = 0; b < N; ++b) sums[r][b] = dot_int8(sums[r][b], w[b], four);
        }
    }
};

struct Int4 {
    using Weight = uint8_t;
    using Activation = float;
    using Embedding = uint16_t;
    using Cache = uint16_t;
    using CacheMode = Widened;
    using Head = Int8;  // logits are where 4 bits hurt most
    static constexpr bool kQuantised = true;
    static constexpr bool kHasMinimum = true;
    static constexpr int kInputs = 8, kCacheInputs = 2, kGroup = 32, kOffset = 0;
    template <int R, int N>
    static void add(Ints (&sums)[R][N], const Bytes (&w)[N], const int8_t* x, size_t x_stride) {
        Bytes low[N], high[N];
        for (int b = 0; b < N; ++b) low[b] = low_nibbles(w[b]), high[b] = high_nibbles(w[b]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            int32_t first, second;
            std::memcpy(&first, x + r * x_stride, 4);
            std::memcpy(&second, x + r * x_stride + 4, 4);
            for (int b = 0; b < N; ++b)
                sums[r][b] = dot_unsigned(dot_unsigned(sums[r][b], low[b], first), high[b], second);
        }
    }
};

// Rows quantised for one product: q [rows][stride], and per row and group the scale and the sum of q.
template <class M>
struct QuantisedRows {
    int groups;
    size_t stride;
    std::vector<int8_t> q;
    std::vector<float> scales;
    std::vector<float> totals;

    void fill(const float* x, size_t x_stride, int rows, int inputs) {
        groups = (inputs + M::kGroup - 1) / M::kGroup;
        stride = static_cast<size_t>(groups) * M::kGroup;
        q.resize(rows * stride);
        scales.resize(static_cast<size_t>(rows) * groups);
        totals.resize(static_cast<size_t>(rows) * groups);
        for (int row = 0; row < rows; ++row)
            for (int group = 0; group < groups; ++group)
                fill_group(x + row * x_stride + group * M::kGroup, inputs - group * M::kGroup,
                           q.data() + row * stride + group * M::kGroup, at(row, group));
    }

    size_t at(int row, int group) const { return static_cast<size_t>(row) * groups + group; }

   private:
    void fill_group(const float* x, int count, int8_t* out, size_t at) {
        float padded[M::kGroup];
        if (count < M::kGroup) {  // the last group of a row may end in the middle
            for (int i = 0; i < M::kGroup; ++i) padded[i] = i < count ? x[i] : 0.0f;
            x = padded;
        }
        Vec largest = zero();
        for (int i = 0; i < M::kGroup; i += kLanes) largest = max(largest, max(load(x + i), sub(zero(), load(x + i))));
        const float most = max_lanes(largest);
        const Vec inverse = splat(most > 1e-30f ? 127.0f / most : 0.0f);
        Vec sum = zero();  // of whole numbers below 2^14: exact in any order
        for (int i = 0; i < M::kGroup; i += kLanes) {
            const Vec rounded = round_nearest(mul(load(x + i), inverse));
            store_int8(out + i, rounded);
            sum = add(sum, rounded);
        }
        scales[at] = most / 127.0f;
        totals[at] = sum_lanes(sum);
    }
};

constexpr int kMaxQuantisedRows = 6;  // rows x 2 blocks: 12 integer and 12 float accumulators

template <class M, int R, int N>
void quantised_tile(const QuantisedRows<M>& x, int row, const uint8_t* w, size_t block, const Ahead& ahead, float* out) {
    const size_t head = scale_bytes<M>(x.groups), group_bytes = M::kGroup / M::kInputs * 64;
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) acc[r][b] = zero();
    for (int b = 0; b < ahead.blocks; ++b)
        for (size_t at = 0; at < head; at += 64) __builtin_prefetch(ahead.from + b * block + at, 0, 2);
    for (int group = 0; group < x.groups; ++group) {
        Ints sums[R][N];
        for (int r = 0; r < R; ++r)
            for (int b = 0; b < N; ++b) sums[r][b] = splat_ints(-M::kOffset * static_cast<int32_t>(x.totals[x.at(row + r, group)]));
        const int8_t* q = x.q.data() + row * x.stride + group * M::kGroup;
        const size_t at = head + group * group_bytes;
        for (int k = 0; k < M::kGroup / M::kInputs; ++k) {
            Bytes weights[N];
#pragma GCC unroll 2
            for (int b = 0; b < N; ++b) {
                weights[b] = load_bytes(w + b * block + at + k * 64);
                if (b < ahead.blocks) __builtin_prefetch(ahead.from + b * block + at + k * 64, 0, 2);
            }
            M::add(sums, weights, q + k * M::kInputs, x.stride);
        }
        for (int b = 0; b < N; ++b) {
            const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + b * block);
            scales += group * (M::kHasMinimum ? 2 : 1) * kLanes;
            const Vec scale = load_scales(scales);
            for (int r = 0; r < R; ++r) {
                const float x_scale = x.scales[x.at(row + r, group)];
                acc[r][b] = fma(to_floats(sums[r][b]), mul(scale, splat(x_scale)), acc[r][b]);
                if constexpr (M::kHasMinimum)
                    acc[r][b] = fma(load_scales(scales + kLanes), splat(x_scale * x.totals[x.at(row + r, group)]), acc[r][b]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < N; ++b) store(out + (r * N + b) * kLanes, acc[r][b]);
}

template <class M, int N, int R>
void quantised_tile_of_rows(int rows, const QuantisedRows<M>& x, int row, const uint8_t* w, size_t block,
                            const Ahead& ahead, float* out) {
    if (rows == R)
        quantised_tile<M, R, N>(x, row, w, block, ahead, out);
    else if constexpr (R > 1)
        quantised_tile_of_rows<M, N, R - 1>(rows, x, row, w, block, ahead, out);
}

// As multiply in matmul.h, of rows that are quantised already.
template <class M, class Epilogue>
void multiply_filled(const QuantisedRows<M>& quantised, int rows, const Matrix<M>& matrix, const char* next, int thread,
                     int threads, const Epilogue& epilogue) {
    const Share share = matrix.share(thread, threads);
    const size_t block_bytes = matrix.block_elements();
    const int tiles = (rows + kMaxQuantisedRows - 1) / kMaxQuantisedRows;
    const int most_rows = (rows + tiles - 1) / tiles;
    float sums[kMaxQuantisedRows * kBlocks * kLanes];
    for (int block = share.begin; block < share.end;) {
        const int count = share.end - block >= kBlocks ? kBlocks : 1;
        const uint8_t* w = matrix.data + block * block_bytes;
        const char* ahead = block + count >= share.end ? next : reinterpret_cast<const char*>(w + count * block_bytes);
        for (int row = 0; row < rows; row += most_rows) {
            const int height = rows - row < most_rows ? rows - row : most_rows;
            const Ahead part(Fetch{ahead, row / most_rows, tiles, count, block_bytes});
            if (count == kBlocks)
                quantised_tile_of_rows<M, kBlocks, kMaxQuantisedRows>(height, quantised, row, w, block_bytes, part, sums);
            else
                quantised_tile_of_rows<M, 1, kMaxQuantisedRows>(height, quantised, row, w, block_bytes, part, sums);
            for (int r = 0; r < height; ++r) epilogue(row + r, block, count, sums + r * count * kLanes);
        }
        block += count;
    }
}

// As multiply in matmul.h. Every thread quantises all rows for itself: that is cheaper than waiting for another.
template <class M, class Epilogue>
void multiply_quantised(const float* x, size_t x_stride, int rows, const Matrix<M>& matrix, const char* next,
                        int thread, int threads, const Epilogue& epilogue) {
    thread_local QuantisedRows<M> quantised;
    quantised.fill(x, x_stride, rows, matrix.inputs);
    multiply_filled(quantised, rows, matrix, next, thread, threads, epilogue);
}
