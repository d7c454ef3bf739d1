// Reads memory as fast as it comes: the yardstick for a forward, which must read every weight once.
#include <cstddef>
#include <cstdint>

#include "common.h"
#include "team.h"

namespace {

struct Read {
    const uint64_t* data;
    size_t words;
    uint64_t sink;
};

void read_share(void* context, autopipe::Team& team, int thread) {
    Read& job = *static_cast<Read*>(context);
    const size_t begin = job.words / 8 * thread / team.size() * 8, end = job.words / 8 * (thread + 1) / team.size() * 8;
    // One load per cache line is all that streaming costs; the rest of the line comes with it.
    uint64_t sum = 0;
    for (size_t i = begin; i < end; i += 8) {
        __builtin_prefetch(job.data + i + 512, 0, 2);
        sum ^= job.data[i];
    }
    if (sum == 0x9e3779b97f4a7c15u) job.sink = sum;  // keeps the loads
}

}  // namespace

// Reads `bytes` (a multiple of 64) once, split over the team.
AUTOPIPE_API void autopipe_read(const void* data, size_t bytes, void* team) {
    Read job{static_cast<const uint64_t*>(data), bytes / 8, 0};
    static_cast<autopipe::Team*>(team)->run(read_share, &job);
}
