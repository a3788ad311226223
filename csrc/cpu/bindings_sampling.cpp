// Python names of sampling. One list per parameter, one entry per row; the caller owns the logits and keeps them alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/register.h"
#include "cpu/sampling.h"

namespace py = pybind11;

namespace pearl::cpu {
namespace {

constexpr const char* kErrors[] = {"", "not_finite", "nothing_left"};

template <class Value>
void check_length(const char* field, const std::vector<Value>& values, std::int64_t rows) {
    if (static_cast<std::int64_t>(values.size()) != rows)
        throw std::invalid_argument(std::string(field) + ": has " + std::to_string(values.size()) + " entries, must have " +
                                    std::to_string(rows));
}

struct Parameters {
    std::vector<float> temperatures;
    std::vector<std::int64_t> top_ks;
    std::vector<double> top_ps;
    std::vector<float> min_ps;
    std::vector<double> uniforms;
    std::vector<bool> raws;
    std::vector<std::int64_t> bests;
};

std::vector<SamplingRow> rows_of(const float* scores, const float* logits, std::int64_t rows, std::int64_t vocabulary,
                                 const Parameters& p) {
    check_length("temperatures", p.temperatures, rows);
    check_length("top_ks", p.top_ks, rows);
    check_length("top_ps", p.top_ps, rows);
    check_length("min_ps", p.min_ps, rows);
    check_length("uniforms", p.uniforms, rows);
    check_length("raws", p.raws, rows);
    check_length("bests", p.bests, rows);
    std::vector<SamplingRow> result;
    for (std::int64_t r = 0; r < rows; ++r)
        result.push_back({scores + r * vocabulary, logits + r * vocabulary, p.temperatures[r], p.top_ks[r], p.top_ps[r],
                          p.min_ps[r], p.uniforms[r], p.raws[r], std::min(p.bests[r], vocabulary)});
    return result;
}

// (ids, log-probs, errors, (id, log-prob) pairs) of all rows.
py::tuple sample_checked(std::uintptr_t scores, std::uintptr_t logits, std::int64_t rows, std::int64_t vocabulary,
                         const Parameters& parameters) {
    if (rows < 0) throw std::invalid_argument("rows=" + std::to_string(rows) + ": must be >= 0");
    if (vocabulary < 1) throw std::invalid_argument("vocabulary=" + std::to_string(vocabulary) + ": must be >= 1");
    if (rows > 0 && (scores == 0 || logits == 0)) throw std::invalid_argument("scores, logits: must be addresses, got none");
    const std::vector<SamplingRow> wanted = rows_of(reinterpret_cast<const float*>(scores),
                                                    reinterpret_cast<const float*>(logits), rows, vocabulary, parameters);
    std::int64_t most = 0;
    for (const SamplingRow& row : wanted) most = std::max(most, row.best);
    std::vector<SampledRow> sampled(wanted.size());
    std::vector<RankedToken> best(wanted.size() * most);
    {
        py::gil_scoped_release unlocked;
        sample(wanted.data(), rows, vocabulary, sampled.data(), best.data(), most);
    }
    py::list ids, logprobs, errors, bests;
    for (std::int64_t r = 0; r < rows; ++r) {
        py::list pairs;
        for (std::int64_t i = 0; i < sampled[r].best; ++i)
            pairs.append(py::make_tuple(best[r * most + i].id, best[r * most + i].logprob));
        ids.append(sampled[r].id);
        logprobs.append(sampled[r].logprob);
        errors.append(kErrors[static_cast<int>(sampled[r].error)]);
        bests.append(pairs);
    }
    return py::make_tuple(ids, logprobs, errors, bests);
}

}  // namespace

void register_sampling(py::module_& m) {
    m.def(
        "sample",
        [](std::uintptr_t scores, std::uintptr_t logits, std::int64_t rows, std::int64_t vocabulary,
           std::vector<float> temperatures, std::vector<std::int64_t> top_ks, std::vector<double> top_ps,
           std::vector<float> min_ps, std::vector<double> uniforms, std::vector<bool> raws, std::vector<std::int64_t> bests) {
            return sample_checked(scores, logits, rows, vocabulary,
                                  {std::move(temperatures), std::move(top_ks), std::move(top_ps), std::move(min_ps),
                                   std::move(uniforms), std::move(raws), std::move(bests)});
        },
        py::arg("scores"), py::arg("logits"), py::arg("rows"), py::arg("vocabulary"), py::arg("temperatures"),
        py::arg("top_ks"), py::arg("top_ps"), py::arg("min_ps"), py::arg("uniforms"), py::arg("raws"), py::arg("bests"),
        "Draws a token per row of the fp32 scores [rows, vocabulary]; `logits` are the same before penalties (may be the same "
        "memory). Returns lists: ids, log-probs, errors ('', 'not_finite', 'nothing_left'), and the `bests` likeliest "
        "(id, log-prob) of each row.");
    m.def("philox_uniform", &philox_uniform, py::arg("seed"), py::arg("index"), py::arg("position"),
          "The uniform of pearl.engine.philox for one row.");
}

}  // namespace pearl::cpu
