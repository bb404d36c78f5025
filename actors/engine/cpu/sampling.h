// The next token of each row, from its logits: excluded and penalized tokens, temperature, top-k, top-p, min-p, and the
// log-probabilities that are asked for; -1 for a row whose logits are not numbers. One pass over memory for each row, the rest in the processor's cache; no sorting.
// The definition is that of `sampling/sampler.py`: the inverse distribution function, in the vocabulary's order, at the row's
// random number. Weights are float32, their sums double. The last token that top-k or top-p keeps is found by bisection.

#pragma once

#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;      // numbers whose highest one and sum are kept
constexpr int64_t FEW = 64;         // tokens that are sorted
constexpr float UNLIKELY = -87.0f;  // logarithm of a weight that counts as 0
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct SamplingParameters {  // the layout of `RowSampling.packed`
    int64_t key, top_k, likeliest;
    double temperature, top_p, min_p;
};

// Arguments for `rows` rows. logits [*, width]; places [rows]: the row's logits; drawn [rows]: tokens so far.
// change_bounds [rows, 2]: where a row's changes begin and end, of (change_tokens, change_values), the logits of penalized
// or barred tokens. masks [*, words]: bits of allowed tokens; mask_rows [rows]: -1 for none. Results: tokens, their
// log-probabilities, the same among allowed tokens, and the `most` likeliest tokens [rows, most].
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

// Logits of one row, padded to whole blocks by numbers that are never drawn, and what is known of each block.
class Vocabulary {
  public:
    struct Place {
        float x;
        int64_t token;
    };

    explicit Vocabulary(int64_t width)
        : width(width), blocks((width + BLOCK - 1) / BLOCK), x(blocks * BLOCK, NEVER), weights(blocks * BLOCK),
          highest_of(blocks), sums(blocks) {}

    // Whether none is NaN or infinite, and not all are minus infinity.
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

    // weights = exp(x - highest), and their sums
    void weigh() {
        for (int64_t b = 0; b < blocks; b++) {
            const float* from = x.data() + b * BLOCK;
            float* to = weights.data() + b * BLOCK;
            if (!(highest_of[b] - most >= UNLIKELY)) {
                std::fill(to, to + BLOCK, 0.0f);
                sums[b] = most == most ? 0.0 : NAN;
                continue;
            }
            const float top = most;
            for (int64_t i = 0; i < BLOCK; i++) {
                const float below = from[i] - top, weight = exponential(below);
                to[i] = below < UNLIKELY ? 0.0f : weight;
            }
            sums[b] = sum(to);
        }
    }

    double total() const {
        double all = 0;
        for (double one : sums) all += one;
        return all;
    }

    // log sum exp; overwrites the weights
    double normalizer() {
        weigh();
        return most + std::log(total());
    }

    int64_t likeliest() const {
        for (int64_t b = 0; b < blocks; b++)
            if (highest_of[b] == most)
                for (int64_t i = b * BLOCK; i < width; i++)
                    if (x[i] == most) return i;
        return 0;  // no number is left
    }

    // The first token at which the sum of weights passes `share` of the total.
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
        for (int64_t i = width - 1; i >= 0; i--)  // rounding must not pass the last possible token
            if (weights[i] > 0) return i;
        return likeliest();
    }

    // Set the weights to 0 outside top-k, then top-p, then min-p.
    void narrow(int64_t top_k, double top_p, double min_p) {
        const double all = total();
        if (!(all > 0)) return;
        Place end{NEVER, width};  // the last token that is kept
        if (top_k > 0 || top_p < 1) {
            for (const float depth : {-8.0f, -24.0f, UNLIKELY}) {
                const Tally within = tally(most + depth);
                const bool reached = top_k > 0 ? within.count >= top_k : within.mass >= top_p * all;
                if (!reached && depth != UNLIKELY) continue;
                double kept = all;
                if (top_k > 0) {
                    kept = within.mass;
                    if (reached) end = last_of(top_k, most + depth, within, kept);
                }
                if (top_p < 1) end = last_of_mass(top_p * kept, end, most + depth);
                break;
            }
        }
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

    // The `count` highest tokens, the first of equal ones first.
    const std::vector<Place>& highest_tokens(int64_t count) {
        found.clear();
        for (int64_t b = 0; b < blocks; b++) {
            if (int64_t(found.size()) == count && highest_of[b] <= found.front().x) continue;
            for (int64_t i = b * BLOCK; i < std::min((b + 1) * BLOCK, width); i++) {
                if (int64_t(found.size()) == count && !(x[i] > found.front().x)) continue;
                if (int64_t(found.size()) == count) {
                    std::pop_heap(found.begin(), found.end(), earlier);
                    found.pop_back();
                }
                found.push_back({x[i], i});
                std::push_heap(found.begin(), found.end(), earlier);
            }
        }
        std::sort(found.begin(), found.end(), earlier);
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
        for (int64_t first = 0; first < BLOCK; first += LANES) {
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = 0; i < LANES; i++) part += block[first + i];
            all += part;
        }
        return all;
    }

    struct Tally {
        int64_t count;
        double mass;
    };

    // Number and weight of the tokens that are at least `least`.
    Tally tally(float least) const {
        Tally all{0, 0};
        for (int64_t b = 0; b < blocks; b++) {
            if (!(highest_of[b] >= least)) continue;
            const float *from = x.data() + b * BLOCK, *weight = weights.data() + b * BLOCK;
            int32_t count = 0;
            float mass = 0;
#pragma omp simd reduction(+ : count, mass)
            for (int64_t i = 0; i < BLOCK; i++) {
                count += from[i] >= least;
                mass += from[i] >= least ? weight[i] : 0.0f;
            }
            all.count += count;
            all.mass += mass;
        }
        return all;
    }

    // Bisect between `least`, whose tally is enough, and the highest token, until few tokens are between. Leaves in
    // `found`, sorted, those among which the tally becomes enough; returns the tally of those above.
    template <class Enough>
    Tally bisect(float least, Tally within, Enough enough) {
        float above = std::nextafter(most, std::numeric_limits<float>::infinity());
        Tally of_above{0, 0};
        while (within.count - of_above.count > FEW) {
            const float middle = least + (above - least) / 2;
            if (!(middle > least && middle < above)) break;
            const Tally one = tally(middle);
            if (enough(one)) {
                least = middle;
                within = one;
            } else {
                above = middle;
                of_above = one;
            }
        }
        found.clear();
        for (int64_t b = 0; b < blocks; b++) {
            if (!(highest_of[b] >= least)) continue;
            for (int64_t first = b * BLOCK; first < (b + 1) * BLOCK; first += LANES) {
                int32_t some = 0;  // a vector of comparisons; most have none
                for (int64_t i = first; i < first + LANES; i++) some += (x[i] >= least) & (x[i] < above);
                for (int64_t i = first; some && i < first + LANES; i++)
                    if (x[i] >= least && x[i] < above) found.push_back({x[i], i});
            }
        }
        std::sort(found.begin(), found.end(), earlier);
        return of_above;
    }

    // The top_k-th token; `mass` becomes the weight of the tokens up to it.
    Place last_of(int64_t top_k, float least, Tally within, double& mass) {
        const Tally above = bisect(least, within, [=](Tally one) { return one.count >= top_k; });
        mass = above.mass;
        const int64_t among = std::min(top_k - above.count, int64_t(found.size()));
        for (int64_t place = 0; place < among; place++) mass += weights[found[place].token];
        return among > 0 ? found[among - 1] : Place{NEVER, width};
    }

    // The last token, not behind `end`, before which the weights are below `wanted`.
    Place last_of_mass(double wanted, Place end, float least) {
        if (end.x != NEVER) least = end.x;
        double before = bisect(least, tally(least), [=](Tally one) { return one.mass >= wanted; }).mass;
        for (const Place& place : found) {
            before += weights[place.token];
            if (before >= wanted || (place.x == end.x && place.token == end.token)) return place;
        }
        return end;
    }

    std::vector<Place> found;
};

template <class T>
void sample_row(const Sampling<T>& all, int64_t row, Vocabulary& vocabulary) {
    const SamplingParameters& given = all.parameters[row];
    const T* logits = all.logits + all.places[row] * all.width;
    const bool numbers = vocabulary.read(logits);
    double normalizer = NAN, choice_normalizer = NAN;
    if (!numbers) {
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
    if (allowed && !(allowed[token / 32] >> token % 32 & 1))  // also where all allowed tokens have -inf
        for (token = 0; token < all.width - 1 && !(allowed[token / 32] >> token % 32 & 1);) token++;
    all.tokens[row] = token;
    all.logprobs[row] = float(load(logits[token]) - normalizer);
    all.choice_logprobs[row] = float(load(logits[token]) - choice_normalizer);
}

// Returns whether there was memory; if not, results are not complete.
template <class T>
bool sample_rows(const Sampling<T>& all) {
    bool failed = false;
#pragma omp parallel if (all.rows * all.width > 16384)
    {
        static thread_local std::unique_ptr<Vocabulary> kept;  // new memory would cost more than the work
        try {
            if (!kept || kept->width != all.width) kept.reset(), kept = std::make_unique<Vocabulary>(all.width);
        } catch (const std::bad_alloc&) {  // must not leave the thread
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
