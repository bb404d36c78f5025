// Samples each row's next token from its logits, with excluded and penalized tokens, temperature, top-k, top-p and
// min-p. Computes log-probabilities on request. The token is -1 if a logit is NaN or +infinity, or all are -infinity.
// Logits are read from memory once; all further work is in the processor's cache. As in `sampling/sampler.py`, the
// sampled token is the first one, by token id, at which the cumulative probability exceeds the row's random number.
// Weights are unnormalized probabilities in float32; their sums are double.

#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;      // logits in a block; each block's highest logit and sum of weights are stored
constexpr int64_t FEW = 64;         // at most this many tokens are sorted; more are bisected first
constexpr float UNLIKELY = -87.0f;  // weights with a lower logarithm count as 0
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct SamplingParameters {  // layout: `RowSampling.packed`
    int64_t key, top_k, likeliest;
    double temperature, top_p, min_p;
};

// Arguments for `rows` rows. logits: [*, width]. places: index of each row in `logits`. drawn: number of tokens drawn
// so far. change_tokens, change_values: tokens with changed logits, and these logits. change_bounds [rows, 2]: begin
// and end of each row's changes. masks [*, words]: bits of allowed tokens. mask_rows: index of each row in `masks`, or
// -1. Results: tokens, their log-probabilities among all tokens and among allowed ones, likeliest tokens [rows, most].
template <class T>
struct Sampling {
    const T* logits;
    const int64_t* places;
    const SamplingParameters* parameters;
    const int64_t* drawn;
    const int64_t* change_bounds;
    const int64_t* change_tokens;
    const float* change_values;
    const uint32_t* masks;
    const int64_t* mask_rows;
    int64_t* tokens;
    float* logprobs;
    float* choice_logprobs;
    int64_t* top_ids;
    float* top_logprobs;
    int64_t rows, width, words, most, wants_logprobs;
};

inline double uniform(int64_t key, int64_t position) {  // SplitMix64, see `uniforms`
    uint64_t bits = uint64_t(key) + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return double((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
}

// Logits `x` (padded to whole blocks with -infinity) and weights of one row, with each block's highest logit and sum.
class Vocabulary {
  public:
    struct Place {
        float x;
        int64_t token;
    };
    using Iterator = std::vector<Place>::iterator;

    // Allocates all memory: other functions run in parallel loops, which exceptions must not leave.
    explicit Vocabulary(int64_t width)
        : width(width), blocks((width + BLOCK - 1) / BLOCK), x(blocks * BLOCK, NEVER), weights(blocks * BLOCK),
          highest_of(blocks), sums(blocks), order(blocks) {
        found.reserve(width);
    }

    // Reads logits. Returns false if one is NaN or +infinity, or if all are -infinity.
    template <class T>
    bool read(const T* logits) {
        int32_t wrong = 0;
        for (int64_t i = 0; i < width; i++) {
            const float value = load(logits[i]);
            x[i] = value;
            wrong |= !(value <= std::numeric_limits<float>::max());
        }
        find_highest();
        return !wrong && most != NEVER;
    }

    void find_highest() {
        for (int64_t b = 0; b < blocks; b++) highest_of[b] = highest(x.data() + b * BLOCK, BLOCK / LANES);
        most = *std::max_element(highest_of.begin(), highest_of.end());
    }

    void exclude(const uint32_t* allowed) {
        for (int64_t first = 0; first < width; first += 32) {
            const uint32_t word = allowed[first / 32];
            if (word == 0xffffffffu) continue;
            const int64_t end = std::min(first + 32, width);
            for (int64_t i = first; i < end; i++) x[i] = word >> (i - first) & 1 ? x[i] : NEVER;
        }
        find_highest();
    }

    // Computes weights = exp(x - highest x), and the sum of each block.
    void weigh() {
        for (int64_t b = 0; b < blocks; b++) {
            const float* from = x.data() + b * BLOCK;
            float* to = weights.data() + b * BLOCK;
            if (!(highest_of[b] - most >= UNLIKELY)) {
                std::fill(to, to + BLOCK, 0.0f);
                sums[b] = most == most ? 0.0 : NAN;
                continue;
            }
            for (int64_t i = 0; i < BLOCK; i += LANES)
                store_vector(to + i, exponential(load_vector(from + i, LANES) - most), LANES);
            sums[b] = sum(to);
        }
    }

    double total() const {
        double all = 0;
        for (double one : sums) all += one;
        return all;
    }

    // Returns log sum exp of x. Overwrites the weights.
    double normalizer() {
        weigh();
        return most + std::log(total());
    }

    int64_t likeliest() const {
        for (int64_t b = 0; b < blocks; b++)
            if (highest_of[b] == most)
                for (int64_t i = b * BLOCK; i < width; i++)
                    if (x[i] == most) return i;
        return 0;  // there is no highest number
    }

    // Returns the first token at which the cumulative weight exceeds `share` times the total.
    int64_t at(double share) const {
        const double wanted = share * total();
        double before = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (before + sums[b] > wanted) {
                double passed = before;
                for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
                    passed += weights[i];
                    if (passed > wanted && weights[i] > 0) return i;
                }
            }
            before += sums[b];
        }
        for (int64_t i = width - 1; i >= 0; i--)  // none was found, because of rounding: take the last possible token
            if (weights[i] > 0) return i;
        return likeliest();
    }

    // Sets the weights of tokens that top-k, then top-p, then min-p exclude to 0.
    void narrow(int64_t top_k, double top_p, double min_p) {
        if (!(total() > 0)) return;
        const Place end = top_k > 0 || top_p < 1 ? last_kept(top_k, top_p) : Place{NEVER, width};
        const float least = float(min_p);
        for (int64_t b = 0; b < blocks; b++) {
            float* block = weights.data() + b * BLOCK;
            if (sums[b] <= 0) continue;
            if (highest_of[b] < end.x) {
                std::fill(block, block + BLOCK, 0.0f);
                sums[b] = 0;
                continue;
            }
            const float* from = x.data() + b * BLOCK;
            const int32_t ties = int32_t(end.token - b * BLOCK < BLOCK ? end.token - b * BLOCK : BLOCK);
            for (int32_t i = 0; i < int32_t(BLOCK); i++) {
                const bool is_in = from[i] > end.x || (from[i] == end.x && i <= ties);
                block[i] = is_in && block[i] >= least ? block[i] : 0.0f;
            }
            sums[b] = sum(block);
        }
    }

    // Returns the `count` tokens with the highest logits, highest first; of equal logits, the lower token id first.
    const std::vector<Place>& highest_tokens(int64_t count) {
        order = highest_of;  // at least `count` tokens reach its `count`-th highest value
        if (count < blocks) std::nth_element(order.begin(), order.begin() + count, order.end(), std::greater<float>());
        collect(count < blocks ? order[count] : NEVER);
        std::partial_sort(found.begin(), found.begin() + count, found.end(), earlier);
        found.resize(count);
        return found;
    }

    const int64_t width, blocks;
    std::vector<float> x, weights, highest_of;
    std::vector<double> sums;
    float most = NEVER;

  private:
    static bool earlier(const Place& a, const Place& b) { return a.x > b.x || (a.x == b.x && a.token < b.token); }

    static double sum(const float* block) {
        double all = 0;
        for (int64_t i = 0; i < BLOCK; i += LANES) all += sum_of(load_vector(block + i, LANES));
        return all;
    }

    // Fills `found` with the tokens whose logits are at least `least`. Returns the sum of their weights.
    double collect(float least) {
        found.clear();
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t i = b * BLOCK; highest_of[b] >= least && i < std::min((b + 1) * BLOCK, width); i++)
                if (x[i] >= least) found.push_back({x[i], i});
        return weight(found.begin(), found.end());
    }

    double weight(Iterator first, Iterator end) const {
        return std::accumulate(first, end, 0.0, [this](double sum, const Place& one) { return sum + weights[one.token]; });
    }

    // Returns the least likely token that top-k, then top-p keep. Bisects, which is faster than sorting all.
    Place last_kept(int64_t top_k, double top_p) {
        double kept = 0;
        for (const float depth : {-8.0f, -24.0f, UNLIKELY}) {
            kept = collect(most + depth);
            if (top_k > 0 ? int64_t(found.size()) >= top_k : kept >= top_p * total()) break;
        }
        if (top_k > 0 && top_k < int64_t(found.size())) {
            std::nth_element(found.begin(), found.begin() + top_k, found.end(), earlier);
            found.resize(top_k);
            kept = weight(found.begin(), found.end());
        }
        if (top_p == 1) return *std::max_element(found.begin(), found.end(), earlier);
        const double wanted = top_p * (top_k > 0 ? kept : total());
        double before = 0;
        Iterator first = found.begin(), end = found.end();
        while (end - first > FEW) {
            const Iterator middle = first + (end - first) / 2;
            std::nth_element(first, middle, end, earlier);
            const double more = weight(first, middle);
            if (before + more >= wanted)
                end = middle;
            else
                before += more, first = middle;
        }
        std::sort(first, end, earlier);
        while (first + 1 < end && (before += weights[first->token]) < wanted) ++first;
        return *first;
    }

    std::vector<float> order;
    std::vector<Place> found;
};

template <class T>
void sample_row(const Sampling<T>& all, int64_t row, Vocabulary& vocabulary) {
    const SamplingParameters& given = all.parameters[row];
    const T* logits = all.logits + all.places[row] * all.width;
    double normalizer = NAN, choice_normalizer = NAN;
    if (!vocabulary.read(logits)) {
        all.tokens[row] = -1, all.logprobs[row] = all.choice_logprobs[row] = NAN;
        std::fill_n(all.top_ids + row * all.most, all.most, 0), std::fill_n(all.top_logprobs + row * all.most, all.most, NAN);
        return;
    }
    if (all.wants_logprobs || given.likeliest >= 0) normalizer = vocabulary.normalizer();
    if (given.likeliest > 0) {
        int64_t at = row * all.most;
        for (const auto& place : vocabulary.highest_tokens(std::min(given.likeliest, all.most))) {
            all.top_ids[at] = place.token;
            all.top_logprobs[at++] = float(place.x - normalizer);
        }
    }
    const uint32_t* allowed = all.mask_rows[row] < 0 ? nullptr : all.masks + all.mask_rows[row] * all.words;
    if (allowed) {
        vocabulary.exclude(allowed);
        choice_normalizer = vocabulary.normalizer();
    }
    const int64_t first = all.change_bounds[2 * row], end = all.change_bounds[2 * row + 1];
    for (int64_t change = first; change < end; change++) {
        float& x = vocabulary.x[all.change_tokens[change]];
        if (!allowed || x != NEVER) x = all.change_values[change];
    }
    if (end > first) vocabulary.find_highest();
    int64_t token = 0;
    if (given.temperature == 0) {
        token = vocabulary.likeliest();
    } else {
        const float temperature = float(given.temperature);
        for (int64_t i = 0; i < all.width; i++) vocabulary.x[i] /= temperature;
        vocabulary.find_highest();
        vocabulary.weigh();
        if (given.top_k > 0 || given.top_p < 1 || given.min_p > 0)
            vocabulary.narrow(given.top_k, given.top_p, given.min_p);
        token = vocabulary.at(uniform(given.key, all.drawn[row]));
    }
    if (allowed && !(allowed[token / 32] >> token % 32 & 1))  // all allowed tokens have -infinity: take the first one
        for (token = 0; token < all.width - 1 && !(allowed[token / 32] >> token % 32 & 1);) token++;
    all.tokens[row] = token;
    all.logprobs[row] = float(load(logits[token]) - normalizer);
    all.choice_logprobs[row] = float(load(logits[token]) - choice_normalizer);
}

// Samples all rows. Returns false if there was not enough memory; then the results are incomplete.
template <class T>
bool sample_rows(const Sampling<T>& all) {
    bool failed = false;
#pragma omp parallel if (all.rows * all.width > 16384)
    {
        static thread_local std::unique_ptr<Vocabulary> kept;  // kept, because allocating takes longer than sampling
        try {
            if (!kept || kept->width != all.width) kept.reset(), kept = std::make_unique<Vocabulary>(all.width);
        } catch (const std::bad_alloc&) {  // an exception must not leave the parallel region
#pragma omp atomic write
            failed = true;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t row = 0; row < all.rows; row++) sample_row(all, row, *kept);
        }
    }
    return !failed;
}

}  // namespace
