// Brings matrices into the layout of model.h.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "common.h"
#include "model.h"

namespace autopipe {
namespace {

constexpr int kTile = 16;  // steps at a time: a cache line of every row is read at once, as rows often share a cache set
constexpr size_t kWorthAThread = size_t{1} << 20;

struct PackJob {
    const void* source;
    int outputs, inputs;
    void* out;
    size_t stride;  // bytes from one block to the next
};

// Blocks [begin, end). U holds the inputs of a step: two bf16 or one fp32, N of type T.
template <class U, class T, int N>
void pack_blocks(const PackJob& job, int begin, int end) {
    const int whole = job.inputs / N, steps = (job.inputs + N - 1) / N;
    U tile[kTile][kLanes];
    for (int block = begin; block < end; ++block) {
        const int lanes = std::min(kLanes, job.outputs - block * kLanes);
        const T* rows = static_cast<const T*>(job.source) + static_cast<size_t>(block) * kLanes * job.inputs;
        char* out = static_cast<char*>(job.out) + block * job.stride;
        std::memset(tile, 0, sizeof(tile));
        for (int step = 0; step < steps; step += kTile) {
            const int count = std::min(kTile, steps - step), full = std::min(count, whole - step);
            for (int lane = 0; lane < lanes; ++lane) {
                const T* row = rows + static_cast<size_t>(lane) * job.inputs + static_cast<size_t>(step) * N;
                for (int i = 0; i < full; ++i) std::memcpy(&tile[i][lane], row + i * N, sizeof(U));
                if (full < count) {  // the last input has no partner
                    tile[full][lane] = 0;
                    std::memcpy(&tile[full][lane], row + full * N, sizeof(T));
                }
            }
            std::memcpy(out + static_cast<size_t>(step) * sizeof(tile[0]), tile, count * sizeof(tile[0]));
        }
    }
}

}  // namespace
}  // namespace autopipe

// A matrix [outputs, inputs] of numbers of 2 (bf16) or 4 bytes (fp32), packed into blocks `stride` bytes apart.
AUTOPIPE_API void autopipe_pack(const void* source, int number_bytes, int outputs, int inputs, void* out, size_t stride,
                                int threads) {
    using namespace autopipe;
    const PackJob job{source, outputs, inputs, out, stride};
    const auto pack = number_bytes == 2 ? pack_blocks<uint32_t, uint16_t, 2> : pack_blocks<uint32_t, uint32_t, 1>;
    const int blocks = blocks_of(outputs);
    const size_t bytes = static_cast<size_t>(outputs) * inputs * number_bytes;
    const int helpers = static_cast<int>(std::min<size_t>(std::max(threads, 1), 1 + bytes / kWorthAThread)) - 1;
    const auto begin_of = [&](int share) { return static_cast<int>(int64_t{blocks} * share / (helpers + 1)); };
    std::vector<std::thread> others;
    int shares = 0;  // that have a thread of their own
    try {
        others.reserve(helpers);
        for (; shares < helpers; ++shares) others.emplace_back(pack, job, begin_of(shares), begin_of(shares + 1));
    } catch (...) {  // no more threads: the caller does the rest
    }
    pack(job, begin_of(shares), blocks);
    for (std::thread& other : others) other.join();
}
