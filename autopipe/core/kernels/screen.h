// The largest logit of each row without most of the output head: greedy decoding needs no other. Included inside an
// isa_*.cpp, after quantised.h.
//
// The head is read in int8 first. With w the row of the head, x the hidden state, and v and y what they are quantised to,
// w x = v y + (w - v) x + v (x - y), so by Cauchy and Schwarz the true logit is within |w - v| |x| + |v| |x - y| of the
// approximate one, plus what both sums may have rounded. Blocks that may hold the largest logit are then computed as they
// would have been anyway, bit for bit. The rest cannot hold it.

// What a row's bound multiplies |w - v| and |v| with.
struct RowBound {
    float error, norm;
};

inline float norm_above(double squares) { return static_cast<float>(std::sqrt(squares) * 1.0001); }

template <class Q>
RowBound bound_of(const float* x, const QuantisedRows<Q>& quantised, int row, int inputs) {
    double squares = 0, error_squares = 0;
    for (int group = 0; group < quantised.groups; ++group) {
        const int8_t* q = quantised.q.data() + row * quantised.stride + group * Q::kGroup;
        const double scale = quantised.scales[quantised.at(row, group)];
        const int first = group * Q::kGroup, count = std::min(Q::kGroup, inputs - first);
        for (int i = 0; i < count; ++i) {
            const double value = x[first + i], error = value - scale * q[i];
            squares += value * value;
            error_squares += error * error;
        }
    }
    const float norm = norm_above(squares), error = norm_above(error_squares);
    // Both sums round at most `inputs` + a few times, by 2^-24 of the sum of the terms' sizes each, which is at most
    // (|v| + |w - v|) (|x| + |x - y|). Twice that, for sums whose products are rounded too.
    const float rounding = static_cast<float>(inputs + 64) * 0x1p-22f * (norm + error);
    return {norm + rounding, error + rounding};
}

inline const float* as_floats(const float* x, size_t, std::vector<float>&) { return x; }
inline const float* as_floats(const uint16_t* x, size_t count, std::vector<float>& room) {
    room.resize(count);
    for (size_t i = 0; i < count; ++i) room[i] = from_bf16(x[i]);
    return room.data();
}

// One thread's share. `head` is packed exactly, `coarse` in int8; norms: of coarse rows and of what they are off by, each
// [blocks of 16]; x: `rows` rows. Scratch of all threads: tops [rows][blocks], floors [threads][rows]. Out: best of each
// row in this thread's share; id -1: none.
template <class M>
void screened_best(const typename M::Activation* x, size_t x_stride, int rows, const Matrix<M>& head,
                   const Matrix<Int8>& coarse, const float* norms, const char* next, float* tops, float* floors,
                   Best* best, Team& team, int thread) {
    thread_local std::vector<float> room, lows;
    thread_local std::vector<RowBound> bounds;
    thread_local QuantisedRows<Int8> quantised;
    const int blocks = coarse.blocks(), threads = team.size();
    const float* errors = norms + static_cast<size_t>(blocks) * kLanes;
    const float* plain = as_floats(x, rows * x_stride, room);
    quantised.fill(plain, x_stride, rows, coarse.inputs);
    bounds.clear();
    for (int row = 0; row < rows; ++row) bounds.push_back(bound_of(plain + row * x_stride, quantised, row, coarse.inputs));
    lows.assign(static_cast<size_t>(rows) * kLanes, -INFINITY);
    multiply_filled(quantised, rows, coarse, next, thread, threads,
                    [&](int row, int block, int count, const float* sums) {
                        const Vec by_error = splat(bounds[row].error), by_norm = splat(bounds[row].norm);
                        Vec low = load(lows.data() + row * kLanes);
                        Vec top = splat(-INFINITY);
                        for (int b = 0; b < count; ++b) {
                            const size_t at = static_cast<size_t>(block + b) * kLanes;
                            const Vec off = fma(load(errors + at), by_error, mul(load(norms + at), by_norm));
                            const Vec sum = load(sums + b * kLanes);
                            low = max(low, sub(sum, off));
                            top = max(top, add(sum, off));
                        }
                        store(lows.data() + row * kLanes, low);
                        const float highest = max_lanes(top);
                        for (int b = 0; b < count; ++b) tops[static_cast<size_t>(row) * blocks + block + b] = highest;
                    });
    for (int row = 0; row < rows; ++row) floors[thread * rows + row] = max_lanes(load(lows.data() + row * kLanes));
    team.barrier();

    const Share share = coarse.share(thread, threads);
    for (int row = 0; row < rows; ++row) {
        float floor = floors[row];
        for (int other = 1; other < threads; ++other) floor = std::max(floor, floors[other * rows + row]);
        Best found{-INFINITY, -1};
        for (int block = share.begin; block < share.end; ++block) {
            if (!(tops[static_cast<size_t>(row) * blocks + block] >= floor)) continue;
            float sums[kLanes];
            fetching_tile<M, 1, 1>(x + row * x_stride, x_stride, head.data + block * head.block_elements(), head.steps(),
                                   Fetch{}, sums);
            for (int lane = 0; lane < kLanes && block * kLanes + lane < head.outputs; ++lane)
                if (sums[lane] > found.logit) found = {sums[lane], block * kLanes + lane};
        }
        best[row] = found;
    }
}
