// Python names of the decoder. The addresses of the model and of the pool are given once, those of a step with the step; sizes,
// and the ids that a step names, are checked before anything is read or written. The caller owns all memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "cpu/decoder.h"
#include "cpu/register.h"

namespace py = pybind11;

namespace pearl::cpu {
namespace {

constexpr std::uintptr_t kAlignment = 64;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

using Tensor = std::pair<std::uintptr_t, std::vector<std::int64_t>>;  // address, shape

Decoder* make(const std::string& dtype, std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t kv_heads,
              std::int64_t head_dim, std::int64_t vocabulary, float eps, const std::vector<std::int32_t>& windows,
              std::int64_t top_k, bool normalise, std::int64_t first_expert, bool adds_bias,
              const std::map<std::string, Tensor>& parameters, const Tensor& cos, const Tensor& sin, const Tensor& pool) {
    if (dtype != "float32" && dtype != "bfloat16") refuse("dtype=" + dtype + ": must be one of float32, bfloat16");
    const DType type = dtype == "float32" ? DType::f32 : DType::bf16;
    if (static_cast<std::int64_t>(windows.size()) != layers) refuse("windows: must be one for each layer");
    if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0)
        refuse("head_dim=" + std::to_string(head_dim) + ": must be even, 2 to " + std::to_string(kMaxHeadDim));
    if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0) refuse("heads: must be a multiple of kv_heads");
    if (cos.second.size() != 2 || cos.second[1] != head_dim || sin.second != cos.second)
        refuse("cos, sin: must be [positions, head_dim]");
    const std::vector<std::int64_t>& shape = pool.second;
    if (shape.size() != 6 || shape[0] != layers || shape[1] != 2 || shape[3] != kv_heads || shape[5] != head_dim)
        refuse("pool: must be [layers, 2, blocks, kv_heads, block_size, head_dim]");
    std::map<std::string, Parameter> plain;
    for (const auto& [name, tensor] : parameters) plain[name] = {pointer<const void>(tensor.first), tensor.second};
    const DecoderSizes sizes{type, hidden, layers, heads, kv_heads, head_dim, vocabulary, eps,
                             windows, top_k, normalise, first_expert, adds_bias};
    const RopeTables rope{pointer<const float>(cos.first), pointer<const float>(sin.first), cos.second[0]};
    return new Decoder(sizes, plain, rope, {pointer<void>(pool.first), shape[2], static_cast<std::int32_t>(shape[4])});
}

void* packed_memory(const Decoder& decoder, std::uintptr_t packed, std::int64_t bytes) {
    if (packed == 0 || packed % kAlignment != 0) refuse("packed: must be the address of memory aligned to 64 bytes");
    const auto needed = static_cast<std::int64_t>(decoder.packed_bytes());
    if (bytes < needed) refuse("packed: has " + std::to_string(bytes) + " bytes, must have " + std::to_string(needed));
    return pointer<void>(packed);
}

using Rows = std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

// (name, expert, first row, rows, columns, address, stride).
PlainRows rows_of(const Decoder& decoder, const Rows& rows) {
    const auto& [name, expert, row, count, columns, address, stride] = rows;
    if (address == 0 || stride < columns) refuse(name + ": must be the address of rows, one after the other");
    return decoder.rows_of(name, expert, row, count, columns, pointer<const void>(address), stride);
}

template <class T>
const T* array(const char* field, const Tensor& tensor, const std::vector<std::int64_t>& shape) {
    if (tensor.second != shape) refuse(std::string(field) + ": has another shape than the step says");
    return pointer<const T>(tensor.first);
}

// The step whose arrays these are. Every id in them is checked: a wrong one would be an access to somebody else's memory.
DecoderStep checked(const Decoder& decoder, const Tensor& stream, const Tensor& positions, const Tensor& slots,
                    const Tensor& starts, const Tensor& contexts, const Tensor& tables, std::uintptr_t layer_word,
                    std::int64_t layer_base) {
    if (tables.second.size() != 2 || contexts.second.size() != 1) refuse("block_tables: must be [sequences, blocks]");
    const std::int64_t sequences = contexts.second[0], width = tables.second[1];
    const std::int64_t tokens = positions.second.empty() ? 0 : positions.second[0];
    DecoderStep step;
    step.tokens = tokens;
    step.stream = const_cast<void*>(static_cast<const void*>(array<char>("stream", stream, {tokens, decoder.sizes().hidden})));
    step.positions = array<std::int64_t>("positions", positions, {tokens});
    step.slots = array<std::int64_t>("slot_mapping", slots, {tokens});
    step.batch.query_starts = array<std::int32_t>("query_starts", starts, {sequences + 1});
    step.batch.context_lens = array<std::int32_t>("context_lens", contexts, {sequences});
    step.batch.block_tables = array<std::int32_t>("block_tables", tables, {sequences, width});
    step.batch.table_stride = width;
    step.batch.sequences = static_cast<std::int32_t>(sequences);
    step.layer_word = pointer<std::int64_t>(layer_word);
    step.layer_base = layer_base;
    if (layer_word % sizeof(std::int64_t) != 0) refuse("layer_word: must be the address of an int64");
    const DecoderPool& pool = decoder.pool();
    for (std::int64_t t = 0; t < tokens; ++t) {
        if (step.positions[t] < 0 || step.positions[t] >= decoder.rope().positions)
            refuse("positions: " + std::to_string(step.positions[t]) + " must be below " +
                   std::to_string(decoder.rope().positions));
        if (step.slots[t] < 0 || step.slots[t] >= pool.blocks * pool.block_size)
            refuse("slot_mapping: " + std::to_string(step.slots[t]) + " is not in the pool");
    }
    if (step.batch.query_starts[0] != 0 || step.batch.query_starts[sequences] != tokens)
        refuse("query_starts: must begin with 0 and end with the number of tokens");
    for (std::int64_t s = 0; s < sequences; ++s) {
        const std::int64_t queries = step.batch.query_starts[s + 1] - step.batch.query_starts[s];
        const std::int64_t context = step.batch.context_lens[s];
        const std::int64_t blocks = (context + pool.block_size - 1) / pool.block_size;
        if (queries < 0 || context < queries || blocks > width)
            refuse("context_lens: " + std::to_string(context) + " does not fit the queries or the block table");
        for (std::int64_t n = 0; n < blocks; ++n) {
            const std::int32_t block = step.batch.block_tables[s * width + n];
            if (block < 0 || block >= pool.blocks) refuse("block_tables: " + std::to_string(block) + " is not in the pool");
        }
    }
    return step;
}

void check_hidden(const char* field, const Decoder& decoder, const Tensor& tensor, std::int64_t rows) {
    if (tensor.second != std::vector<std::int64_t>{rows, decoder.sizes().hidden})
        refuse(std::string(field) + ": must be [tokens, hidden]");
}

void check_last(const DecoderStep& step, const std::vector<std::int64_t>& rows) {
    std::int32_t s = 0;
    for (const std::int64_t row : rows) {
        while (s < step.batch.sequences && step.batch.query_starts[s + 1] <= row) ++s;
        if (row < 0 || s == step.batch.sequences || step.batch.query_starts[s + 1] != row + 1)
            refuse("rows: " + std::to_string(row) + " must be the last of a sequence, after the one before");
        ++s;
    }
}

// What `pack` puts where; refers to the memory of the rows.
struct Packing {
    std::vector<PlainRows> rows;
};

void register_step(py::module_& m) {
    using release = py::call_guard<py::gil_scoped_release>;
    m.def(
        "give_back", [](std::uintptr_t address, std::int64_t bytes) { give_back(pointer<const void>(address), bytes); },
        py::arg("address"), py::arg("bytes"), "Gives the whole pages of private memory back to the system.");
    py::class_<Packing>(m, "Packing", "Rows that were checked; refers to their memory.");
    py::class_<DecoderStep>(m, "DecoderStep", "A checked step; refers to the memory of its arrays.");
    py::class_<Decoder>(m, "Decoder", "A decoder over a pool (csrc/cpu/decoder.h). Tensors are (address, shape).")
        .def(py::init(&make), py::kw_only(), py::arg("dtype"), py::arg("hidden"), py::arg("layers"), py::arg("heads"),
             py::arg("kv_heads"), py::arg("head_dim"), py::arg("vocabulary"), py::arg("eps"), py::arg("windows"),
             py::arg("top_k"), py::arg("normalise"), py::arg("first_expert"), py::arg("adds_bias"), py::arg("parameters"),
             py::arg("cos"), py::arg("sin"), py::arg("pool"))
        .def_property_readonly("packed_bytes", &Decoder::packed_bytes, "Bytes of the memory of one version.")
        .def_property_readonly("packed_names", &Decoder::packed_names, "The parameters that are packed.")
        .def(
            "packing",
            [](const Decoder& self, const std::vector<Rows>& rows) {
                Packing packing;
                for (const Rows& some : rows) packing.rows.push_back(rows_of(self, some));
                return packing;
            },
            py::arg("rows"), "Checked rows: (name, expert, first row, rows, columns, address, elements between rows).")
        .def(
            "pack",
            [](const Decoder& self, const Packing& packing, std::uintptr_t packed, std::int64_t bytes) {
                self.pack(packing.rows, packed_memory(self, packed, bytes));
            },
            py::arg("packing"), py::arg("packed"), py::arg("bytes"), release(), "Packs the rows into that memory.")
        .def(
            "use",
            [](Decoder& self, std::uintptr_t packed, std::int64_t bytes) { self.use(packed_memory(self, packed, bytes)); },
            py::arg("packed"), py::arg("bytes"), "Serves what is packed there.")
        .def(
            "load",
            [](Decoder& self, std::uintptr_t packed, std::int64_t bytes, bool release_plain) {
                self.load(packed_memory(self, packed, bytes), release_plain);
            },
            py::arg("packed"), py::arg("bytes"), py::arg("release"), release(),
            "Packs all from the plain parameters, and uses it. `release`: the plain memory of what was packed is given back.")
        .def(
            "unpack",
            [](const Decoder& self, const Rows& rows, std::uintptr_t packed, std::int64_t bytes) {
                self.unpack(rows_of(self, rows), packed_memory(self, packed, bytes), pointer<void>(std::get<5>(rows)));
            },
            py::arg("rows"), py::arg("packed"), py::arg("bytes"), release(),
            "Writes rows of what is packed there to their address, one after the other.")
        .def("step", &checked, py::arg("stream"), py::arg("positions"), py::arg("slot_mapping"), py::arg("query_starts"),
             py::arg("context_lens"), py::arg("block_tables"), py::arg("layer_word") = 0, py::arg("layer_base") = 0)
        .def(
            "forward",
            [](Decoder& self, const DecoderStep& step, const Tensor& hidden) {
                check_hidden("hidden", self, hidden, step.tokens);
                const py::gil_scoped_release unlocked;
                self.forward(step, pointer<void>(hidden.first));
            },
            py::arg("step"), py::arg("hidden"), "One rank alone: all layers and the last norm, to `hidden`.")
        .def(
            "forward_last",
            [](Decoder& self, const DecoderStep& step, const std::vector<std::int64_t>& rows, const Tensor& hidden) {
                check_hidden("hidden", self, hidden, static_cast<std::int64_t>(rows.size()));
                check_last(step, rows);
                const py::gil_scoped_release unlocked;
                self.forward_last(step, rows, pointer<void>(hidden.first));
            },
            py::arg("step"), py::arg("rows"), py::arg("hidden"), "The same for rows that are each the last of its sequence.")
        .def(
            "half",
            [](Decoder& self, const DecoderStep& step, std::int64_t index, const Tensor& partial) {
                check_hidden("partial", self, partial, step.tokens);
                if (index < 0 || index >= 2 * self.sizes().layers) refuse("index: must be one of the half layers");
                const py::gil_scoped_release unlocked;
                self.half(step, index, pointer<void>(partial.first));
            },
            py::arg("step"), py::arg("index"), py::arg("partial"))
        .def(
            "finish",
            [](Decoder& self, const DecoderStep& step, const Tensor& partial, const Tensor& hidden) {
                check_hidden("partial", self, partial, step.tokens);
                check_hidden("hidden", self, hidden, step.tokens);
                const py::gil_scoped_release unlocked;
                self.finish(step, pointer<const void>(partial.first), pointer<void>(hidden.first));
            },
            py::arg("step"), py::arg("partial"), py::arg("hidden"))
        .def(
            "logits",
            [](Decoder& self, const Tensor& hidden, const Tensor& out) {
                const std::int64_t rows = out.second.empty() ? 0 : out.second[0];
                check_hidden("hidden", self, hidden, rows);
                if (out.second != std::vector<std::int64_t>{rows, self.sizes().vocabulary})
                    refuse("out: must be [rows, vocabulary]");
                const py::gil_scoped_release unlocked;
                self.logits(pointer<const void>(hidden.first), rows, pointer<float>(out.first));
            },
            py::arg("hidden"), py::arg("out"), "fp32 logits of final-normed hidden states.")
        .def(
            "take_profile",
            [](Decoder& self) {
                std::map<std::string, std::int64_t> spent;
                const auto nanoseconds = self.take_profile();
                for (std::size_t i = 0; i < kParts; ++i) spent[name(static_cast<Part>(i))] = nanoseconds[i];
                return spent;
            },
            "Nanoseconds per part of a step since the last call; the first call begins to count.");
}

}  // namespace

void register_decoder(py::module_& cpu) { register_step(cpu); }

}  // namespace pearl::cpu
