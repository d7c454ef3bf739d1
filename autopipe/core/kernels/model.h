// What a forward needs: the C structs Python fills (structs.py mirrors them), and the buffers kept between calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"

namespace autopipe {

constexpr int kLanes = 16;        // outputs of a weight block; floats of a vector
constexpr int kMaxRows = 256;     // rows computed in one pass over the weights
constexpr int kHeadTile = 6;      // at most so many (row, query head) pairs share one read of the keys
constexpr int kPrivateRows = 4;   // up to here each thread normalises all rows for itself instead of waiting

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int blocks_of(int outputs) { return (outputs + kLanes - 1) / kLanes; }

// What LoRA adds to a product: up (down x). Several matrices that are one here (q, k and v) have an adapter each: their
// downs are one matrix, one after another, and each block of `up` reads only its own of the results. Without `down` there
// is none; quantised weights have none.
struct Adapter {
    const void* down;         // packed [rank, inputs]
    const void* up;           // packed [outputs, width]; blocks in the order of the matrix it belongs to
    const int32_t* first;     // [blocks of up]: the first of the `width` results of `down` that a block reads
    int32_t rank;
    int32_t width;
};

// Matrices are packed in blocks of 16 outputs: bf16 [outputs/16][inputs/2][16][2], fp32 [outputs/16][inputs][16], zero
// padded. Vectors are fp32, padded with zeros to a multiple of 32.
struct LayerWeights {
    const void* qkv;          // rows of q, k and v, one after another
    const void* output;       // o_proj
    const void* gate_up;      // blocks of gate and up by turns
    const void* down;
    const float* input_norm;
    const float* mlp_norm;
    const float* q_norm;      // [head_dim] or null
    const float* k_norm;      // [head_dim] or null
    const float* qkv_bias;    // [outputs of qkv] or null
    Adapter qkv_adapter, output_adapter, gate_up_adapter, down_adapter;
};

struct ModelDescription {
    int32_t isa;              // AutopipeIsa
    int32_t format;           // AutopipeFormat of the weights; the KV cache is fp32 beside fp32 weights, else bf16
    int32_t num_layers;
    int32_t hidden;
    int32_t intermediate;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t vocab;
    int32_t page_tokens;      // positions per KV page, a multiple of 32
    float norm_epsilon;
    float attention_scale;
    const LayerWeights* layers;
    const float* final_norm;
    const void* head;         // packed; beside int4 weights in int8
    const void* embedding;    // [vocab, hidden] row-major, fp32 or bf16; null: read from `head` (tied, not quantised)
    const void* screen;       // the head once more in int8, for screen.h; null: passes with `best` are not allowed
    const float* screen_norms;  // of its rows, and of what they are off by: [2][vocab, rounded up to 16]
};

// The largest logit of a row, and the lowest id that has it; -1: no logit is a number.
struct Best {
    float logit;
    int32_t id;
};

// Consecutive tokens of one sequence.
struct Segment {
    int64_t rows;
    int64_t position;         // of the first one
    void* const* pages;       // the sequence's KV pages; page i holds positions i*page_tokens ...
};

// One call: the tokens of all segments, one segment after another. Each segment is of another sequence.
struct Pass {
    const int64_t* ids;
    const Segment* segments;
    int64_t num_segments;
    const float* rope_cos;    // [positions, head_dim/2]
    const float* rope_sin;
    const int64_t* logit_rows;  // rows whose logits are wanted, ascending
    int64_t num_logits;
    float* logits;            // [num_logits, vocab]
    Best* best;               // [num_logits]; not null: the best logits are wanted, `logits` is not used
};

struct Sizes {
    int hidden_stride, intermediate_stride, attended, attended_stride, qkv, qkv_stride, value_blocks;
    size_t key_elements, value_elements;  // of one page, layer and KV head

    explicit Sizes(const ModelDescription& m)
        : hidden_stride(round_up(m.hidden, 32)),
          intermediate_stride(round_up(m.intermediate, 32)),
          attended(m.num_heads * m.head_dim),
          attended_stride(round_up(attended, 32)),
          qkv((m.num_heads + 2 * m.num_kv_heads) * m.head_dim),
          qkv_stride(round_up(qkv, 32)),
          value_blocks(blocks_of(m.head_dim)),
          key_elements(static_cast<size_t>(m.page_tokens) * m.head_dim),
          value_elements(static_cast<size_t>(m.page_tokens) * value_blocks * kLanes) {}
};

// Activations. Their padding is zero from the start and stays so.
struct Workspace {
    float* residual;         // [rows, hidden_stride]
    void* normed;            // [rows, hidden_stride] for all threads
    void* normed_private;    // [threads][kPrivateRows, hidden_stride]
    float* qkv;              // [rows, qkv_stride]
    void* attended;          // [rows, attended_stride]
    void* gated;             // [rows, intermediate_stride]
    void* reduced;           // [rows, reduced_stride]: what an adapter's `down` makes of the rows; null: no adapters
    size_t reduced_stride;
    float* scores;           // [threads][kHeadTile][score_stride]
    size_t score_stride;
    float* tops;             // of screen.h: [kMaxRows][blocks of the head]
    float* floors;           // [threads][kMaxRows]
    Best* best;              // [threads][kMaxRows]
};

// Where a row of a pass belongs.
struct RowPlace {
    int32_t position;
    int32_t segment;
};

class Team;

// At most kMaxRows rows of a pass, computed in one sweep over the weights.
struct ForwardJob {
    const ModelDescription* model;
    const Sizes* sizes;
    const Workspace* workspace;
    const Pass* pass;
    int rows;
    const int64_t* ids;
    const RowPlace* places;
    const int64_t* keys_before;  // [rows + 1]: keys that the rows before each row meet, to share the work out
    const int64_t* logit_rows;   // of the pass
    int first_row;               // of the pass
    int num_logits;
    float* logits;
    bool best_only;
};

// One thread's share of a job, by instruction set; compiled in isa_*.cpp.
void forward_avx512vnni(void* job, Team& team, int thread);  // also what needs integer products beside other weights
void forward_avx512bf16(void* job, Team& team, int thread);
void forward_avx512(void* job, Team& team, int thread);
void forward_avx2(void* job, Team& team, int thread);

// Plain products: out[rows, outputs] = x[rows, inputs] times packed weights, plus the bias.
struct MatmulJob {
    int32_t format;          // AutopipeFormat of the weights
    int32_t rows, inputs, outputs;
    int32_t bf16_rows;       // 1: x and out are bf16; 0: fp32
    const void* x;           // [rows, inputs]
    const void* weights;     // packed
    const float* bias;       // [outputs] or null
    void* out;               // [rows, outputs]
    void* converted;         // room for x, padded: [rows, round_up(inputs, 32)] floats, zeroed
};
void matmul_avx512vnni(void* job, Team& team, int thread);  // quantised weights only
void matmul_avx512bf16(void* job, Team& team, int thread);
void matmul_avx512(void* job, Team& team, int thread);
void matmul_avx2(void* job, Team& team, int thread);

}  // namespace autopipe
