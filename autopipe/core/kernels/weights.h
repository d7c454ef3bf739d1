// Weights as they lie in memory, one block of 16 outputs after another, and how they become vectors. A step is 64 bytes
// of a block: one input of fp32, two of bf16. Included inside an isa_*.cpp, after its simd_*.h.

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
    template <int Input>
    static Vec load_weights_of(const float* p) { return load(p); }
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
    template <int Input>
    static Vec load_weights_of(const uint16_t* p) { return widen_one<Input>(p); }
    struct Input {
        Vec even, odd;
    };
    static Input load_input(const float* p) { return {splat(p[0]), splat(p[1])}; }
    static Vec accumulate(Vec acc, const Loaded& w, const Input& x) {
        return fma(w.odd, x.odd, fma(w.even, x.even, acc));
    }
    static Vec accumulate_first(Vec acc, const Loaded& w, Vec x) { return fma(w.even, x, acc); }
};

// What a tile of rows fetches for the next ones: `blocks` blocks at `next` (null: nothing), of which this is tile `tile`
// of `tiles` that read the same blocks now. Each fetches a part: memory is the slower, so it must not pause while rows
// are computed.
struct Fetch {
    const char* next;
    int tile, tiles, blocks;
    size_t block_bytes;
};

// A part in whole blocks.
struct Ahead {
    const char* from;
    int blocks;

    Ahead(const char* first, int count) : from(first), blocks(count) {}
    // What is fetched beside blocks [first, first + count) of the tile.
    Ahead of(int first, int count, size_t block_bytes) const {
        const int left = blocks - first;
        return left <= 0 ? Ahead(nullptr, 0) : Ahead(from + first * block_bytes, left < count ? left : count);
    }
    explicit Ahead(const Fetch& f) : from(nullptr), blocks(0) {
        if (f.next == nullptr) return;
        from = f.tiles == 1 ? f.next : f.next + f.tile * f.block_bytes;
        blocks = f.tiles == 1 ? f.blocks : f.tile < f.blocks ? 1 : 0;
    }
};
