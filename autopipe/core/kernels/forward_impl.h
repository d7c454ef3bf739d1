// A decoder's forward, one thread's share of it. Included inside an isa_*.cpp, after attention.h.

template <class M>
class Forward {
   public:
    using X = typename M::Activation;
    using W = typename M::Weight;

    Forward(ForwardJob& job, Team& team, int thread)
        : job_(job), m_(*job.model), s_(*job.sizes), ws_(*job.workspace), pass_(*job.pass), team_(team),
          thread_(thread), threads_(team.size()), rows_(job.rows) {}

    void run() {
        embed();
        team_.barrier();
        const int hidden = m_.hidden;
        for (int l = 0; l < m_.num_layers; ++l) {
            const LayerWeights& w = m_.layers[l];
            const Matrix<M> qkv = qkv_of(l);
            const Matrix<M> output{static_cast<const W*>(w.output), hidden, s_.attended, 1};
            const Matrix<M> gate_up{static_cast<const W*>(w.gate_up), 2 * kLanes * blocks_of(m_.intermediate), hidden, 2};
            const Matrix<M> down{static_cast<const W*>(w.down), hidden, m_.intermediate, 1};
            const bool last = l + 1 == m_.num_layers;
            const char* next = last ? start_of_head() : start_of(m_.layers[l + 1].qkv_adapter, qkv_of(l + 1));

            const X* x = normalise(w.input_norm, rows_, every_row);
            reduce(w.qkv_adapter, x, s_.hidden_stride, qkv);
            multiply(x, s_.hidden_stride, rows_, qkv, start_of(w.output_adapter, output), thread_, threads_,
                     [&](int row, int block, int count, float* sums) {
                         adapt(w.qkv_adapter, row, block, count, sums);
                         float* out = ws_.qkv + row * s_.qkv_stride + block * kLanes;
                         for (int i = 0; i < count * kLanes; ++i) out[i] = sums[i];
                         if (w.qkv_bias != nullptr)
                             for (int i = 0; i < count * kLanes; ++i) out[i] += w.qkv_bias[block * kLanes + i];
                     });
            team_.barrier();
            rotate_and_append(w, l);
            team_.barrier();
            attend_rows(l);
            team_.barrier();
            add_product(static_cast<const X*>(ws_.attended), s_.attended_stride, output, w.output_adapter,
                        start_of(w.gate_up_adapter, gate_up));
            team_.barrier();
            x = normalise(w.mlp_norm, rows_, every_row);
            reduce(w.gate_up_adapter, x, s_.hidden_stride, gate_up);
            multiply(x, s_.hidden_stride, rows_, gate_up, start_of(w.down_adapter, down), thread_, threads_,
                     [&](int row, int block, int count, float* sums) {
                         adapt(w.gate_up_adapter, row, block, count, sums);
                         X* out = static_cast<X*>(ws_.gated) + row * s_.intermediate_stride + block / 2 * kLanes;
                         for (int b = 0; b < count; b += 2)
                             store_as(out + b / 2 * kLanes,
                                      mul(silu(load(sums + b * kLanes)), load(sums + (b + 1) * kLanes)));
                     });
            team_.barrier();
            add_product(static_cast<const X*>(ws_.gated), s_.intermediate_stride, down, w.down_adapter, next);
            team_.barrier();
        }
        logits();
    }

   private:
    template <class Mode>
    const char* start(const Matrix<Mode>& matrix) const { return matrix.start_of_share(thread_, threads_); }
    // Where this thread begins to read for a product: in the adapter, if there is one.
    const char* start_of(const Adapter& adapter, const Matrix<M>& matrix) const {
        if constexpr (!M::kQuantised)
            if (adapter.down != nullptr) return start(down_of(adapter, matrix));
        return start(matrix);
    }
    Matrix<M> down_of(const Adapter& adapter, const Matrix<M>& matrix) const {
        return {static_cast<const W*>(adapter.down), adapter.rank, matrix.inputs, 1};
    }
    Matrix<M> qkv_of(int layer) const { return {static_cast<const W*>(m_.layers[layer].qkv), s_.qkv, m_.hidden, 1}; }
    Matrix<typename M::Head> head() const {
        return {static_cast<const typename M::Head::Weight*>(m_.head), m_.vocab, m_.hidden, 1};
    }

    const char* start_of_layers() const { return start_of(m_.layers[0].qkv_adapter, qkv_of(0)); }

    const char* start_of_head() const {
#if AUTOPIPE_SCREENS
        if (job_.best_only) return start(Matrix<Int8>{static_cast<const uint8_t*>(m_.screen), m_.vocab, m_.hidden, 1});
#endif
        return start(head());
    }

    void embed() {
        const Share share(rows_, thread_, threads_);
        for (int row = share.begin; row < share.end; ++row) {
            const size_t id = static_cast<size_t>(job_.ids[row]);
            float* out = ws_.residual + static_cast<size_t>(row) * s_.hidden_stride;
            if (m_.embedding != nullptr) {
                const auto* from = static_cast<const typename M::Embedding*>(m_.embedding) + id * m_.hidden;
                for (int i = 0; i < m_.hidden; ++i) out[i] = get(from + i);
            } else if constexpr (!M::kQuantised) {  // quantised models always have an embedding of their own
                const Matrix<M> packed = head();
                const W* from = packed.data + id / kLanes * packed.block_elements();
                for (int i = 0; i < m_.hidden; ++i) out[i] = get(from + packed_index<M>(i, id % kLanes));
            }
        }
    }

    static int every_row(int row) { return row; }

    // `count` normalised rows, the i-th being row source(i), ready for all threads. Few: each thread makes its own copy.
    template <class Source>
    const X* normalise(const float* weight, int count, const Source& source) {
        const bool private_copy = count <= kPrivateRows;
        const size_t stride = s_.hidden_stride;
        X* out = private_copy ? static_cast<X*>(ws_.normed_private) + thread_ * kPrivateRows * stride
                              : static_cast<X*>(ws_.normed);
        const Share share = private_copy ? Share(count, 0, 1) : Share(count, thread_, threads_);
        for (int i = share.begin; i < share.end; ++i)
            rms_norm(ws_.residual + source(i) * stride, weight, m_.hidden, m_.norm_epsilon, out + i * stride);
        if (!private_copy) team_.barrier();
        return out;
    }

    // What an adapter makes of all rows before it is added to their products with `matrix`.
    void reduce(const Adapter& adapter, const X* x, int x_stride, const Matrix<M>& matrix) {
        if constexpr (!M::kQuantised) {
            if (adapter.down == nullptr) return;
            multiply(x, x_stride, rows_, down_of(adapter, matrix), start(matrix), thread_, threads_,
                     [&](int row, int block, int count, float* sums) {
                         X* out = static_cast<X*>(ws_.reduced) + row * ws_.reduced_stride + block * kLanes;
                         for (int i = 0; i < count * kLanes; i += kLanes) store_as(out + i, load(sums + i));
                     });
            team_.barrier();
        }
    }

    // Adds an adapter's part to the sums of `count` blocks of a row.
    void adapt(const Adapter& adapter, int row, int block, int count, float* sums) const {
        if constexpr (!M::kQuantised) {
            if (adapter.down == nullptr) return;
            const X* reduced = static_cast<const X*>(ws_.reduced) + row * ws_.reduced_stride;
            int b = 0;
            for (; b + 2 <= count; b += 2) add_up<2>(adapter, reduced, block + b, row == 0, sums + b * kLanes);
            if (b < count) add_up<1>(adapter, reduced, block + b, row == 0, sums + b * kLanes);
        }
    }

    // Two blocks at once hide the latency of their chains of multiply-adds; what a block gets does not depend on it. The
    // first row fetches the next blocks meanwhile.
    template <int N>
    static void add_up(const Adapter& adapter, const X* reduced, int block, bool fetches, float* sums) {
        constexpr int kStep = M::kInputs * kLanes;
        const int steps = (adapter.width + M::kInputs - 1) / M::kInputs;
        const W* up = static_cast<const W*>(adapter.up) + static_cast<size_t>(block) * steps * kStep;
        const size_t ahead = fetches ? static_cast<size_t>(N) * steps * kStep : 0;
        Vec acc[N];
        const X* x[N];
        for (int b = 0; b < N; ++b) acc[b] = load(sums + b * kLanes), x[b] = reduced + adapter.first[block + b];
        for (int k = 0; k < steps; ++k) {
#pragma GCC unroll 2
            for (int b = 0; b < N; ++b) {
                const W* w = up + static_cast<size_t>(b * steps + k) * kStep;
                __builtin_prefetch(w + ahead, 0, 2);
                acc[b] = M::accumulate(acc[b], M::load_weights(w), M::load_input(x[b] + k * M::kInputs));
            }
        }
        for (int b = 0; b < N; ++b) store(sums + b * kLanes, acc[b]);
    }

    void add_product(const X* x, int x_stride, const Matrix<M>& matrix, const Adapter& adapter, const char* next) {
        reduce(adapter, x, x_stride, matrix);
        multiply(x, x_stride, rows_, matrix, next, thread_, threads_,
                 [&](int row, int block, int count, float* sums) {
                     adapt(adapter, row, block, count, sums);
                     float* out = ws_.residual + static_cast<size_t>(row) * s_.hidden_stride + block * kLanes;
                     for (int i = 0; i < count * kLanes; i += kLanes) store(out + i, add(load(out + i), load(sums + i)));
                 });
    }

    PageView<M> view(int layer, int row) const {
        return {s_, m_.num_kv_heads, m_.page_tokens, layer, pass_.segments[job_.places[row].segment].pages};
    }

    // Head by head, not row by row: a thread then mostly reads what it computed, and no other thread writes the lines of
    // the cache that it writes, in which sixteen positions of a head are side by side.
    void rotate_and_append(const LayerWeights& w, int layer) {
        const int d = m_.head_dim;
        const Share share((m_.num_heads + m_.num_kv_heads) * rows_, thread_, threads_);
        for (int unit = share.begin; unit < share.end; ++unit) {
            const int head = unit / rows_, row = unit % rows_;
            const int position = job_.places[row].position;
            const float* cos = pass_.rope_cos + static_cast<size_t>(position) * (d / 2);
            const float* sin = pass_.rope_sin + static_cast<size_t>(position) * (d / 2);
            float* x = ws_.qkv + static_cast<size_t>(row) * s_.qkv_stride + head * d;
            if (head < m_.num_heads) {
                rotate_head(x, w.q_norm, d, m_.norm_epsilon, cos, sin, m_.attention_scale);
            } else {
                rotate_head(x, w.k_norm, d, m_.norm_epsilon, cos, sin, 1.0f);
                append(view(layer, row), position, head - m_.num_heads, d, x, x + m_.num_kv_heads * d);
            }
        }
    }

    // The (KV head, row, query head) with which thread `thread` begins, so that all threads meet as many keys.
    int first_pair(int thread) const {
        const int group = m_.num_heads / m_.num_kv_heads;
        const int64_t* before = job_.keys_before;
        const int64_t per_query_head = before[rows_] - before[0], per_kv_head = per_query_head * group;
        const int64_t goal = m_.num_kv_heads * per_kv_head * thread / threads_;
        const int kv_head = static_cast<int>(goal / per_kv_head);
        if (kv_head == m_.num_kv_heads) return kv_head * rows_ * group;
        const int64_t within = goal % per_kv_head;
        int row = 0, end = rows_;  // the last row that begins at or before `within`
        while (end - row > 1) {
            const int middle = (row + end) / 2;
            (group * (before[middle] - before[0]) <= within ? row : end) = middle;
        }
        const int64_t head = (within - group * (before[row] - before[0])) / (before[row + 1] - before[row]);
        return (kv_head * rows_ + row) * group + static_cast<int>(head);
    }

    void attend_rows(int layer) {
        static_assert(kAttentionPairs <= kHeadTile, "there is room for the scores of kHeadTile pairs");
        const int group = m_.num_heads / m_.num_kv_heads, d = m_.head_dim, per_kv_head = rows_ * group;
        const int end = first_pair(thread_ + 1);
        float* own_scores = ws_.scores + thread_ * kHeadTile * ws_.score_stride;
        for (int unit = first_pair(thread_); unit < end;) {
            const int kv_head = unit / per_kv_head, first = (unit - kv_head * per_kv_head) / group;
            const float* queries[kAttentionPairs];
            float* scores[kAttentionPairs];
            X* out[kAttentionPairs];
            int limits[kAttentionPairs];
            int count = 0;
            for (; count < kAttentionPairs && unit + count < end; ++count) {
                const int within = unit + count - kv_head * per_kv_head;
                const int row = within / group, head = kv_head * group + within % group;
                if (row == rows_ || job_.places[row].segment != job_.places[first].segment) break;
                queries[count] = ws_.qkv + static_cast<size_t>(row) * s_.qkv_stride + head * d;
                scores[count] = own_scores + count * ws_.score_stride;
                out[count] = static_cast<X*>(ws_.attended) + static_cast<size_t>(row) * s_.attended_stride + head * d;
                limits[count] = job_.places[row].position + 1;
            }
            attend_pairs<M, kAttentionPairs>(count, view(layer, first), kv_head, queries, limits, scores, d, out);
            unit += count;
        }
    }

    void logits() {
        if (job_.num_logits == 0) return;
        const X* x = normalise(m_.final_norm, job_.num_logits,
                               [&](int i) { return static_cast<size_t>(job_.logit_rows[i] - job_.first_row); });
#if AUTOPIPE_SCREENS
        if constexpr (!M::kQuantised) {
            if (job_.best_only) {
                const Matrix<Int8> coarse{static_cast<const uint8_t*>(m_.screen), m_.vocab, m_.hidden, 1};
                screened_best<M>(x, s_.hidden_stride, job_.num_logits, head(), coarse, m_.screen_norms, start_of_layers(),
                                 ws_.tops, ws_.floors, ws_.best + thread_ * kMaxRows, team_, thread_);
                return;
            }
        }
#endif
        multiply(x, s_.hidden_stride, job_.num_logits, head(), start_of_layers(), thread_, threads_,
                 [&](int row, int block, int count, const float* sums) {
                     float* out = job_.logits + static_cast<size_t>(row) * m_.vocab;
                     const int begin = block * kLanes;
                     const int end = begin + count * kLanes < m_.vocab ? begin + count * kLanes : m_.vocab;
                     for (int i = begin; i < end; ++i) out[i] = sums[i - begin];
                 });
    }

    const ForwardJob& job_;
    const ModelDescription& m_;
    const Sizes& s_;
    const Workspace& ws_;
    const Pass& pass_;
    Team& team_;
    const int thread_, threads_, rows_;
};

template <class M>
void forward_share(void* job, Team& team, int thread) {
    Forward<M>(*static_cast<ForwardJob*>(job), team, thread).run();
}

// A thread's share of a product whose rows are of type R.
template <class M, class R>
void matmul_rows(const MatmulJob& job, Team& team, int thread) {
    using X = typename M::Activation;
    const size_t stride = round_up(job.inputs, 32);
    X* x = static_cast<X*>(job.converted);
    const Share share(job.rows, thread, team.size());
    for (int row = share.begin; row < share.end; ++row) {
        const R* from = static_cast<const R*>(job.x) + static_cast<size_t>(row) * job.inputs;
        for (int i = 0; i < job.inputs; ++i) put(x + row * stride + i, get(from + i));
    }
    team.barrier();
    const Matrix<M> matrix{static_cast<const typename M::Weight*>(job.weights), job.outputs, job.inputs, 1};
    multiply(x, stride, job.rows, matrix, matrix.start_of_share(thread, team.size()), thread, team.size(),
             [&](int row, int block, int count, const float* sums) {
                 R* out = static_cast<R*>(job.out) + static_cast<size_t>(row) * job.outputs;
                 int i = block * kLanes;
                 const float* sum = sums - i;
                 const int end = i + count * kLanes < job.outputs ? i + count * kLanes : job.outputs;
                 for (; i + kLanes <= end; i += kLanes) {
                     const Vec product = load(sum + i);
                     store_as(out + i, job.bias == nullptr ? product : add(product, load(job.bias + i)));
                 }
                 for (; i < end; ++i) put(out + i, job.bias == nullptr ? sum[i] : sum[i] + job.bias[i]);
             });
}

template <class M>
void matmul_share(void* context, Team& team, int thread) {
    const MatmulJob& job = *static_cast<MatmulJob*>(context);
    if (job.bf16_rows)
        matmul_rows<M, uint16_t>(job, team, thread);
    else
        matmul_rows<M, float>(job, team, thread);
}
