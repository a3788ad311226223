// Memory of a GPU at an address that stays while the memory itself is given back and taken again.
//
// Knows addresses and sizes only; what lies there is the caller's. Nothing is read or written here. A region waits for the
// device before its memory goes away, so no queued kernel can meet an address without memory.
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

    // A new open file for the memory that is there now, by which another process can map it; the caller closes it. Whoever has
    // the file, or has mapped it, keeps the memory from the device after give_back. std::runtime_error if there is none.
    int export_file() const;

    void give_back();  // no-op without memory
    void take();       // no-op with memory; its contents are undefined

private:
    int device_;
    std::size_t bytes_ = 0;
    unsigned long long address_ = 0;
    unsigned long long handle_ = 0;
    bool shareable_ = false;
};

// Another region's memory, of this process or another one of the machine, at an address of its own until it is closed.
class OpenedRegion {
public:
    // `file` came from export_file, of a region of `bytes` bytes, and stays the caller's. std::runtime_error says why it cannot
    // be mapped for `device`; then nothing is kept.
    OpenedRegion(int file, std::int64_t bytes, int device);
    ~OpenedRegion();
    OpenedRegion(const OpenedRegion&) = delete;
    OpenedRegion& operator=(const OpenedRegion&) = delete;

    std::uintptr_t address() const { return static_cast<std::uintptr_t>(address_); }  // 0: closed

    void close();  // does not wait: nothing that is queued may read it any more

private:
    std::size_t bytes_;
    int device_;
    unsigned long long address_ = 0;
};

}  // namespace pearl::memory
