// A decoder's parameters: which there are, and where the matrices lie once they are packed. See decoder.h.
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <stdexcept>
#include <utility>

#include "cpu/decoder.h"

namespace pearl::cpu {
namespace {

constexpr std::int64_t kStreamBytes = 8 << 20;  // a version that is larger has no place in the caches anyway

// A matrix [rows, columns], or a stack of `count` of them.
struct Shape {
    std::int64_t count, rows, columns;

    explicit Shape(const Parameter& matrix)
        : count(matrix.shape.size() == 3 ? matrix.shape[0] : 1),
          rows(matrix.shape[matrix.shape.size() - 2]),
          columns(matrix.shape.back()) {}
};

std::int64_t packed_lines(const Shape& shape, DType dtype, bool halves) {
    return lines(static_cast<std::int64_t>(packed_bytes(shape.rows, shape.columns, dtype, halves)));
}

std::string shown(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (const std::int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
    return text + "]";
}

// Takes parameters out of the map by name and shape.
class Reader {
  public:
    explicit Reader(const std::map<std::string, Parameter>& parameters) : parameters_(parameters) {}

    bool has(const std::string& name) const { return parameters_.count(name) != 0; }

    // -1 in `shape`: any size.
    Parameter take(const std::string& name, const std::vector<std::int64_t>& shape) const {
        const auto found = parameters_.find(name);
        if (found == parameters_.end()) throw std::invalid_argument(name + ": is missing");
        const std::vector<std::int64_t>& own = found->second.shape;
        bool fits = own.size() == shape.size();
        for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 ? own[i] > 0 : own[i] == shape[i];
        if (!fits) throw std::invalid_argument(name + ": is " + shown(own) + ", must be " + shown(shape) + " (-1: any size)");
        return found->second;
    }

    const void* vector(const std::string& name, std::int64_t size) const { return take(name, {size}).data; }

    const void* vector_if_any(const std::string& name, std::int64_t size) const {
        return has(name) ? vector(name, size) : nullptr;
    }

  private:
    const std::map<std::string, Parameter>& parameters_;
};

}  // namespace

void give_back(const void* data, std::int64_t bytes) {
#ifdef __linux__
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)), size = static_cast<std::uintptr_t>(bytes);
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t first = (address + page - 1) / page * page, end = (address + size) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
#else
    (void)data, (void)bytes;
#endif
}

Decoder::Decoder(const DecoderSizes& sizes, const std::map<std::string, Parameter>& parameters, const RopeTables& rope,
                 const DecoderPool& pool)
    : sizes_(sizes), rope_(rope), pool_(pool) {
    const Reader reader(parameters);
    const std::int64_t hidden = sizes.hidden, dim = sizes.head_dim;
    const std::int64_t queries = sizes.heads * dim, all = (sizes.heads + 2 * sizes.kv_heads) * dim;
    for (std::int64_t i = 0; i < sizes.layers; ++i) {
        const std::string at = "layers." + std::to_string(i) + ".";
        Layer layer{};
        layer.input_norm = reader.vector(at + "input_norm.weight", hidden);
        layer.post_norm = reader.vector(at + "post_norm.weight", hidden);
        layer.q_norm = reader.vector_if_any(at + "q_norm.weight", dim);
        layer.k_norm = reader.vector_if_any(at + "k_norm.weight", dim);
        layer.qkv.plain = reader.take(at + "qkv.weight", {all, hidden});
        layer.qkv_bias = reader.vector_if_any(at + "qkv.bias", all);
        layer.o.plain = reader.take(at + "o.weight", {hidden, queries});
        layer.has_experts = reader.has(at + "router.weight");
        layer.gate_up.halves = true;
        if (sizes.adds_bias) layer.o_bias = reader.vector_if_any(at + "o.bias", hidden);
        if (layer.has_experts) {
            layer.router.plain = reader.take(at + "router.weight", {-1, hidden});
            layer.gate_up.plain = reader.take(at + "experts.gate_up", {-1, -1, hidden});
            const std::vector<std::int64_t>& stack = layer.gate_up.plain.shape;
            layer.down.plain = reader.take(at + "experts.down", {stack[0], hidden, stack[1] / 2});
            if (sizes.top_k < 1 || sizes.first_expert + stack[0] > layer.router.plain.shape[0])
                throw std::invalid_argument(at + "router.weight: has fewer experts than there are here");
        } else {
            layer.gate_up.plain = reader.take(at + "gate_up.weight", {-1, hidden});
            layer.down.plain = reader.take(at + "down.weight", {hidden, layer.gate_up.plain.shape[0] / 2});
            layer.gate_up_bias = reader.vector_if_any(at + "gate_up.bias", layer.gate_up.plain.shape[0]);
            if (sizes.adds_bias) layer.down_bias = reader.vector_if_any(at + "down.bias", hidden);
        }
        layers_.push_back(std::move(layer));
    }
    last_norm_ = reader.vector("norm.weight", hidden);
    tied_ = !reader.has("lm_head.weight");
    const std::string head = tied_ ? "embed.weight" : "lm_head.weight";
    head_.plain = reader.take(head, {sizes.vocabulary, hidden});
    place(head, head_);
    for (std::int64_t i = 0; i < sizes.layers; ++i) {
        const std::string at = "layers." + std::to_string(i) + ".";
        Layer& layer = layers_[static_cast<std::size_t>(i)];
        place(at + "qkv.weight", layer.qkv);
        place(at + "o.weight", layer.o);
        place(at + (layer.has_experts ? "experts.gate_up" : "gate_up.weight"), layer.gate_up);
        place(at + (layer.has_experts ? "experts.down" : "down.weight"), layer.down);
        if (layer.has_experts) place(at + "router.weight", layer.router);
    }
}

// Where the matrix will lie in the memory of a version.
void Decoder::place(const std::string& name, Matrix& matrix) {
    const Shape shape(matrix.plain);
    const std::int64_t each = packed_lines(shape, sizes_.dtype, matrix.halves);
    place_of_[name] = places_.size();
    places_.push_back({name, &matrix, packed_bytes_, each});
    packed_bytes_ += shape.count * each;
}

std::size_t Decoder::packed_bytes() const { return static_cast<std::size_t>(packed_bytes_); }

std::vector<std::string> Decoder::packed_names() const {
    std::vector<std::string> names;
    for (const Place& place : places_) names.push_back(place.name);
    return names;
}

PackedMatrix Decoder::packed_at(const Place& place, std::int64_t expert, void* packed) const {
    const Shape shape(place.matrix->plain);
    char* data = static_cast<char*>(packed) + place.offset + expert * place.each;
    return {data, shape.rows, shape.columns, sizes_.dtype, place.matrix->halves};
}

PlainRows Decoder::rows_of(const std::string& name, std::int64_t expert, std::int64_t row, std::int64_t rows,
                           std::int64_t columns, const void* data, std::int64_t stride) const {
    const auto found = place_of_.find(name);
    if (found == place_of_.end()) throw std::invalid_argument(name + ": is not packed");
    const Shape shape(places_[found->second].matrix->plain);
    if (expert < 0 || expert >= shape.count || row < 0 || rows < 1 || row + rows > shape.rows || columns != shape.columns)
        throw std::invalid_argument(name + ": has no rows " + std::to_string(row) + " to " + std::to_string(row + rows - 1) +
                                    " of " + std::to_string(columns) + " numbers (expert " + std::to_string(expert) + ")");
    return {found->second, expert, row, rows, data, stride};
}

void Decoder::pack(const std::vector<PlainRows>& rows, void* packed) const {
    for (const PlainRows& some : rows)
        pack_rows(packed_at(places_[some.matrix], some.expert, packed), some.row, some.row + some.rows, some.data, some.stride,
                  packed_bytes_ > kStreamBytes);
}

void Decoder::use(void* packed) {
    for (const Place& place : places_) {
        place.matrix->packed.clear();
        for (std::int64_t i = 0; i < Shape(place.matrix->plain).count; ++i)
            place.matrix->packed.push_back(packed_at(place, i, packed));
    }
}

void Decoder::load(void* packed, bool release) {
    for (const Place& place : places_) {
        const Shape shape(place.matrix->plain);
        const std::int64_t plain_bytes = shape.rows * shape.columns * size_of(sizes_.dtype);
        const char* plain = static_cast<const char*>(place.matrix->plain.data);
        for (std::int64_t i = 0; i < shape.count; ++i)
            pack({{place_of_.at(place.name), i, 0, shape.rows, plain + i * plain_bytes, shape.columns}}, packed);
        if (release && !(tied_ && place.matrix == &head_)) give_back(plain, shape.count * plain_bytes);
    }
    use(packed);
}

void Decoder::unpack(const PlainRows& rows, void* packed, void* plain) const {
    unpack_rows(packed_at(places_[rows.matrix], rows.expert, packed), rows.row, rows.row + rows.rows, plain);
}

}  // namespace pearl::cpu
