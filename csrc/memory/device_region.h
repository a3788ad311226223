// Memory of a GPU at an address that stays while the memory itself is given back and taken again.
//
// Knows addresses and sizes only; what lies there is the caller's. Nothing is read or written here. Every call waits for the
// device first where memory goes away, so no queued kernel can meet an address without memory.
#pragma once

#include <cstdint>
#include <string>

namespace pearl::memory {

// Why `device` cannot have such regions, empty if it can.
std::string region_refusal(int device);

class DeviceRegion {
public:
    // Reserves addresses and takes memory for them, both rounded up to what the device hands out (2 MiB, as a rule), which is
    // readable by all GPUs that can reach this one. std::runtime_error says what there is not; then nothing is kept.
    DeviceRegion(std::int64_t bytes, int device);
    ~DeviceRegion();
    DeviceRegion(const DeviceRegion&) = delete;
    DeviceRegion& operator=(const DeviceRegion&) = delete;

    std::uintptr_t address() const { return static_cast<std::uintptr_t>(address_); }
    std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }
    bool mapped() const { return handle_ != 0; }

    void give_back();  // no-op without memory
    void take();       // no-op with memory; its contents are undefined

private:
    int device_;
    std::size_t bytes_ = 0;
    unsigned long long address_ = 0;
    unsigned long long handle_ = 0;
};

}  // namespace pearl::memory
