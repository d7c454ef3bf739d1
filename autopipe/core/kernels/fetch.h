// Fetching weights from memory ahead of their use. Included inside an isa_*.cpp.

// What a tile of rows fetches for the next ones: `blocks` blocks at `next` (null: nothing), of which this is tile `tile`
// of `tiles` that read the same blocks now. Each fetches a part: memory is the slower, so it must not pause while rows
// are computed.
struct Fetch {
    const char* next = nullptr;
    int tile = 0, tiles = 1, blocks = 0;
    size_t block_bytes = 0;
};

// A part in whole blocks: with more tiles than blocks, the last tiles fetch nothing.
struct Ahead {
    const char* from;
    int blocks;

    explicit Ahead(const Fetch& f) : from(nullptr), blocks(0) {
        if (f.next == nullptr) return;
        from = f.tiles == 1 ? f.next : f.next + f.tile * f.block_bytes;
        blocks = f.tiles == 1 ? f.blocks : f.tile < f.blocks ? 1 : 0;
    }
};
