// A decoder's forward pass over the paged pool: whole steps, or half layers between which several ranks add up their parts.
//
// Reads the plain norms, biases and rotary tables where they lie; matrices are packed, in memory of the caller's that holds all
// of one version, and another version is served by using other memory (`use`). The residual stream is the caller's memory,
// rounded to the model's dtype after every addition.
// Invariant: what it computes for a token depends on the token, its sequence and the weights, bit for bit: not on the rest of
// the batch, on chunks or threads. It knows no requests and no blocks but those that a step names.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/moe.h"

namespace pearl::cpu {

constexpr std::int64_t kLine = 64;  // bytes that packed matrices and buffers begin at a multiple of

inline std::int64_t lines(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Of this rank: its heads, its part of the vocabulary.
struct DecoderSizes {
    DType dtype;
    std::int64_t hidden, layers, heads, kv_heads, head_dim, vocabulary;
    float eps;
    std::vector<std::int32_t> windows;  // of each layer; 0: all keys
    std::int64_t top_k = 0;             // experts: of a token, whether their shares are normalised, the first one here
    bool normalise = false;
    std::int64_t first_expert = 0;
    bool adds_bias = true;  // whether this rank adds the biases of sums over ranks
};

// A plain tensor of the model: row-major, of the model's dtype.
struct Parameter {
    const void* data = nullptr;
    std::vector<std::int64_t> shape;
};

// Rotary tables: fp32 [positions, head_dim].
struct RopeTables {
    const float* cos = nullptr;
    const float* sin = nullptr;
    std::int64_t positions = 0;
};

// The pool kv[layer][2][block][kv_head][block_size * head_dim].
struct DecoderPool {
    void* data = nullptr;
    std::int64_t blocks = 0;
    std::int32_t block_size = 0;
};

// Rows row .. row + rows - 1 of a matrix (of one of its experts) that is packed, and where they lie: of the model's dtype,
// `stride` elements apart.
struct PlainRows {
    std::size_t matrix;
    std::int64_t expert, row, rows;
    const void* data;
    std::int64_t stride;
};

// Gives the whole pages of private memory back to the system; they read as zeros then. Elsewhere than on Linux it stays.
void give_back(const void* data, std::int64_t bytes);

// Some of a step's rows.
struct Strip {
    std::int64_t first, rows;
};

struct DecoderStep {
    std::int64_t tokens = 0;
    void* stream = nullptr;                   // [tokens, hidden]: embeddings to begin with; changed by every half layer
    const std::int64_t* positions = nullptr;  // [tokens]
    const std::int64_t* slots = nullptr;      // [tokens]
    PagedBatch batch{};
    std::int64_t* layer_word = nullptr;  // or null: gets layer_base + how many layers' keys and values are in the pool, for
    std::int64_t layer_base = 0;         // other processes that read along
};

// What the time of a step goes to.
enum class Part : std::int32_t { norm, qkv, rope_and_store, attention, attention_out, gate_up, down, experts, head };
constexpr std::size_t kParts = 9;
const char* name(Part part);

// Memory that grows and is kept.
class Buffer {
  public:
    Buffer() = default;
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    void* take(std::int64_t bytes);

  private:
    void* data_ = nullptr;
    std::int64_t bytes_ = 0;
};

class Decoder {
  public:
    // `parameters` by their names in pearl/engine/models/params.py. Throws std::invalid_argument naming what is missing,
    // has another shape than the sizes say, or cannot be served.
    Decoder(const DecoderSizes& sizes, const std::map<std::string, Parameter>& parameters, const RopeTables& rope,
            const DecoderPool& pool);

    const DecoderSizes& sizes() const { return sizes_; }
    const DecoderPool& pool() const { return pool_; }
    const RopeTables& rope() const { return rope_; }

    // Bytes of the memory that holds the matrices of one version: `packed`, aligned to 64 bytes, of zeros before the first rows
    // are packed into it.
    std::size_t packed_bytes() const;
    // The names of the parameters that are packed. Their plain memory is read by `load` alone.
    std::vector<std::string> packed_names() const;

    // Checked rows of a packed parameter of so many columns. Throws std::invalid_argument if there are no such rows.
    PlainRows rows_of(const std::string& name, std::int64_t expert, std::int64_t row, std::int64_t rows, std::int64_t columns,
                      const void* data, std::int64_t stride) const;
    void pack(const std::vector<PlainRows>& rows, void* packed) const;
    // Steps multiply with what is packed there from now on; the memory must stay.
    void use(void* packed);
    // Packs all matrices from their plain memory, and uses them. With `release` that memory goes back to the system, each as
    // soon as it is packed; but that of the embedding.
    void load(void* packed, bool release);
    // Writes rows of what is packed there, bit for bit, one after the other.
    void unpack(const PlainRows& rows, void* packed, void* plain) const;

    // One rank alone: all layers and the last norm. `hidden` [tokens, hidden] may not be the stream.
    void forward(const DecoderStep& step, void* hidden);
    // The same, bit for bit, for some rows alone, in order, each of which is the last of its sequence: of the others the last
    // layer computes keys and values. `hidden` [rows, hidden].
    void forward_last(const DecoderStep& step, const std::vector<std::int64_t>& rows, void* hidden);

    // Several ranks: half 2 i is the attention of layer i, 2 i + 1 its MLP. `partial` [tokens, hidden] is this rank's part of
    // what is to be added to the stream; the next half, or `finish`, takes the sum over all ranks in its place.
    void half(const DecoderStep& step, std::int64_t index, void* partial);
    void finish(const DecoderStep& step, const void* partial, void* hidden);

    // fp32 logits [rows, vocabulary] of final-normed hidden states.
    void logits(const void* hidden, std::int64_t rows, float* out);

    // Processor time of the calling thread in nanoseconds per part since the last call; the first call begins to count.
    std::array<std::int64_t, kParts> take_profile();

  private:
    struct Matrix {  // plain, and where it is packed
        Parameter plain;
        bool halves = false;
        std::vector<PackedMatrix> packed{};  // one, or one for each expert
    };
    struct Layer {
        const void *input_norm, *post_norm, *q_norm = nullptr, *k_norm = nullptr;
        const void *qkv_bias = nullptr, *o_bias = nullptr, *gate_up_bias = nullptr, *down_bias = nullptr;
        Matrix qkv, o, gate_up, down, router;  // gate_up and down: of the MLP, or of all experts
        bool has_experts = false;
    };
    class Timed;

    struct Place {  // of a matrix among all
        std::string name;
        Matrix* matrix;
        std::int64_t offset, each;  // bytes in the packed memory, and from one expert to the next
    };
    void place(const std::string& name, Matrix& matrix);
    PackedMatrix packed_at(const Place& place, std::int64_t expert, void* packed) const;
    void check_loaded() const;
    void norm(const DecoderStep& step, Strip strip, const void* added, const void* weight, void* out);
    KvPool pool_of(std::int64_t index) const;
    const void* attend(const DecoderStep& step, std::int64_t index, const void* qkv);
    void* fill_pool(const DecoderStep& step, std::int64_t index, const void* added);
    void project(const DecoderStep& step, Strip strip, const void* x, const Matrix& matrix, const void* bias, void* partial);
    // Half layers. `added`: what is still to be added to the stream, or none. The result goes to `partial`, or without one
    // straight into the stream, if it can. Returns what is still to be added.
    const void* finish_attention(const DecoderStep& step, const Layer& layer, const void* heads, void* partial);
    const void* attention_half(const DecoderStep& step, std::int64_t index, const void* added, void* partial);
    const void* mlp_half(const DecoderStep& step, std::int64_t index, const void* added, void* partial);
    void mix_experts(const DecoderStep& step, const Layer& layer, const void* x, void* y);

    DecoderSizes sizes_;
    RopeTables rope_;
    DecoderPool pool_;
    std::vector<Layer> layers_;
    const void* last_norm_ = nullptr;
    Matrix head_;
    bool tied_ = false;
    std::vector<Place> places_;
    std::map<std::string, std::size_t> place_of_;
    std::int64_t packed_bytes_ = 0;
    Buffer normed_, qkv_, attended_, inner_, partial_, expert_scratch_;
    std::array<std::int64_t, kParts> spent_{};
    bool timed_ = false;
};

}  // namespace pearl::cpu
