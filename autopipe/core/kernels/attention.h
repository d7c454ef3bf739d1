// Attention of new rows over the KV pages. Included inside an isa_*.cpp, after matmul.h.
//
// A page holds page_tokens positions of every layer: [layers][keys of all KV heads, values of all KV heads].
// Keys of a head, bf16: [positions/16][head_dim/2][16][2], so that 16 scores are 16 outputs of a packed product.
// Values of a head, bf16: [head_dim/16][positions/2][16][2]: likewise, with positions as inputs. fp32: no pairs.
// Scores, probabilities and sums are fp32. Each row meets its keys in order of position: the same bits however many
// rows are computed together.

template <class M>
struct PageView {
    using Cache = typename M::Cache;
    const Sizes& sizes;
    int num_kv_heads, page_tokens, layer;
    void* const* pages;

    Cache* keys(int page, int kv_head) const {
        const size_t per_layer = num_kv_heads * (sizes.key_elements + sizes.value_elements);
        return static_cast<Cache*>(pages[page]) + layer * per_layer + kv_head * sizes.key_elements;
    }
    Cache* values(int page, int kv_head) const {
        const size_t per_layer = num_kv_heads * (sizes.key_elements + sizes.value_elements);
        return static_cast<Cache*>(pages[page]) + layer * per_layer + num_kv_heads * sizes.key_elements +
               kv_head * sizes.value_elements;
    }
};

// Pair layout index of (input, output) in one block of 16 outputs.
template <class M>
inline size_t packed_index(int input, int lane) {
    constexpr int n = M::kCacheInputs;
    return static_cast<size_t>(input / n) * n * kLanes + lane * n + input % n;
}

// `count` numbers as the cache holds them.
template <class C>
inline void as_cached(C* out, const float* x, int count) {
    if (count == kLanes)
        store_as(out, load(x));
    else
        for (int i = 0; i < count; ++i) put(out + i, x[i]);
}

template <class M>
void append(const PageView<M>& view, int position, int kv_head, int head_dim, const float* key, const float* value) {
    using C = typename M::Cache;
    constexpr int kPair = M::kCacheInputs;
    const int page = position / view.page_tokens, slot = position % view.page_tokens;
    C* keys = view.keys(page, kv_head) + static_cast<size_t>(slot / kLanes) * head_dim * kLanes;
    C* values = view.values(page, kv_head);
    for (int first = 0; first < head_dim; first += kLanes) {
        const int count = head_dim - first < kLanes ? head_dim - first : kLanes;
        C cached[kLanes];
        as_cached(cached, key + first, count);
        for (int i = 0; i < count; i += kPair)
            std::memcpy(keys + packed_index<M>(first + i, slot % kLanes), cached + i, kPair * sizeof(C));
        as_cached(cached, value + first, count);
        C* block = values + static_cast<size_t>(first / kLanes) * view.page_tokens * kLanes;
        for (int i = 0; i < count; ++i) block[packed_index<M>(slot, i)] = cached[i];
    }
}

// scores[h][0..16 N) = query h . 16 N keys, for H queries.
template <class M, int H, int N>
void score_blocks(const float* const* queries, const typename M::Cache* keys, int head_dim, float* const* scores) {
    using C = typename M::CacheMode;
    const size_t block = static_cast<size_t>(head_dim) * kLanes;
    Vec acc[H][N];
    for (int h = 0; h < H; ++h)
        for (int b = 0; b < N; ++b) acc[h][b] = zero();
    for (int i = 0; i < head_dim; i += C::kInputs) add_blocks<C>(acc, keys + i * kLanes, block, queries, i);
    for (int h = 0; h < H; ++h)
        for (int b = 0; b < N; ++b) store(scores[h] + b * kLanes, acc[h][b]);
}

// Turns scores[0..count) into e^(score - max); the rest of the last block becomes 0. Returns their sum.
inline float soften(float* scores, int count) {
    const int padded = round_up(count, kLanes);
    for (int i = count; i < padded; ++i) scores[i] = -3.0e38f;
    Vec best = load(scores);
    for (int i = kLanes; i < padded; i += kLanes) best = max(best, load(scores + i));
    const Vec top = splat(max_lanes(best));
    Vec sum = zero();
    for (int i = 0; i < padded; i += kLanes) {
        store(scores + i, exponential(sub(load(scores + i), top)));
        if (i + kLanes > count)
            for (int j = count; j < padded; ++j) scores[j] = 0.0f;
        sum = add(sum, load(scores + i));
    }
    return sum_lanes(sum);
}

// acc[h][b] += probabilities h . values of block b, over positions [begin, end) of one page, in order.
template <class M, int H, int N>
inline void weigh(Vec (&acc)[H][N], const float* const* scores, const typename M::Cache* values, size_t block_stride,
                  int begin, int end) {
    using C = typename M::CacheMode;
    int i = begin;
    for (; i + C::kInputs <= end; i += C::kInputs) {
        for (int b = 0; b < N; ++b) add_block<C>(acc, b, values + b * block_stride + i * kLanes, scores, i);
    }
    if (i < end) {  // half a pair: the position after it is not this row's to see
        for (int b = 0; b < N; ++b) {
            const typename C::Loaded loaded = C::load_weights(values + b * block_stride + i * kLanes);
            for (int h = 0; h < H; ++h) acc[h][b] = C::accumulate_first(acc[h][b], loaded, splat(scores[h][i]));
        }
    }
}

// H (row, query head) pairs of one KV head. limits[h]: number of keys pair h sees; sums[h]: of its probabilities.
template <class M, int H, int N>
void weigh_values(const PageView<M>& view, int kv_head, int first_block, const int* limits, float* const* scores,
                  const float* sums, int head_dim, typename M::Activation* const* out) {
    const size_t block_stride = static_cast<size_t>(view.page_tokens) * kLanes;
    int common = limits[0], longest = limits[0];
    for (int h = 1; h < H; ++h) {
        common = limits[h] < common ? limits[h] : common;
        longest = limits[h] > longest ? limits[h] : longest;
    }
    common = common / 2 * 2;  // whole pairs together, the rest one by one
    Vec acc[H][N];
    for (int h = 0; h < H; ++h)
        for (int b = 0; b < N; ++b) acc[h][b] = zero();
    for (int page = 0; page * view.page_tokens < longest; ++page) {
        const int base = page * view.page_tokens;
        const typename M::Cache* values = view.values(page, kv_head) + first_block * block_stride;
        const int together = common - base < view.page_tokens ? common - base : view.page_tokens;
        const float* here[H];
        for (int h = 0; h < H; ++h) here[h] = scores[h] + base;
        if (together > 0) weigh<M, H, N>(acc, here, values, block_stride, 0, together);
        for (int h = 0; h < H; ++h) {
            const int end = limits[h] - base < view.page_tokens ? limits[h] - base : view.page_tokens;
            const int begin = together > 0 ? together : 0;
            if (begin >= end) continue;
            Vec alone[1][N];
            for (int b = 0; b < N; ++b) alone[0][b] = acc[h][b];
            weigh<M, 1, N>(alone, here + h, values, block_stride, begin, end);
            for (int b = 0; b < N; ++b) acc[h][b] = alone[0][b];
        }
    }
    for (int h = 0; h < H; ++h) {
        const Vec total = splat(sums[h]);
        for (int b = 0; b < N; ++b) {
            float lanes[kLanes];
            store(lanes, div(acc[h][b], total));
            const int first = (first_block + b) * kLanes;
            for (int i = first; i < head_dim && i < first + kLanes; ++i) put(out[h] + i, lanes[i - first]);
        }
    }
}

template <class M, int H>
void attend(const PageView<M>& view, int kv_head, const float* const* queries, const int* limits,
            float* const* scores, int head_dim, typename M::Activation* const* out) {
    int longest = 0;
    for (int h = 0; h < H; ++h) longest = limits[h] > longest ? limits[h] : longest;
    for (int key = 0; key < longest;) {
        const int page = key / view.page_tokens, slot = key % view.page_tokens;
        const typename M::Cache* keys = view.keys(page, kv_head) + static_cast<size_t>(slot) * head_dim;
        float* here[H];
        for (int h = 0; h < H; ++h) here[h] = scores[h] + key;
        if (key + (kKeyBlocks - 1) * kLanes < longest) {  // both on this page: a page is whole pairs of blocks
            score_blocks<M, H, kKeyBlocks>(queries, keys, head_dim, here);
            key += kKeyBlocks * kLanes;
        } else {
            score_blocks<M, H, 1>(queries, keys, head_dim, here);
            key += kLanes;
        }
    }
    float sums[H];
    for (int h = 0; h < H; ++h) sums[h] = soften(scores[h], limits[h]);
    const int blocks = view.sizes.value_blocks;
    int block = 0;
    for (; block + kValueBlocks <= blocks; block += kValueBlocks)
        weigh_values<M, H, kValueBlocks>(view, kv_head, block, limits, scores, sums, head_dim, out);
    for (; block < blocks; ++block)
        weigh_values<M, H, 1>(view, kv_head, block, limits, scores, sums, head_dim, out);
}

template <class M, int H>
void attend_pairs(int count, const PageView<M>& view, int kv_head, const float* const* queries, const int* limits,
                  float* const* scores, int head_dim, typename M::Activation* const* out) {
    if (count == H)
        attend<M, H>(view, kv_head, queries, limits, scores, head_dim, out);
    else if constexpr (H > 1)
        attend_pairs<M, H - 1>(count, view, kv_head, queries, limits, scores, head_dim, out);
}
