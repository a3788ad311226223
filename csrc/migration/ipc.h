// Memory of a GPU shared between processes of one node (CUDA IPC).
//
// Knows allocations and addresses only. Whoever opens memory closes it, once: the driver counts neither.
#pragma once

#include <cstdint>
#include <string>

namespace pearl::migration {

// Bytes that any process of this node may open, and where in that allocation the exported address lies.
struct SharedMemory {
    std::string handle;
    std::int64_t offset;
    std::int64_t bytes;
};

// The allocation around `address`. std::runtime_error carries CUDA's own message, as for memory that cannot be shared
// (allocations of cudaMalloc can, those of the virtual memory functions cannot).
SharedMemory export_memory(std::uintptr_t address);

// Maps another process's allocation for `device` and returns its address here. Memory of the own process is refused by CUDA.
std::uintptr_t open_memory(const std::string& handle, int device);

void close_memory(std::uintptr_t address);

}  // namespace pearl::migration
