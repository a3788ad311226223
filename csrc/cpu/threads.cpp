// See threads.h.
#include "cpu/threads.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace pearl::cpu {
namespace {

constexpr auto kHelperSpin = std::chrono::microseconds(60);  // between two loops of one step a helper stays awake
constexpr auto kCallerSpin = std::chrono::microseconds(20);  // a chunk that takes longer is one whose helper does not run
constexpr int kSpinsPerLook = 32;

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kMostCredit = std::chrono::milliseconds(2);
constexpr int kRestPerLoss = 10;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Processor time of the calling thread.
Clock::duration own_time() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// A 32-bit number that threads can sleep on until it changes.
class Word {
public:
    std::uint32_t load() const { return value_.load(std::memory_order_acquire); }
    void store(std::uint32_t value) { value_.store(value, std::memory_order_relaxed); }

    // Adds 1; wakes up to `count` sleepers, with a system call only if there are any. (Both orders are sequential: either
    // the sleeper sees the new value, or this sees the sleeper.)
    void advance(int count) {
        value_.fetch_add(1);
        if (sleepers_.load() > 0) wake(count);
    }

    // Until the value is not `seen`: looks for as long as `spin`, then sleeps.
    void wait_while(std::uint32_t seen, std::chrono::microseconds spin) {
        const auto until = Clock::now() + spin;
        while (Clock::now() < until)
            for (int i = 0; i < kSpinsPerLook; ++i, pause())
                if (load() != seen) return;
        ++sleepers_;
        while (load() == seen) sleep(seen);
        --sleepers_;
    }

private:
#if defined(__linux__)
    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
    void sleep(std::uint32_t seen) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake(int count) { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }
#else
    void sleep(std::uint32_t seen) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return load() != seen; });
    }
    void wake(int) {
        { std::lock_guard lock(mutex_); }
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif
    std::atomic<std::uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
};

thread_local bool inside = false;  // of a chunk

struct Loop {
    ChunkFunction run = nullptr;
    void* context = nullptr;
    std::int64_t chunks = 0;
};

// The helpers and the loop that they share with a caller. A loop may be read only by who holds a claim on one of its chunks:
// the caller does not leave, and so changes nothing, before all claimed chunks are done.
class Pool {
public:
    explicit Pool(int helpers) : helpers_(helpers) {}

    int helpers() const { return helpers_; }

    // False if the helpers are better left alone for now.
    bool worth_it() const { return rest_until_ == Clock::time_point() || Clock::now() >= rest_until_; }

    void run(const Loop& loop) {
        loop_ = loop;
        done_.store(0);
        const auto began = Clock::now();
        const auto own = own_time();
        left_.store(loop.chunks, std::memory_order_release);
        started_.advance(static_cast<int>(std::min<std::int64_t>(helpers_, loop.chunks - 1)));
        const std::int64_t ours = work();
        const auto worked = own_time() - own;
        for (;;) {
            const std::uint32_t done = done_.load();
            if (done == static_cast<std::uint32_t>(loop.chunks)) break;
            done_.wait_while(done, kCallerSpin);
        }
        settle(worked * (loop.chunks - ours) / std::max<std::int64_t>(ours, 1), Clock::now() - began - worked);
        if (failed_.load(std::memory_order_relaxed)) {
            failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(error_, nullptr));
        }
    }

    void help() {
        inside = true;
        for (std::uint32_t seen = 0; !ended_.load();) {
            started_.wait_while(seen, kHelperSpin);
            seen = started_.load();
            work();
        }
    }

    void end() {
        ended_.store(true);
        started_.advance(helpers_);
    }

private:
    // What helpers did saves the caller time. One that loses its core within a chunk, or that takes the caller's, costs it
    // time: `lost` is all in which the caller did no chunk. If that is more than was saved, the machine is busy, and the
    // caller goes on alone for so long that the loss does not matter, and then tries again.
    void settle(Clock::duration saved, Clock::duration lost) {
        credit_ = std::min(credit_ + saved - lost, kMostCredit);
        rest_until_ = credit_ < Clock::duration::zero() ? Clock::now() - kRestPerLoss * credit_ : Clock::time_point();
        credit_ = std::max(credit_, Clock::duration::zero());
    }

    // Returns how many chunks it ran.
    std::int64_t work() {
        for (std::int64_t ran = 0;; ++ran) {
            std::int64_t left = left_.load(std::memory_order_relaxed);
            do
                if (left == 0) return ran;
            while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
            run_one(loop_.chunks - left);
            done_.advance(1);
        }
    }

    void run_one(std::int64_t chunk) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
            loop_.run(loop_.context, chunk);
        } catch (...) {
            std::lock_guard lock(error_mutex_);
            if (!error_) error_ = std::current_exception();
            failed_.store(true);
        }
    }

    const int helpers_;
    Loop loop_;
    Clock::duration credit_{0};
    Clock::time_point rest_until_{};
    alignas(64) std::atomic<std::int64_t> left_{0};
    alignas(64) Word started_;
    alignas(64) Word done_;
    std::atomic<bool> failed_{false}, ended_{false};
    std::exception_ptr error_;
    std::mutex error_mutex_;
};

// What the process has. Never destroyed: helpers asleep at exit may still refer to it.
struct Process {
    std::atomic<int> threads{1};
    std::atomic<bool> busy{false};
    std::shared_ptr<Pool> pool;  // of whoever has set busy
};

Process& process() {
    static Process* const one = [] {
        auto* made = new Process;
        // The child of a fork has none of the helpers, and nobody who would give `busy` back. The old pool is left alone: its
        // counts are those of threads that are not there.
        pthread_atfork(nullptr, nullptr, [] {
            new (&process().pool) std::shared_ptr<Pool>();
            process().busy.store(false);
            inside = false;
        });
        return made;
    }();
    return *one;
}

// Starts a thread that takes no signals (they are for the threads of Python). False if there can be no more threads.
bool start_helper(const std::shared_ptr<Pool>& pool) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
        std::thread([pool] { pool->help(); }).detach();
    } catch (const std::system_error&) {
        started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

Pool& pool_of(Process& p, int helpers) {
    if (!p.pool || p.pool->helpers() != helpers) {
        if (p.pool) p.pool->end();
        p.pool = std::make_shared<Pool>(helpers);
        for (int i = 0; i < helpers && start_helper(p.pool); ++i) {
        }
    }
    return *p.pool;
}

void run_alone(const Loop& loop) {
    for (std::int64_t chunk = 0; chunk < loop.chunks; ++chunk) loop.run(loop.context, chunk);
}

}  // namespace

void set_threads(int count) {
    if (count < 1) throw std::invalid_argument("threads=" + std::to_string(count) + ": must be >= 1");
    process().threads.store(count);
}

int threads() { return process().threads.load(); }

void run_chunks(std::int64_t chunks, ChunkFunction run, void* context) {
    Process& p = process();
    const int helpers = p.threads.load(std::memory_order_relaxed) - 1;
    const Loop loop{run, context, chunks};
    if (helpers == 0 || chunks < 2 || inside || p.busy.exchange(true, std::memory_order_acquire)) return run_alone(loop);
    struct Leave {
        Process& p;
        ~Leave() {
            inside = false;
            p.busy.store(false, std::memory_order_release);
        }
    } leave{p};
    inside = true;
    Pool& pool = pool_of(p, helpers);
    if (pool.worth_it())
        pool.run(loop);
    else
        run_alone(loop);
}

}  // namespace pearl::cpu
