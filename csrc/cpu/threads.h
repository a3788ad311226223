// Helper threads for loops over independent chunks.
//
// `parallel` runs the chunks on the calling thread and on helpers that come along: chunks are claimed one by one, and the
// caller waits only for chunks that a helper has claimed, never for a helper to appear, so a helper that another process
// keeps from running costs nothing. One that is interrupted within a chunk does: where helpers cost more time than they save,
// the caller does without them for a while. Idle helpers spin for some microseconds, then sleep.
//
// Who gets which chunk is a matter of chance: chunks must not depend on it. A call from inside a chunk, or while another
// thread is in `parallel`, runs its chunks alone. After a fork the child starts helpers of its own at its first call.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pearl::cpu {

// Threads that work on a loop, the caller among them; 1 at the start. Helpers are started by the first loop that can use
// them. Throws std::invalid_argument below 1.
void set_threads(int count);
int threads();

using ChunkFunction = void (*)(void* context, std::int64_t chunk);

// run(context, chunk) for each chunk of 0 .. chunks-1. What a chunk throws is thrown here, once all claimed chunks have
// ended (the first of several; chunks that nobody has claimed by then are left out).
void run_chunks(std::int64_t chunks, ChunkFunction run, void* context);

template <class Function>
static inline void parallel(std::int64_t chunks, Function&& run_chunk) {
    using Plain = std::remove_reference_t<Function>;
    run_chunks(
        chunks, [](void* context, std::int64_t chunk) { (*static_cast<Plain*>(context))(chunk); },
        const_cast<void*>(static_cast<const void*>(&run_chunk)));
}

}  // namespace pearl::cpu
