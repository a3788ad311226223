// The order of operations of a decoder. See decoder.h.
#include "cpu/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>

#include "cpu/norm_rope.h"

namespace pearl::cpu {
namespace {

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

// Processor time of the calling thread: what others on a busy machine take does not count.
std::int64_t thread_ns() {
    std::timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

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

KvPool Decoder::pool_of(std::int64_t index) const {
    const auto dim = static_cast<std::int32_t>(sizes_.head_dim), kv_heads = static_cast<std::int32_t>(sizes_.kv_heads);
    const std::int64_t half = pool_.blocks * kv_heads * pool_.block_size * dim * size_of(sizes_.dtype);
    char* keys = static_cast<char*>(pool_.data) + 2 * index * half;
    return {keys, keys + half, pool_.blocks, kv_heads, pool_.block_size, dim, sizes_.dtype};
}

// Returns what all heads attended to, side by side.
const void* Decoder::attend(const DecoderStep& step, std::int64_t index, const void* qkv) {
    const Timed timed(*this, Part::attention);
    const std::int64_t width = sizes_.heads * sizes_.head_dim;
    void* out = attended_.take(step.tokens * width * size_of(sizes_.dtype));
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(sizes_.head_dim)));
    const std::int32_t window = sizes_.windows[static_cast<std::size_t>(index)];
    const std::int64_t stride = layers_[static_cast<std::size_t>(index)].qkv.plain.shape[0];
    const auto heads = static_cast<std::int32_t>(sizes_.heads);
    paged_attention({pool_of(index), step.batch, heads, scale, window, qkv, stride, out, width});
    return out;
}

// Queries and keys are normed and rotated where they lie in what it returns; keys and values are in the pool then.
void* Decoder::fill_pool(const DecoderStep& step, std::int64_t index, const void* added) {
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
    {
        const Timed timed(*this, Part::rope_and_store);
        const auto heads = static_cast<std::int32_t>(sizes_.heads), dim = static_cast<std::int32_t>(sizes_.head_dim);
        const Rotation rotation{rope_.cos, rope_.sin, step.positions, dim, sizes_.eps, sizes_.dtype};
        norm_rope_store(rotation, step.tokens, qkv, all, heads, layer.q_norm, layer.k_norm, pool_of(index), step.slots);
    }
    if (step.layer_word != nullptr) __atomic_store_n(step.layer_word, step.layer_base + index + 1, __ATOMIC_RELEASE);
    return qkv;
}

const void* Decoder::attention_half(const DecoderStep& step, std::int64_t index, const void* added, void* partial) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    return finish_attention(step, layer, attend(step, index, fill_pool(step, index, added)), partial);
}

const void* Decoder::finish_attention(const DecoderStep& step, const Layer& layer, const void* heads, void* partial) {
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

namespace {

// Moves the rows, which ascend, to the beginning.
void gather(void* all, std::int64_t row_bytes, const std::vector<std::int64_t>& rows) {
    for (std::size_t i = 0; i < rows.size(); ++i)
        std::memmove(row(all, static_cast<std::int64_t>(i), row_bytes), row(all, rows[i], row_bytes),
                     static_cast<std::size_t>(row_bytes));
}

}  // namespace

void Decoder::forward_last(const DecoderStep& step, const std::vector<std::int64_t>& rows, void* hidden) {
    if (static_cast<std::int64_t>(rows.size()) == step.tokens) return forward(step, hidden);
    check_loaded();
    const std::int64_t last = sizes_.layers - 1, size = size_of(sizes_.dtype);
    const void* added = nullptr;
    for (std::int64_t i = 0; i < last; ++i) {
        added = attention_half(step, i, added, nullptr);
        added = mlp_half(step, i, added, nullptr);
    }
    void* qkv = fill_pool(step, last, added);
    if (rows.empty()) return;
    const Layer& layer = layers_[static_cast<std::size_t>(last)];
    gather(qkv, layer.qkv.plain.shape[0] * size, rows);
    gather(step.stream, sizes_.hidden * size, rows);
    std::vector<std::int32_t> starts{0};
    for (std::int32_t s = 0; s < step.batch.sequences; ++s) {
        const auto done = static_cast<std::size_t>(starts.back());
        const bool wanted = done < rows.size() && rows[done] + 1 == step.batch.query_starts[s + 1];
        starts.push_back(starts.back() + (wanted ? 1 : 0));
    }
    DecoderStep few = step;
    few.tokens = static_cast<std::int64_t>(rows.size());
    few.batch.query_starts = starts.data();
    added = finish_attention(few, layer, attend(few, last, qkv), nullptr);
    added = mlp_half(few, last, added, nullptr);
    norm(few, {0, few.tokens}, added, last_norm_, hidden);
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
