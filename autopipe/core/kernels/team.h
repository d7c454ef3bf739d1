// A team of threads that runs one job at a time, the caller being thread 0, and a barrier between a job's phases.
// Threads sleep between jobs, unless kept awake. Waits spin for some microseconds, then yield, then sleep: another
// process may want the core, and the thread waited for may be the one that was put aside.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace autopipe {

// A counter threads wait on: `advance` wakes everybody who waits for it to leave its old value.
class Gate {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void advance();
    // While `awake` is set the wait never sleeps; it yields.
    void wait_while(uint32_t old, const std::atomic<bool>* awake = nullptr);

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

class Team {
   public:
    using Job = void (*)(void* context, Team& team, int thread);

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    // Runs job(context, team, thread) on every thread; returns when all are done. One caller at a time.
    void run(Job job, void* context);
    // Whether threads wait for the next job without sleeping: for many short jobs in quick succession.
    void keep_awake(bool awake) { awake_.store(awake, std::memory_order_relaxed); }
    // All threads of the running job meet here.
    void barrier();

   private:
    void serve(int thread);
    void dismiss();

    const int size_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    bool closing_ = false;
    std::atomic<bool> awake_{false};
    alignas(64) Gate start_;
    alignas(64) Gate phase_;
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::thread> threads_;
};

}  // namespace autopipe
