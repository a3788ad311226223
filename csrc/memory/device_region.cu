// The virtual memory functions of the CUDA driver (CUDA C++ Programming Guide, "Virtual Memory Management"). Compiled for GPUs,
// but not yet run on one.
//
// The driver's functions are asked for by name, so that this links without libcuda and loads without a GPU.
#include "memory/device_region.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>

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
    PEARL_ENTRY(cuMemExportToShareableHandle);
    PEARL_ENTRY(cuMemGetAllocationGranularity);
    PEARL_ENTRY(cuMemImportFromShareableHandle);
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

constexpr auto FILE_HANDLE = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmemAllocationProp kind(int device, bool shareable) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    prop.requestedHandleTypes = shareable ? FILE_HANDLE : CU_MEM_HANDLE_TYPE_NONE;
    return prop;
}

bool has(CUdevice_attribute attribute, int device) {
    int there = 0;
    return driver().cuDeviceGetAttribute(&there, attribute, device) == CUDA_SUCCESS && there;
}

// Memory that other processes can be let into where that can be had; `shareable` says whether it is.
CUmemGenericAllocationHandle create(std::size_t bytes, int device, bool& shareable) {
    CUmemGenericAllocationHandle handle = 0;
    shareable = has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
    auto prop = kind(device, shareable);
    CUresult made = driver().cuMemCreate(&handle, bytes, &prop, 0);
    if (shareable && made != CUDA_SUCCESS && made != CUDA_ERROR_OUT_OF_MEMORY) {  // as where a container forbids it
        shareable = false;
        prop = kind(device, shareable);
        made = driver().cuMemCreate(&handle, bytes, &prop, 0);
    }
    driver().check(made, "memory", bytes);
    return handle;
}

CUmemAccessDesc access_of(int device) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return access;
}

std::vector<CUmemAccessDesc> readers(int device) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<CUmemAccessDesc> found;
    for (int other = 0; other < count; ++other) {
        int reaches = other == device;
        if (!reaches) check(cudaDeviceCanAccessPeer(&reaches, other, device), "cudaDeviceCanAccessPeer");
        if (reaches) found.push_back(access_of(other));
    }
    return found;
}

std::size_t granularity(int device) {
    std::size_t step = 0;
    const auto prop = kind(device, false);
    const auto status = driver().cuMemGetAllocationGranularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    driver().check(status, "granularity", 0);
    return step;
}

CUdeviceptr reserve(std::size_t bytes, std::size_t step) {
    CUdeviceptr address = 0;
    driver().check(driver().cuMemAddressReserve(&address, bytes, step, 0, 0), "addresses", bytes);
    return address;
}

// Puts memory at reserved addresses, for these devices; if that fails, nothing is there.
void place(CUdeviceptr address, std::size_t bytes, CUmemGenericAllocationHandle handle,
           const std::vector<CUmemAccessDesc>& access) {
    driver().check(driver().cuMemMap(address, bytes, 0, handle, 0), "mapping", bytes);
    const CUresult opened = driver().cuMemSetAccess(address, bytes, access.data(), access.size());
    if (opened == CUDA_SUCCESS) return;
    driver().cuMemUnmap(address, bytes);
    driver().check(opened, "access", bytes);
}

}  // namespace

std::string region_refusal(int device) {
    try {
        const OnDevice here(device);
        if (!has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device))
            return "the device or its driver has no virtual memory management";
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

DeviceRegion::DeviceRegion(std::int64_t bytes, int device) : device_(device) {
    if (bytes <= 0) throw std::invalid_argument("bytes=" + std::to_string(bytes) + ": must be > 0");
    const OnDevice here(device);
    const std::size_t step = granularity(device);
    bytes_ = (static_cast<std::size_t>(bytes) + step - 1) / step * step;
    address_ = reserve(bytes_, step);
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
    const auto handle = create(bytes_, device_, shareable_);
    try {
        place(address_, bytes_, handle, readers(device_));
    } catch (...) {
        driver().cuMemRelease(handle);
        throw;
    }
    handle_ = handle;
}

int DeviceRegion::export_file() const {
    if (!mapped()) throw std::runtime_error("the region has no memory");
    if (!shareable_) throw std::runtime_error("the device or its driver gives no file for its memory");
    int file = -1;
    driver().check(driver().cuMemExportToShareableHandle(&file, handle_, FILE_HANDLE, 0), "file for memory", bytes_);
    ::fcntl(file, F_SETFD, FD_CLOEXEC);
    return file;
}

void DeviceRegion::give_back() {
    if (!mapped()) return;
    const OnDevice here(device_);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    driver().check(driver().cuMemUnmap(address_, bytes_), "unmapping", bytes_);
    driver().check(driver().cuMemRelease(handle_), "release", bytes_);
    handle_ = 0;
}

OpenedRegion::OpenedRegion(int file, std::int64_t bytes, int device)
    : bytes_(static_cast<std::size_t>(bytes)), device_(device) {
    if (bytes <= 0) throw std::invalid_argument("bytes=" + std::to_string(bytes) + ": must be > 0");
    const OnDevice here(device);
    CUmemGenericAllocationHandle handle = 0;
    const auto number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(file));
    driver().check(driver().cuMemImportFromShareableHandle(&handle, number, FILE_HANDLE), "import of memory", bytes_);
    CUdeviceptr address = 0;
    try {
        address = reserve(bytes_, granularity(device));
        place(address, bytes_, handle, {access_of(device)});
    } catch (...) {
        if (address != 0) driver().cuMemAddressFree(address, bytes_);
        driver().cuMemRelease(handle);
        throw;
    }
    driver().cuMemRelease(handle);  // what is mapped stays
    address_ = address;
}

OpenedRegion::~OpenedRegion() {
    try {
        close();
    } catch (const std::runtime_error&) {  // CUDA has gone already
    }
}

void OpenedRegion::close() {
    if (address_ == 0) return;
    const OnDevice here(device_);
    driver().check(driver().cuMemUnmap(address_, bytes_), "unmapping", bytes_);
    driver().cuMemAddressFree(address_, bytes_);
    address_ = 0;
}

}  // namespace pearl::memory
