// Python names of the block copies. Numbers in, nothing kept: the caller owns all memory and keeps it alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "migration/block_copy.h"
#include "migration/ipc.h"
#include "migration/register.h"

namespace py = pybind11;

namespace pearl::migration {
namespace {

// How a planned copy is carried out: on host threads, or on a CUDA stream.
template <typename Copy>
void gather(const BlockPool& pool, const BlockIds& ids, std::uintptr_t address, std::int64_t bytes, const Copy& copy) {
    const auto count = static_cast<std::int64_t>(ids.size());
    const BlockPool flat = make_flat(pool, address, bytes, count);
    copy(pool, flat, plan(pool, ids, flat, flat_ids(count)));
}

template <typename Copy>
void scatter(const BlockPool& pool, const BlockIds& ids, std::uintptr_t address, std::int64_t bytes, const Copy& copy) {
    const auto count = static_cast<std::int64_t>(ids.size());
    const BlockPool flat = make_flat(pool, address, bytes, count);
    copy(flat, pool, plan(flat, flat_ids(count), pool, ids));
}

template <typename Copy>
void copy_between(const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids,
                  const Copy& copy) {
    copy(src, dst, plan(src, src_ids, dst, dst_ids));
}

auto on_host(int threads) {
    return [threads](const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs) {
        copy_host(src, dst, runs, threads);
    };
}

void register_host(py::module_& m) {
    using release = py::call_guard<py::gil_scoped_release>;
    m.def(
        "gather_blocks",
        [](const BlockPool& pool, const BlockIds& ids, std::uintptr_t buffer, std::int64_t bytes, int threads) {
            gather(pool, ids, buffer, bytes, on_host(threads));
        },
        py::arg("pool"), py::arg("block_ids"), py::arg("buffer"), py::arg("bytes"), py::arg("threads") = 1, release(),
        "Pool blocks, in the order of block_ids, to the buffer [rows][len(block_ids)][block_bytes].");
    m.def(
        "scatter_blocks",
        [](const BlockPool& pool, const BlockIds& ids, std::uintptr_t buffer, std::int64_t bytes, int threads) {
            scatter(pool, ids, buffer, bytes, on_host(threads));
        },
        py::arg("pool"), py::arg("block_ids"), py::arg("buffer"), py::arg("bytes"), py::arg("threads") = 1, release(),
        "The inverse of gather_blocks; no block may be named twice.");
    m.def(
        "copy_blocks",
        [](const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids, int threads) {
            copy_between(src, src_ids, dst, dst_ids, on_host(threads));
        },
        py::arg("src"), py::arg("src_ids"), py::arg("dst"), py::arg("dst_ids"), py::arg("threads") = 1, release(),
        "Block src_ids[i] of src to block dst_ids[i] of dst, in every row.");
}

#ifdef PEARL_CUDA
auto on_device(int device, std::uintptr_t stream) {
    return [device, stream](const BlockPool& src, const BlockPool& dst, const std::vector<Run>& runs) {
        copy_device(src, dst, runs, device, stream);
    };
}

void register_cuda(py::module_& m) {
    using release = py::call_guard<py::gil_scoped_release>;
    m.def(
        "gather_blocks_cuda",
        [](const BlockPool& pool, const BlockIds& ids, std::uintptr_t buffer, std::int64_t bytes, int device,
           std::uintptr_t stream) { gather(pool, ids, buffer, bytes, on_device(device, stream)); },
        py::arg("pool"), py::arg("block_ids"), py::arg("buffer"), py::arg("bytes"), py::arg("device"), py::arg("stream"),
        release(), "gather_blocks, queued on a stream.");
    m.def(
        "scatter_blocks_cuda",
        [](const BlockPool& pool, const BlockIds& ids, std::uintptr_t buffer, std::int64_t bytes, int device,
           std::uintptr_t stream) { scatter(pool, ids, buffer, bytes, on_device(device, stream)); },
        py::arg("pool"), py::arg("block_ids"), py::arg("buffer"), py::arg("bytes"), py::arg("device"), py::arg("stream"),
        release(), "scatter_blocks, queued on a stream.");
    m.def(
        "copy_blocks_cuda",
        [](const BlockPool& src, const BlockIds& src_ids, const BlockPool& dst, const BlockIds& dst_ids, int device,
           std::uintptr_t stream) { copy_between(src, src_ids, dst, dst_ids, on_device(device, stream)); },
        py::arg("src"), py::arg("src_ids"), py::arg("dst"), py::arg("dst_ids"), py::arg("device"), py::arg("stream"),
        release(), "copy_blocks, queued on a stream.");
    m.def(
        "export_memory",
        [](std::uintptr_t address) {
            const SharedMemory memory = export_memory(address);
            return py::make_tuple(py::bytes(memory.handle), memory.offset, memory.bytes);
        },
        py::arg("address"),
        "(handle, offset, bytes): the allocation that an address of a GPU's memory lies in, how far in, and its size.");
    m.def(
        "open_memory",
        [](const std::string& handle, int device) {
            py::gil_scoped_release unlocked;
            return open_memory(handle, device);
        },
        py::arg("handle"), py::arg("device"), "Address, as `device` sees it, of an allocation exported by another process.");
    m.def("close_memory", &close_memory, py::arg("address"), release(), "Undoes open_memory.");
}
#endif

}  // namespace

void register_apis(py::module_& m) {
    py::class_<BlockPool>(m, "BlockPool",
                          "Memory seen as [rows][num_blocks][block_bytes], rows and blocks so many bytes apart.")
        .def(py::init(&make_pool), py::arg("address"), py::arg("bytes"), py::arg("rows"), py::arg("row_stride"),
             py::arg("num_blocks"), py::arg("block_stride"), py::arg("block_bytes"));
    register_host(m);
#ifdef PEARL_CUDA
    register_cuda(m);
    m.attr("has_cuda") = true;
#else
    m.attr("has_cuda") = false;
#endif
}

}  // namespace pearl::migration
