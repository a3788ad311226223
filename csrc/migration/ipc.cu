// CUDA IPC of ipc.h. Compiled for GPUs, but not yet run on one.
//
// A handle is of a whole allocation, of which a tensor may be a part (torch's allocator cuts large ones up). Only the driver
// knows where an allocation begins; its function is asked for by name, so that this links without libcuda and loads without a
// GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>

#include "migration/ipc.h"

namespace pearl::migration {
namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);

AddressRange address_range() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12000, cudaEnableDefault, &found), "CUDA driver");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("CUDA driver: has no cuMemGetAddressRange");
    return reinterpret_cast<AddressRange>(entry);
}

}  // namespace

SharedMemory export_memory(std::uintptr_t address) {
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    const CUresult status = address_range()(&base, &bytes, static_cast<CUdeviceptr>(address));
    if (status != CUDA_SUCCESS)
        throw std::runtime_error("address=" + std::to_string(address) + ": no memory of a GPU (CUDA driver error " +
                                 std::to_string(static_cast<int>(status)) + ")");
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)), "cudaIpcGetMemHandle");
    return {std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)), static_cast<std::int64_t>(address - base),
            static_cast<std::int64_t>(bytes)};
}

std::uintptr_t open_memory(const std::string& handle, int device) {
    cudaIpcMemHandle_t memory;
    if (handle.size() != sizeof(memory))
        throw std::invalid_argument("handle of " + std::to_string(handle.size()) + " bytes: must have " +
                                    std::to_string(sizeof(memory)));
    std::memcpy(&memory, handle.data(), sizeof(memory));
    check(cudaSetDevice(device), "cudaSetDevice");
    void* address = nullptr;
    check(cudaIpcOpenMemHandle(&address, memory, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return reinterpret_cast<std::uintptr_t>(address);
}

void close_memory(std::uintptr_t address) {
    check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(address)), "cudaIpcCloseMemHandle");
}

}  // namespace pearl::migration
