// The C interface: thread teams, models, forwards, and plain products for tests.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "common.h"
#include "model.h"
#include "team.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace autopipe {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_size(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Zeroed memory on a huge-page border, or null. Huge pages: streaming weights would otherwise miss the TLB every 4 KiB.
// Pages come zeroed from the system when they are first touched, by whichever thread fills them.
void* allocate(size_t bytes) {
    const size_t rounded = round_size(bytes ? bytes : 1, kHugePage);
#if defined(__linux__)
    void* mapped = mmap(nullptr, rounded + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const begin = static_cast<char*>(mapped);
    const size_t before = round_size(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
    if (before != 0) munmap(begin, before);
    if (before != kHugePage) munmap(begin + before + rounded, kHugePage - before);
    madvise(begin + before, rounded, MADV_HUGEPAGE);
    return begin + before;
#else
    void* memory = nullptr;
    if (posix_memalign(&memory, kHugePage, rounded) != 0) return nullptr;
    std::memset(memory, 0, rounded);
    return memory;
#endif
}

void release(void* memory, size_t bytes) {
#if defined(__linux__)
    munmap(memory, round_size(bytes ? bytes : 1, kHugePage));
#else
    (void)bytes;
    std::free(memory);
#endif
}

void* allocate_small(size_t bytes) {
    void* memory = nullptr;
    const size_t rounded = round_size(bytes ? bytes : 1, 64);
    if (posix_memalign(&memory, 64, rounded) != 0) throw std::bad_alloc();
    std::memset(memory, 0, rounded);
    return memory;
}

// A model ready to run on one team. The description, weights and pages belong to the caller.
class Model {
   public:
    Model(const ModelDescription& description, Team& team) : model_(description), sizes_(description), team_(team) {
        const size_t threads = team.size(), word = sizeof(float);
        workspace_.residual = take<float>(kMaxRows * sizes_.hidden_stride * word);
        workspace_.normed = take<void>(kMaxRows * sizes_.hidden_stride * word);
        workspace_.normed_private = take<void>(threads * kPrivateRows * sizes_.hidden_stride * word);
        workspace_.qkv = take<float>(kMaxRows * sizes_.qkv_stride * word);
        workspace_.attended = take<void>(kMaxRows * sizes_.attended_stride * word);
        workspace_.gated = take<void>(kMaxRows * sizes_.intermediate_stride * word);
        workspace_.reduced_stride = round_size(most_rank(description), 32);
        if (workspace_.reduced_stride != 0) workspace_.reduced = take<void>(kMaxRows * workspace_.reduced_stride * word);
        if (model_.screen == nullptr) return;
        workspace_.tops = take<float>(static_cast<size_t>(kMaxRows) * blocks_of(model_.vocab) * word);
        workspace_.floors = take<float>(threads * kMaxRows * word);
        workspace_.best = take<Best>(threads * kMaxRows * sizeof(Best));
    }
    ~Model() {
        for (void* memory : {static_cast<void*>(workspace_.residual), workspace_.normed, workspace_.normed_private,
                             static_cast<void*>(workspace_.qkv), workspace_.attended, workspace_.gated,
                             workspace_.reduced,
                             static_cast<void*>(workspace_.scores), static_cast<void*>(workspace_.tops),
                             static_cast<void*>(workspace_.floors), static_cast<void*>(workspace_.best)})
            std::free(memory);
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    void forward(const Pass& pass) {
        place_rows(pass);
        const int64_t rows = static_cast<int64_t>(places_.size());
        int64_t done_logits = 0;
        for (int64_t done = 0; done < rows; done += kMaxRows) {
            ForwardJob job{&model_, &sizes_, &workspace_, &pass};
            job.rows = static_cast<int>(rows - done < kMaxRows ? rows - done : kMaxRows);
            job.ids = pass.ids + done;
            job.places = places_.data() + done;
            job.keys_before = keys_before_.data() + done;
            job.first_row = static_cast<int>(done);
            job.logit_rows = pass.logit_rows + done_logits;
            const int64_t first_logit = done_logits;
            job.best_only = pass.best != nullptr;
            job.logits = job.best_only ? nullptr : pass.logits + done_logits * model_.vocab;
            job.num_logits = 0;
            while (done_logits < pass.num_logits && pass.logit_rows[done_logits] < done + job.rows) {
                ++done_logits;
                ++job.num_logits;
            }
            team_.run(entry(job.best_only), &job);
            if (job.best_only) collect_best(job.num_logits, pass.best + first_logit);
        }
    }

   private:
    template <class T>
    static T* take(size_t bytes) { return static_cast<T*>(allocate_small(bytes)); }

    static size_t most_rank(const ModelDescription& description) {
        int32_t most = 0;
        for (int l = 0; l < description.num_layers; ++l) {
            const LayerWeights& w = description.layers[l];
            for (const Adapter* a : {&w.qkv_adapter, &w.output_adapter, &w.gate_up_adapter, &w.down_adapter})
                if (a->down != nullptr) most = std::max(most, a->rank);
        }
        return static_cast<size_t>(most);
    }

    // Threads have shares of the vocabulary in ascending order, so of equal logits the lowest id is found first.
    void collect_best(int rows, Best* best) const {
        for (int row = 0; row < rows; ++row) {
            best[row] = workspace_.best[row];
            for (int thread = 1; thread < team_.size(); ++thread) {
                const Best& other = workspace_.best[thread * kMaxRows + row];
                if (other.id >= 0 && (best[row].id < 0 || other.logit > best[row].logit)) best[row] = other;
            }
        }
    }

    void place_rows(const Pass& pass) {
        places_.clear();
        keys_before_.assign(1, 0);
        int64_t longest = 0;
        for (int64_t index = 0; index < pass.num_segments; ++index) {
            const Segment& segment = pass.segments[index];
            for (int64_t position = segment.position; position < segment.position + segment.rows; ++position) {
                places_.push_back({static_cast<int32_t>(position), static_cast<int32_t>(index)});
                keys_before_.push_back(keys_before_.back() + position + 1);
            }
            longest = std::max(longest, segment.position + segment.rows);
        }
        make_room_for_scores(longest);
    }

    void make_room_for_scores(int64_t positions) {
        const size_t needed = round_size(static_cast<size_t>(positions), 1024);
        if (needed <= workspace_.score_stride) return;
        std::free(workspace_.scores);
        workspace_.scores = take<float>(team_.size() * kHeadTile * needed * sizeof(float));
        workspace_.score_stride = needed;
    }

    Team::Job entry(bool screens) const {
#if AUTOPIPE_X86
        if (screens && model_.isa == kIsaAvx512) return forward_avx512vnni;
        if (model_.format >= kFormatInt8)
            return has_vnni() && model_.isa != kIsaAvx2 ? forward_avx512vnni : forward_avx2;
        switch (model_.isa) {
            case kIsaAvx512Bf16: return forward_avx512bf16;
            case kIsaAvx512: return forward_avx512;
        }
        return forward_avx2;
#else
        return nullptr;
#endif
    }

    const ModelDescription model_;
    const Sizes sizes_;
    Team& team_;
    Workspace workspace_{};
    std::vector<RowPlace> places_;
    std::vector<int64_t> keys_before_;
};

}  // namespace
}  // namespace autopipe

using autopipe::Model;
using autopipe::Team;

AUTOPIPE_API void* autopipe_allocate(size_t bytes) { return autopipe::allocate(bytes); }
AUTOPIPE_API void autopipe_free(void* memory, size_t bytes) { autopipe::release(memory, bytes); }

// Null when the threads cannot be started.
AUTOPIPE_API void* autopipe_team_create(int threads) {
    try {
        return new Team(threads);
    } catch (...) {
        return nullptr;
    }
}
AUTOPIPE_API void autopipe_team_keep_awake(void* team, int awake) { static_cast<Team*>(team)->keep_awake(awake != 0); }
AUTOPIPE_API void autopipe_team_destroy(void* team) { delete static_cast<Team*>(team); }

// Elements of one KV page.
AUTOPIPE_API size_t autopipe_page_elements(const autopipe::ModelDescription* description) {
    const autopipe::Sizes sizes(*description);
    return (sizes.key_elements + sizes.value_elements) * description->num_kv_heads * description->num_layers;
}

// Whether a model of this instruction set and format can have a screen.
AUTOPIPE_API int autopipe_can_screen(int isa, int format) {
#if AUTOPIPE_X86
    return format < kFormatInt8 && (isa == kIsaAvx2 || (isa != 0 && autopipe::has_vnni()));
#else
    return 0;
#endif
}

AUTOPIPE_API void* autopipe_model_create(const autopipe::ModelDescription* description, void* team) {
    try {
        return new Model(*description, *static_cast<Team*>(team));
    } catch (...) {
        return nullptr;
    }
}
AUTOPIPE_API void autopipe_model_destroy(void* model) { delete static_cast<Model*>(model); }

// 0, or 1 when memory is short. Ids and positions must be in range, and the pages must be there: Python checks.
AUTOPIPE_API int autopipe_forward(void* model, const autopipe::Pass* pass) {
    try {
        static_cast<Model*>(model)->forward(*pass);
        return 0;
    } catch (...) {
        return 1;
    }
}

AUTOPIPE_API int autopipe_matmul(int isa, autopipe::MatmulJob* job, void* team) {
#if AUTOPIPE_X86
    Team& threads = *static_cast<Team*>(team);
    if (job->format >= kFormatInt8) {
        threads.run(autopipe::has_vnni() && isa != kIsaAvx2 ? autopipe::matmul_avx512vnni : autopipe::matmul_avx2, job);
        return 0;
    }
    switch (isa) {
        case kIsaAvx512Bf16: threads.run(autopipe::matmul_avx512bf16, job); return 0;
        case kIsaAvx512: threads.run(autopipe::matmul_avx512, job); return 0;
        case kIsaAvx2: threads.run(autopipe::matmul_avx2, job); return 0;
    }
#endif
    return 1;
}
