// The order of operations of a decoder. See decoder.h.
#include "cpu/decoder.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <new>
#include <stdexcept>

#include "cpu/norm_rope.h"

namespace pearl::cpu {
namespace {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kStreamBytes = 8 << 20;  // a version that is larger has no place in the caches anyway

std::int64_t lines(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Rows that pass through neighbouring operations together, so that what one writes is still in the cache for the next.
constexpr std::int64_t kStripRows = 256;

// each(Strip) over all rows, in strips of kStripRows or somewhat more.
template <class F>
void in_strips(std::int64_t rows, F&& each) {
    const std::int64_t count = std::max<std::int64_t>(1, rows / kStripRows);
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t first = rows * i / count;
        each(Strip{first, rows * (i + 1) / count - first});
    }
}

const void* row(const void* base, std::int64_t index, std::int64_t stride_bytes) {
    return base == nullptr ? nullptr : static_cast<const char*>(base) + index * stride_bytes;
}

void* row(void* base, std::int64_t index, std::int64_t stride_bytes) {
    return base == nullptr ? nullptr : static_cast<char*>(base) + index * stride_bytes;
}

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

// Processor time of the calling thread: what others on a busy machine take does not count.
std::int64_t thread_ns() {
    std::timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
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

const char* name(Part part) {
    constexpr const char* names[kParts] = {"norm",    "qkv",  "rope_and_store", "attention", "attention_out",
                                           "gate_up", "down", "experts",        "head"};
    return names[static_cast<std::size_t>(part)];
}

Buffer::~Buffer() { std::free(data_); }

void* Buffer::take(std::int64_t bytes) {
    if (bytes > bytes_) {
        const std::int64_t wanted = lines(bytes + bytes / 4);
        void* fresh = std::aligned_alloc(kLine, static_cast<std::size_t>(wanted));
        if (fresh == nullptr) throw std::bad_alloc();
        std::free(data_);
        data_ = fresh;
        bytes_ = wanted;
    }
    return data_;
}

// Adds the time until its end to a part, once somebody has asked for the profile.
class Decoder::Timed {
  public:
    Timed(Decoder& decoder, Part part) : decoder_(decoder), part_(static_cast<std::size_t>(part)) {
        if (decoder_.timed_) began_ = thread_ns();
    }
    ~Timed() {
        if (decoder_.timed_) decoder_.spent_[part_] += thread_ns() - began_;
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

  private:
    Decoder& decoder_;
    std::size_t part_;
    std::int64_t began_ = 0;
};

std::array<std::int64_t, kParts> Decoder::take_profile() {
    const auto spent = spent_;
    spent_ = {};
    timed_ = true;
    return spent;
}

// ---------------------------------------------------------------------------------------------------- weights

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

// ---------------------------------------------------------------------------------------------------- half layers

void Decoder::norm(const DecoderStep& step, Strip strip, const void* added, const void* weight, void* out) {
    const Timed timed(*this, Part::norm);
    const std::int64_t bytes = sizes_.hidden * size_of(sizes_.dtype);
    const Rows rows{strip.rows, sizes_.hidden, sizes_.dtype};
    void* stream = row(step.stream, strip.first, bytes);
    if (added != nullptr)
        add_rms_norm(rows, row(added, strip.first, bytes), stream, weight, sizes_.eps, out);
    else
        rms_norm(rows, stream, weight, sizes_.eps, out);
}

// x has the strip's rows alone.
void Decoder::project(const DecoderStep& step, Strip strip, const void* x, const Matrix& matrix, const void* bias,
                      void* partial) {
    const PackedMatrix& weight = matrix.packed[0];
    const std::int64_t bytes = sizes_.hidden * size_of(sizes_.dtype);
    GemmArguments product{x, strip.rows, weight.k, weight, partial == nullptr ? Epilogue::residual : Epilogue::none};
    product.bias = bias;
    product.residual = row(step.stream, strip.first, bytes);
    product.residual_stride = sizes_.hidden;
    product.y = row(partial == nullptr ? step.stream : partial, strip.first, bytes);
    product.y_stride = sizes_.hidden;
    gemm(product);
}

// Queries and keys are normed and rotated where they lie in `qkv`; returns what all heads attended to, side by side.
const void* Decoder::attend(const DecoderStep& step, std::int64_t index, void* qkv) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    const auto heads = static_cast<std::int32_t>(sizes_.heads), dim = static_cast<std::int32_t>(sizes_.head_dim);
    const auto kv_heads = static_cast<std::int32_t>(sizes_.kv_heads);
    const std::int64_t size = size_of(sizes_.dtype), stride = layer.qkv.plain.shape[0];
    const std::int64_t half = pool_.blocks * kv_heads * pool_.block_size * dim * size;
    char* keys = static_cast<char*>(pool_.data) + 2 * index * half;
    const KvPool pool{keys, keys + half, pool_.blocks, kv_heads, pool_.block_size, dim, sizes_.dtype};
    {
        const Timed timed(*this, Part::rope_and_store);
        const Rotation rotation{rope_.cos, rope_.sin, step.positions, dim, sizes_.eps, sizes_.dtype};
        norm_rope_store(rotation, step.tokens, qkv, stride, heads, layer.q_norm, layer.k_norm, pool, step.slots);
    }
    if (step.layer_word != nullptr) __atomic_store_n(step.layer_word, step.layer_base + index + 1, __ATOMIC_RELEASE);
    const Timed timed(*this, Part::attention);
    void* out = attended_.take(step.tokens * heads * dim * size);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
    const std::int32_t window = sizes_.windows[static_cast<std::size_t>(index)];
    paged_attention({pool, step.batch, heads, scale, window, qkv, stride, out, heads * dim});
    return out;
}

const void* Decoder::attention_half(const DecoderStep& step, std::int64_t index, const void* added, void* partial) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    const std::int64_t size = size_of(sizes_.dtype), all = layer.qkv.plain.shape[0];
    void* x = normed_.take(step.tokens * sizes_.hidden * size);
    void* qkv = qkv_.take(step.tokens * all * size);
    in_strips(step.tokens, [&](Strip strip) {
        norm(step, strip, added, layer.input_norm, x);
        const Timed timed(*this, Part::qkv);
        GemmArguments product{x, strip.rows, sizes_.hidden, layer.qkv.packed[0]};
        product.bias = layer.qkv_bias;
        product.y = row(qkv, strip.first, all * size);
        product.y_stride = all;
        gemm(product);
    });
    const void* heads = attend(step, index, qkv);
    const Timed timed(*this, Part::attention_out);
    project(step, {0, step.tokens}, heads, layer.o, layer.o_bias, partial);
    return partial;
}

const void* Decoder::mlp_half(const DecoderStep& step, std::int64_t index, const void* added, void* partial) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    const std::int64_t size = size_of(sizes_.dtype);
    void* x = normed_.take(step.tokens * sizes_.hidden * size);
    if (layer.has_experts) {
        norm(step, {0, step.tokens}, added, layer.post_norm, x);
        void* y = partial == nullptr ? partial_.take(step.tokens * sizes_.hidden * size) : partial;
        mix_experts(step, layer, x, y);
        return y;
    }
    const std::int64_t width = layer.down.plain.shape[1];
    void* inner = inner_.take(step.tokens * width * size);
    in_strips(step.tokens, [&](Strip strip) {
        norm(step, strip, added, layer.post_norm, x);
        {
            const Timed timed(*this, Part::gate_up);
            GemmArguments product{x, strip.rows, sizes_.hidden, layer.gate_up.packed[0], Epilogue::silu_mul};
            product.bias = layer.gate_up_bias;
            product.y = inner;
            product.y_stride = width;
            gemm(product);
        }
        const Timed timed(*this, Part::down);
        project(step, strip, inner, layer.down, layer.down_bias, partial);
    });
    return partial;
}

void Decoder::mix_experts(const DecoderStep& step, const Layer& layer, const void* x, void* y) {
    const Timed timed(*this, Part::experts);
    MoeArguments arguments{x, step.tokens, sizes_.hidden, layer.router.packed[0]};
    arguments.gate_up = layer.gate_up.packed.data();
    arguments.down = layer.down.packed.data();
    arguments.first = sizes_.first_expert;
    arguments.here = static_cast<std::int64_t>(layer.gate_up.packed.size());
    arguments.top_k = sizes_.top_k;
    arguments.normalise = sizes_.normalise;
    arguments.y = y;
    arguments.y_stride = sizes_.hidden;
    arguments.scratch = expert_scratch_.take(static_cast<std::int64_t>(moe_scratch_bytes(arguments)));
    moe(arguments);
}

// ---------------------------------------------------------------------------------------------------- steps

void Decoder::check_loaded() const {
    if (head_.packed.empty()) throw std::invalid_argument("load: no weights have been packed yet");
}

void Decoder::forward(const DecoderStep& step, void* hidden) {
    check_loaded();
    const void* added = nullptr;
    for (std::int64_t i = 0; i < sizes_.layers; ++i) {
        added = attention_half(step, i, added, nullptr);
        added = mlp_half(step, i, added, nullptr);
    }
    norm(step, {0, step.tokens}, added, last_norm_, hidden);
}

void Decoder::half(const DecoderStep& step, std::int64_t index, void* partial) {
    check_loaded();
    const void* added = index == 0 ? nullptr : partial;
    if (index % 2 == 0)
        attention_half(step, index / 2, added, partial);
    else
        mlp_half(step, index / 2, added, partial);
}

void Decoder::finish(const DecoderStep& step, const void* partial, void* hidden) {
    norm(step, {0, step.tokens}, partial, last_norm_, hidden);
}

void Decoder::logits(const void* hidden, std::int64_t rows, float* out) {
    check_loaded();
    const Timed timed(*this, Part::head);
    GemmArguments product{hidden, rows, sizes_.hidden, head_.packed[0], Epilogue::wide};
    product.y = out;
    product.y_stride = sizes_.vocabulary;
    gemm(product);
}

}  // namespace pearl::cpu
