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
