// The virtual memory functions of the CUDA driver (CUDA C++ Programming Guide, "Virtual Memory Management"). Compiled for GPUs,
// but not yet run on one.
//
// The driver's functions are asked for by name, so that this links without libcuda and loads without a GPU.
#include "memory/device_region.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace pearl::memory {
namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

template <typename Function>
Function entry(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), "CUDA driver");
    if (result != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("CUDA driver: has no ") + name);
    return reinterpret_cast<Function>(found);
}

#define PEARL_ENTRY(name) decltype(&::name) name = entry<decltype(&::name)>(#name)

struct Driver {
    PEARL_ENTRY(cuDeviceGetAttribute);
    PEARL_ENTRY(cuGetErrorString);
    PEARL_ENTRY(cuMemAddressFree);
    PEARL_ENTRY(cuMemAddressReserve);
    PEARL_ENTRY(cuMemCreate);
    PEARL_ENTRY(cuMemGetAllocationGranularity);
    PEARL_ENTRY(cuMemMap);
    PEARL_ENTRY(cuMemRelease);
    PEARL_ENTRY(cuMemSetAccess);
    PEARL_ENTRY(cuMemUnmap);

    void check(CUresult status, const char* what, std::size_t bytes) const {
        if (status == CUDA_SUCCESS) return;
        const char* text = nullptr;
        cuGetErrorString(status, &text);
        throw std::runtime_error(std::string(what) + " of " + std::to_string(bytes) + " bytes: " + (text ? text : "failed"));
    }
};

#undef PEARL_ENTRY

const Driver& driver() {
    static const Driver functions;
    return functions;
}

// The caller's current device is what it was when this goes.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
};

CUmemAllocationProp kind(int device) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

std::vector<CUmemAccessDesc> readers(int device) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<CUmemAccessDesc> found;
    for (int other = 0; other < count; ++other) {
        int reaches = other == device;
        if (!reaches) check(cudaDeviceCanAccessPeer(&reaches, other, device), "cudaDeviceCanAccessPeer");
        if (!reaches) continue;
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = other;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        found.push_back(access);
    }
    return found;
}

}  // namespace

std::string region_refusal(int device) {
    try {
        const OnDevice here(device);
        int there = 0;
        const auto status =
            driver().cuDeviceGetAttribute(&there, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
        if (status != CUDA_SUCCESS || !there) return "the device or its driver has no virtual memory management";
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

DeviceRegion::DeviceRegion(std::int64_t bytes, int device) : device_(device) {
    if (bytes <= 0) throw std::invalid_argument("bytes=" + std::to_string(bytes) + ": must be > 0");
    const OnDevice here(device);
    const auto prop = kind(device);
    std::size_t step = 0;
    const auto wanted = static_cast<std::size_t>(bytes);
    driver().check(driver().cuMemGetAllocationGranularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity",
                   wanted);
    bytes_ = (wanted + step - 1) / step * step;
    CUdeviceptr address = 0;
    driver().check(driver().cuMemAddressReserve(&address, bytes_, step, 0, 0), "addresses", bytes_);
    address_ = address;
    try {
        take();
    } catch (...) {
        driver().cuMemAddressFree(address_, bytes_);
        throw;
    }
}

DeviceRegion::~DeviceRegion() {
    // Errors say that CUDA has gone already, with all memory.
    try {
        give_back();
        driver().cuMemAddressFree(address_, bytes_);
    } catch (const std::runtime_error&) {
    }
}

void DeviceRegion::take() {
    if (mapped()) return;
    const OnDevice here(device_);
    const auto prop = kind(device_);
    CUmemGenericAllocationHandle handle = 0;
    driver().check(driver().cuMemCreate(&handle, bytes_, &prop, 0), "memory", bytes_);
    const CUresult placed = driver().cuMemMap(address_, bytes_, 0, handle, 0);
    if (placed != CUDA_SUCCESS) {
        driver().cuMemRelease(handle);
        driver().check(placed, "mapping", bytes_);
    }
    const auto access = readers(device_);
    const CUresult opened = driver().cuMemSetAccess(address_, bytes_, access.data(), access.size());
    if (opened != CUDA_SUCCESS) {
        driver().cuMemUnmap(address_, bytes_);
        driver().cuMemRelease(handle);
        driver().check(opened, "access", bytes_);
    }
    handle_ = handle;
}

void DeviceRegion::give_back() {
    if (!mapped()) return;
    const OnDevice here(device_);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    driver().check(driver().cuMemUnmap(address_, bytes_), "unmapping", bytes_);
    driver().check(driver().cuMemRelease(handle_), "release", bytes_);
    handle_ = 0;
}

}  // namespace pearl::memory
