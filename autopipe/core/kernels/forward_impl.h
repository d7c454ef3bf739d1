// A decoder's forward, one thread's share of it. Included inside an isa_*.cpp, after attention.h.

template <class M>
class Forward {
   public:
    using X = typename M::Activation;
    using W = typename M::Weight;

    Forward(ForwardJob& job, Team& team, int thread)
        : m_(*job.model), s_(*job.sizes), ws_(*job.workspace), pass_(job.pass), team_(team), thread_(thread),
          threads_(team.size()), rows_(static_cast<int>(job.pass.rows)) {}

    void run() {
        embed();
        team_.barrier();
        const int hidden = m_.hidden;
        for (int l = 0; l < m_.num_layers; ++l) {
            const LayerWeights& w = m_.layers[l];
            const Matrix<M> qkv{static_cast<const W*>(w.qkv), s_.qkv, hidden, 1};
            const Matrix<M> output{static_cast<const W*>(w.output), hidden, s_.attended, 1};
            const Matrix<M> gate_up{static_cast<const W*>(w.gate_up), 2 * kLanes * blocks_of(m_.intermediate), hidden, 2};
            const Matrix<M> down{static_cast<const W*>(w.down), hidden, m_.intermediate, 1};
            const bool last = l + 1 == m_.num_layers;
            const Matrix<M> next{static_cast<const W*>(last ? m_.head : m_.layers[l + 1].qkv),
                                 last ? m_.vocab : s_.qkv, hidden, 1};

            const X* x = normalise(w.input_norm, 0);
            multiply(x, s_.hidden_stride, rows_, qkv, start(output), thread_, threads_,
                     [&](int row, int block, int count, const float* sums) {
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
            add_product(static_cast<const X*>(ws_.attended), s_.attended_stride, output, start(gate_up));
            team_.barrier();
            x = normalise(w.mlp_norm, 0);
            multiply(x, s_.hidden_stride, rows_, gate_up, start(down), thread_, threads_,
                     [&](int row, int block, int count, const float* sums) {
                         X* out = static_cast<X*>(ws_.gated) + row * s_.intermediate_stride + block / 2 * kLanes;
                         for (int b = 0; b < count; b += 2)
                             store_as(out + b / 2 * kLanes,
                                      mul(silu(load(sums + b * kLanes)), load(sums + (b + 1) * kLanes)));
                     });
            team_.barrier();
            add_product(static_cast<const X*>(ws_.gated), s_.intermediate_stride, down, start(next));
            team_.barrier();
        }
        logits();
    }

   private:
    const char* start(const Matrix<M>& matrix) const { return matrix.start_of_share(thread_, threads_); }

    void embed() {
        const Share share(rows_, thread_, threads_);
        for (int row = share.begin; row < share.end; ++row) {
            const size_t id = static_cast<size_t>(pass_.ids[row]);
            float* out = ws_.residual + static_cast<size_t>(row) * s_.hidden_stride;
            if (m_.embedding != nullptr) {
                const W* from = static_cast<const W*>(m_.embedding) + id * m_.hidden;
                for (int i = 0; i < m_.hidden; ++i) out[i] = get(from + i);
            } else {
                const Matrix<M> head{static_cast<const W*>(m_.head), m_.vocab, m_.hidden, 1};
                const W* from = head.data + id / kLanes * head.block_elements();
                for (int i = 0; i < m_.hidden; ++i) out[i] = get(from + packed_index<M>(i, id % kLanes));
            }
        }
    }

    // Normalised rows from `first_row` on, ready for all threads. Few rows: each thread makes its own copy.
    const X* normalise(const float* weight, int first_row) {
        const int rows = rows_ - first_row;
        const bool private_copy = rows <= kPrivateRows;
        const size_t stride = s_.hidden_stride;
        X* out = private_copy ? static_cast<X*>(ws_.normed_private) + thread_ * kPrivateRows * stride
                              : static_cast<X*>(ws_.normed);
        const Share share = private_copy ? Share(rows, 0, 1) : Share(rows, thread_, threads_);
        for (int row = share.begin; row < share.end; ++row)
            rms_norm(ws_.residual + (first_row + row) * stride, weight, m_.hidden, m_.norm_epsilon, out + row * stride);
        if (!private_copy) team_.barrier();
        return out;
    }

    void add_product(const X* x, int x_stride, const Matrix<M>& matrix, const char* next) {
        multiply(x, x_stride, rows_, matrix, next, thread_, threads_,
                 [&](int row, int block, int count, const float* sums) {
                     float* out = ws_.residual + static_cast<size_t>(row) * s_.hidden_stride + block * kLanes;
                     for (int i = 0; i < count * kLanes; i += kLanes) store(out + i, add(load(out + i), load(sums + i)));
                 });
    }

    PageView<M> view(int layer) const { return {s_, m_.num_kv_heads, m_.page_tokens, layer, pass_.pages}; }

    void rotate_and_append(const LayerWeights& w, int layer) {
        const PageView<M> pages = view(layer);
        const int heads = m_.num_heads + m_.num_kv_heads, d = m_.head_dim;
        const Share share(rows_ * heads, thread_, threads_);
        for (int unit = share.begin; unit < share.end; ++unit) {
            const int row = unit / heads, head = unit % heads;
            const int position = static_cast<int>(pass_.position) + row;
            const float* cos = pass_.rope_cos + static_cast<size_t>(position) * (d / 2);
            const float* sin = pass_.rope_sin + static_cast<size_t>(position) * (d / 2);
            float* x = ws_.qkv + static_cast<size_t>(row) * s_.qkv_stride + head * d;
            if (head < m_.num_heads) {
                rotate_head(x, w.q_norm, d, m_.norm_epsilon, cos, sin, m_.attention_scale);
            } else {
                rotate_head(x, w.k_norm, d, m_.norm_epsilon, cos, sin, 1.0f);
                append(pages, position, head - m_.num_heads, d, x, x + m_.num_kv_heads * d);
            }
        }
    }

    void attend_rows(int layer) {
        const PageView<M> pages = view(layer);
        const int group = m_.num_heads / m_.num_kv_heads, d = m_.head_dim, per_kv_head = rows_ * group;
        const Share share(m_.num_kv_heads * per_kv_head, thread_, threads_);
        float* own_scores = ws_.scores + thread_ * kHeadTile * ws_.score_stride;
        for (int unit = share.begin; unit < share.end;) {
            const int kv_head = unit / per_kv_head;
            int count = (kv_head + 1) * per_kv_head - unit;
            if (count > kHeadTile) count = kHeadTile;
            if (count > share.end - unit) count = share.end - unit;
            const float* queries[kHeadTile];
            float* scores[kHeadTile];
            X* out[kHeadTile];
            int limits[kHeadTile];
            for (int h = 0; h < count; ++h) {
                const int within = unit + h - kv_head * per_kv_head;
                const int row = within / group, head = kv_head * group + within % group;
                queries[h] = ws_.qkv + static_cast<size_t>(row) * s_.qkv_stride + head * d;
                scores[h] = own_scores + h * ws_.score_stride;
                out[h] = static_cast<X*>(ws_.attended) + static_cast<size_t>(row) * s_.attended_stride + head * d;
                limits[h] = static_cast<int>(pass_.position) + row + 1;
            }
            attend_pairs<M, kHeadTile>(count, pages, kv_head, queries, limits, scores, d, out);
            unit += count;
        }
    }

    void logits() {
        const int first = static_cast<int>(pass_.first_logit_row);
        if (first >= rows_) return;
        const Matrix<M> head{static_cast<const W*>(m_.head), m_.vocab, m_.hidden, 1};
        const X* x = normalise(m_.final_norm, first);
        const Matrix<M> wrapped{static_cast<const W*>(m_.layers[0].qkv), s_.qkv, m_.hidden, 1};
        multiply(x, s_.hidden_stride, rows_ - first, head, start(wrapped), thread_, threads_,
                 [&](int row, int block, int count, const float* sums) {
                     float* out = pass_.logits + static_cast<size_t>(row) * m_.vocab;
                     const int begin = block * kLanes;
                     const int end = begin + count * kLanes < m_.vocab ? begin + count * kLanes : m_.vocab;
                     for (int i = begin; i < end; ++i) out[i] = sums[i - begin];
                 });
    }

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

template <class M>
void matmul_share(void* context, Team& team, int thread) {
    using X = typename M::Activation;
    MatmulJob& job = *static_cast<MatmulJob*>(context);
    const size_t stride = round_up(job.inputs, 32);
    X* x = static_cast<X*>(job.converted);
    const Share share(job.rows, thread, team.size());
    for (int row = share.begin; row < share.end; ++row)
        for (int i = 0; i < job.inputs; ++i) put(x + row * stride + i, job.x[static_cast<size_t>(row) * job.inputs + i]);
    team.barrier();
    const Matrix<M> matrix{static_cast<const typename M::Weight*>(job.weights), job.outputs, job.inputs, 1};
    multiply(x, stride, job.rows, matrix, matrix.start_of_share(thread, team.size()), thread, team.size(),
             [&](int row, int block, int count, const float* sums) {
                 const int begin = block * kLanes;
                 for (int i = begin; i < begin + count * kLanes && i < job.outputs; ++i)
                     job.out[static_cast<size_t>(row) * job.outputs + i] = sums[i - begin];
             });
}
