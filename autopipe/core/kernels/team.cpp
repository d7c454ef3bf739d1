#include "team.h"

#include "common.h"

#if AUTOPIPE_X86
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace autopipe {
namespace {

constexpr int kSpins = 600;   // about 40 microseconds: longer than an ordinary imbalance between threads
constexpr int kYields = 100;  // then let others have the core, still awake

inline void pause() {
#if AUTOPIPE_X86
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

#if defined(__linux__)
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "futex works on plain 32-bit words");

void sleep_while(std::atomic<uint32_t>& word, uint32_t old) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

}  // namespace

void Gate::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(value_);
}

void Gate::wait_while(uint32_t old, const std::atomic<bool>* awake) {
    for (int i = 0; i < kSpins; ++i) {
        if (value() != old) return;
        pause();
    }
    for (int64_t i = 0; i < kYields || (awake != nullptr && awake->load(std::memory_order_relaxed)); ++i) {
        if (value() != old) return;
        std::this_thread::yield();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) sleep_while(value_, old);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

Team::Team(int threads) : size_(threads < 1 ? 1 : threads) {
    try {
        threads_.reserve(size_ - 1);
        for (int thread = 1; thread < size_; ++thread) threads_.emplace_back(&Team::serve, this, thread);
    } catch (...) {  // the system gives no more
        dismiss();
        throw;
    }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
    closing_ = true;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Team::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        start_.wait_while(seen, &awake_);
        ++seen;
        if (closing_) return;
        job_(context_, *this, thread);
        barrier();
    }
}

void Team::run(Job job, void* context) {
    job_ = job;
    context_ = context;
    if (size_ > 1) start_.advance();
    job(context, *this, 0);
    barrier();
}

void Team::barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.advance();
    } else {
        phase_.wait_while(phase);
    }
}

}  // namespace autopipe
