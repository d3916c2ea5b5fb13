// Sampling on CPUs: for each row of logits, the token that penalties, bias, mask, filters and Gumbel noise select.
//
// Python has checked all pointers, ids and lines. Allocates only per-thread scratch. Throws nothing.
// `sample_slowly` in engine/sampling/sample.py is the slow twin, with the same results and terms.
//
// Rows are processed in blocks of kBlock tokens with known maxima; blocks without a token that could win or pass a
// filter are skipped. Threads share rows; rows that are too few for that are split into ranges of blocks.
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu_values.h"

// A row's parameters, in the order and the types of wire/sampling.py.
struct Params {
    float temperature;
    double top_p;
    int64_t top_k;
    double min_p;
    uint64_t seed;
    float frequency_penalty, presence_penalty, repetition_penalty;
};

// Mirrored field by field in engine/cpu/cpu_sampling.py. S rows of V logits.
struct BatonSampling {
    float* logits;    // [S, V], modified
    int64_t* tokens;  // [S], the results; -1 where the mask allows none, -2 where the first logit is NaN
    int64_t num_rows, vocabulary;
    float least_temperature, most;  // temperatures below the first are greedy; `most` bounds temperatures and penalties
    const Params* params;                     // [S]
    const int64_t* positions;                 // [S]
    const int32_t *counts, *counts_line;      // [k, V] or null, [S]: line of counts, -1: none
    const int32_t *extra_starts, *extra_ids;  // [S + 1] or null, [..]
    const int32_t *bias_starts, *bias_ids;    // [S + 1] or null, [..]
    const float* bias_values;                 // [..]
    const int32_t *masks, *mask_line;         // [m, ceil(V / 32)] or null, [S]: line of masks, -1: none
};

namespace {

constexpr int kBlock = 256;
constexpr int64_t kSplitTokens = 8192;  // shorter rows are not split over threads, which costs 2 us a phase
constexpr int kBuckets = 512;           // of a histogram over values
constexpr int kCopies = 8;              // copies of the histogram, so that lanes do not wait for each other
constexpr int kFewMembers = 128;        // up to this many are sorted
constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowest = -64;          // e^-64 is negligible beside the likeliest, e^0: lower values share one bucket
constexpr float kMaxGumbel = 22.9f;     // the largest noise is -log(-log1p(-2^-33)) = 22.874
constexpr float kSlack = 1e-3f;         // margin for rounded bounds: scores that matter are below 50, ulp 4e-6

typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Longs __attribute__((vector_size(kLanes * 4)));

template <int... i> constexpr Words count_up(std::integer_sequence<int, i...>) { return Words{i...}; }
constexpr Words kLane = count_up(std::make_integer_sequence<int, kLanes>{});

float largest(Floats v) { return reduce(v, larger); }
bool any(Words v) {
    Longs pairs = bits<Longs>(v);
    uint64_t all = 0;
    for (int i = 0; i < kLanes / 2; ++i) all |= pairs[i];
    return all != 0;
}

// Forces a store, so that lanes are read one by one from memory instead of extracted from the vector.
template <class Array> void keep_in_memory(Array& array) { asm volatile("" : "+m"(array)); }

// --- noise: the hash of engine/sampling/noise.py

template <class W> W mix32(W word) {
    word = (word ^ (word >> 16)) * 0x7FEB352D;
    word = (word ^ (word >> 15)) * 0x846CA68B;
    return word ^ (word >> 16);
}
uint64_t mix64(uint64_t word) {
    word += 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
}

struct Key {
    uint32_t high, low;
    template <class W> W hash(W id) const { return mix32(mix32(id ^ high) + low); }
    float noise(uint32_t id) const {
        float v = std::min(((float)hash(id) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
        return (float)-std::log(-std::log1p(-(double)v));
    }
    // Upper bound of the noise: -log(-log1p(-v)) <= -log v, and log2(m 2^e) >= e + m - 1, which a float's bits give.
    Floats ceiling(Words ids) const {
        Floats shifted = __builtin_convertvector(hash(ids), Floats) + 0.5f;  // 2^32 v
        return (159.0f - __builtin_convertvector(bits<Words>(shifted), Floats) * 0x1p-23f) * 0.693147181f;
    }
};

// --- rows

// e^x for x <= 0, relative error below 1e-14; values below -700 count as -700.
Doubles exp_nonpositive(Doubles x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves round(x) in the low mantissa bits
    x = x < -700.0 ? Doubles{} - 700.0 : x;
    Doubles shifted = x * 1.4426950408889634 + kRound;
    Doubles n = shifted - kRound;
    Doubles r = x - n * 0.693147180369123816490;  // ln 2 in two parts; r in [-0.347, 0.347]
    r = r - n * 1.90821492927058770002e-10;
    Doubles p = r * (1.0 / 39916800) + 1.0 / 3628800;
    for (double factor : {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
        p = p * r + factor;
    return bits<Doubles>(bits<Longs>(p) + (bits<Longs>(shifted) << 52));
}

// Weight of a value: e^value for top_p, 1 for top_k.
template <bool is_mass> void weigh(const float* values, double* weights) {  // kLanes each
    for (int half = 0; half < kLanes; half += kLanes / 2) {
        Doubles weight = Doubles{} + 1.0;
        if constexpr (is_mass)
            weight = exp_nonpositive(__builtin_convertvector(load<HalfFloats>(values + half), Doubles));
        store(weights + half, weight);
    }
}

struct Scratch {  // per thread; grows and is kept
    std::vector<float> maxima, members;
    std::vector<double> histograms;
    float tail[kBlock];
};

// The tokens that the filters keep: those above `lowest`, and those equal to it up to `last_id`.
struct Floor {
    float lowest = kMinusInfinity;
    int64_t last_id = std::numeric_limits<int64_t>::max();
};
struct Best {
    float score;
    int64_t id;
    void take(float other, int64_t other_id) {
        if (other > score || (other == score && other_id < id)) score = other, id = other_id;
    }
};

class Row {
  public:
    Row(const BatonSampling& batch, int64_t row, int num_parts, Scratch& scratch)
        : batch_(batch), params_(batch.params[row]), row_(row), vocabulary_(batch.vocabulary),
          num_blocks_((vocabulary_ + kBlock - 1) / kBlock), num_parts_(num_parts),
          values_(batch.logits + row * vocabulary_), scratch_(scratch) {
        scratch.maxima.resize(num_blocks_);
    }

    int64_t choose() {
        if (std::isnan(values_[0])) return -2;  // all are: the hidden state was NaN
        bool is_changed = penalise();
        is_changed |= add_bias();
        copy_tail();
        const uint32_t* mask = find_mask();
        if (is_changed || mask) bound(mask);
        else find_maxima();
        float most = find_most();
        if (!mask && !(std::abs(most) < kMost)) {  // from a broken model; NaN too
            bound(nullptr);
            most = find_most();
        }
        if (most == kMinusInfinity) return -1;
        int64_t likeliest = find_first(most);
        float temperature = params_.temperature;
        if (temperature < batch_.least_temperature) return likeliest;
        scale(most, std::min(temperature, batch_.most));
        return draw(likeliest, find_floor());
    }

  private:
    const BatonSampling& batch_;
    const Params& params_;
    const int64_t row_, vocabulary_, num_blocks_;
    const int num_parts_;
    float* const values_;  // [V] logits, then scaled ones: at most 0
    Scratch& scratch_;
    float range_ = 0;  // the largest value minus the lowest scaled value that counts

    // The kBlock values from token b * kBlock on. The last block is padded with values that never win.
    float* block(int64_t b) { return (b + 1) * kBlock <= vocabulary_ ? values_ + b * kBlock : scratch_.tail; }

    template <class Work> void for_parts(Work work) {  // work(part, first block, end)
        if (num_parts_ == 1) return work(0, (int64_t)0, num_blocks_);
#pragma omp parallel for num_threads(num_parts_) schedule(static, 1)
        for (int part = 0; part < num_parts_; ++part)
            work(part, num_blocks_ * part / num_parts_, num_blocks_ * (part + 1) / num_parts_);
    }

    // --- adjusting

    float penalise(float value, uint32_t count) const {  // count: occurrences in the answer; bit 30: seen anywhere
        if (!count) return value;
        float penalty = std::clamp(params_.repetition_penalty, 1 / batch_.most, batch_.most);
        value = value > 0 ? value / penalty : value * penalty;
        double num_answer = count & ((1u << 30) - 1);
        if (!num_answer) return value;
        return (float)(value - (params_.frequency_penalty * num_answer + params_.presence_penalty));  // the product is exact
    }

    bool penalise() {
        if (params_.repetition_penalty == 1 && params_.frequency_penalty == 0 && params_.presence_penalty == 0)
            return false;
        int64_t line = batch_.counts ? batch_.counts_line[row_] : -1;
        const int32_t* counts = line < 0 ? nullptr : batch_.counts + line * vocabulary_;
        const int32_t *extra = nullptr, *end = nullptr;
        if (batch_.extra_starts) {
            extra = batch_.extra_ids + batch_.extra_starts[row_];
            end = batch_.extra_ids + batch_.extra_starts[row_ + 1];
        }
        std::vector<float> before(end - extra);
        for (const int32_t* id = extra; id < end; ++id) before[id - extra] = values_[*id];
        if (counts)
            for_parts([&](int, int64_t first, int64_t last) { penalise(counts, first * kBlock, last * kBlock); });
        for (const int32_t* id = extra; id < end; ++id) {
            uint32_t count = (counts ? counts[*id] : 0) + std::count(extra, end, *id);
            values_[*id] = penalise(before[id - extra], count);
        }
        return true;
    }

    void penalise(const int32_t* counts, int64_t begin, int64_t end) {
        end = std::min(end, vocabulary_);
        for (int64_t id = begin; id < end; id += kLanes) {
            if (id + kLanes <= end && !any(load<Words>(counts + id))) continue;  // nearly always
            for (int64_t i = id; i < std::min(id + kLanes, end); ++i) values_[i] = penalise(values_[i], counts[i]);
        }
    }

    bool add_bias() {
        if (!batch_.bias_starts) return false;
        int32_t begin = batch_.bias_starts[row_], end = batch_.bias_starts[row_ + 1];
        for (int32_t i = begin; i < end; ++i) values_[batch_.bias_ids[i]] += batch_.bias_values[i];
        return begin < end;
    }

    void copy_tail() {
        int64_t begin = vocabulary_ / kBlock * kBlock;
        if (begin == vocabulary_) return;
        std::copy(values_ + begin, values_ + vocabulary_, scratch_.tail);
        pad_tail();
    }
    void pad_tail() { std::fill(scratch_.tail + vocabulary_ % kBlock, scratch_.tail + kBlock, kMinusInfinity); }

    const uint32_t* find_mask() const {
        int64_t line = batch_.masks ? batch_.mask_line[row_] : -1;
        return line < 0 ? nullptr : (const uint32_t*)batch_.masks + line * ((vocabulary_ + 31) / 32);
    }

    // NaN and values below the float range become the lowest number, those above the highest, masked tokens -inf.
    void bound(const uint32_t* mask) {
        for_parts([&](int, int64_t first, int64_t last) {
            for (int64_t b = first; b < last; ++b) bound(b, mask);
        });
        if (vocabulary_ % kBlock) pad_tail();
        find_maxima();
    }

    void bound(int64_t b, const uint32_t* mask) {
        uint32_t words[kBlock / 32];
        std::fill_n(words, kBlock / 32, ~0u);
        if (mask) std::copy(mask + b * kBlock / 32, mask + std::min((b + 1) * kBlock, vocabulary_ + 31) / 32, words);
        float* values = block(b);
        for (int i = 0; i < kBlock; i += kLanes) {
            Floats value = load<Floats>(values + i);
            value = value > -kMost ? value : -kMost;
            value = value < kMost ? value : kMost;
            Words bit = ((Words{} + words[i / 32]) >> (kLane + i % 32)) & 1;
            store(values + i, bit != 0 ? value : kMinusInfinity);
        }
    }

    void find_maxima() {
        for_parts([&](int, int64_t first, int64_t last) {
            for (int64_t b = first; b < last; ++b) {
                const float* values = block(b);
                Floats most = Floats{} + kMinusInfinity, other = most;
                for (int i = 0; i < kBlock; i += 2 * kLanes) {
                    most = larger(load<Floats>(values + i), most);
                    other = larger(load<Floats>(values + i + kLanes), other);
                }
                scratch_.maxima[b] = largest(larger(most, other));
            }
        });
    }

    float find_most() const { return *std::max_element(scratch_.maxima.begin(), scratch_.maxima.end()); }

    int64_t find_first(float value) {
        int64_t b = std::find(scratch_.maxima.begin(), scratch_.maxima.end(), value) - scratch_.maxima.begin();
        return b * kBlock + (std::find(block(b), block(b) + kBlock, value) - block(b));
    }

    void scale(float most, float temperature) {
        std::vector<float> lowest(num_parts_);
        for_parts([&](int part, int64_t first, int64_t last) {
            Floats low{};
            for (int64_t b = first; b < last; ++b) {
                float* values = block(b);
                for (int i = 0; i < kBlock; i += kLanes) {
                    Floats value = (load<Floats>(values + i) - most) / temperature;
                    value = value > -kMost ? value : -kMost;  // NaN too
                    store(values + i, value);
                    low = larger(low, value > kLowest ? -value : 0.0f);
                }
                scratch_.maxima[b] = std::max((scratch_.maxima[b] - most) / temperature, -kMost);
            }
            lowest[part] = largest(low);
        });
        range_ = *std::max_element(lowest.begin(), lowest.end());
    }

    // --- filters

    Floor find_floor() {
        Floor floor;
        int64_t top_k = params_.top_k;
        if (top_k > 0 && top_k < vocabulary_) floor.lowest = find_weight<false>(find_at_least(top_k), top_k).lowest;
        double top_p = params_.top_p, min_p = params_.min_p;
        if (top_p < 1) floor = find_weight<true>(floor.lowest, top_p);
        float least = min_p > 0 ? (float)std::log(min_p) : kMinusInfinity;
        return least > floor.lowest ? Floor{least} : floor;
    }

    // A value that at least `count` tokens reach, since `count` blocks have one.
    float find_at_least(int64_t count) {
        if (count > num_blocks_) return kMinusInfinity;
        std::vector<float> maxima = scratch_.maxima;
        std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<>());
        return maxima[count - 1];
    }

    // Finds where the weights of values from `least` up, largest first, reach the goal: top_k, or top_p of the total.
    template <bool is_mass> Floor find_weight(float least, double goal) {
        float range = std::clamp(-least, 1e-30f, std::max(range_, 1e-30f));
        float factor = kBuckets / range;
        std::vector<double> weights = sum_buckets<is_mass>(least, factor);
        if (is_mass) {
            double total = 0;
            for (double weight : weights) total += weight;
            goal *= total;
        }
        double before = 0;
        int bucket = 0;
        while (bucket < kBuckets - 1 && before + weights[bucket] < goal) before += weights[bucket++];
        return find_among<is_mass>(take_members(least, factor, bucket), before, goal);
    }

    // The bucket of each value, never smaller for a smaller value; kBuckets for values below `least`.
    static Words find_buckets(Floats values, float least, float factor) {
        Floats place = values * -factor;
        place = place < kBuckets - 1 ? place : kBuckets - 1.0f;
        Words bucket = bits<Words>(__builtin_convertvector(place, decltype(values > values)));
        return values >= least ? bucket : kBuckets;
    }

    template <bool is_mass> std::vector<double> sum_buckets(float least, float factor) {
        constexpr int kSize = (kBuckets + 1) * kCopies;
        scratch_.histograms.assign((int64_t)num_parts_ * kSize, 0.0);
        for_parts([&](int part, int64_t first, int64_t last) {
            double* sums = scratch_.histograms.data() + (int64_t)part * kSize;
            for (int64_t b = first; b < last; ++b) {
                if (scratch_.maxima[b] < least) continue;
                const float* values = block(b);
                for (int i = 0; i < kBlock; i += kLanes) {
                    uint32_t places[kLanes];
                    double weights[kLanes];
                    Words bucket = find_buckets(load<Floats>(values + i), least, factor);
                    store(places, bucket * kCopies + (kLane & (kCopies - 1)));
                    weigh<is_mass>(values + i, weights);
                    keep_in_memory(places), keep_in_memory(weights);
                    for (int lane = 0; lane < kLanes; ++lane) sums[places[lane]] += weights[lane];
                }
            }
        });
        std::vector<double> weights(kBuckets, 0.0);
        for (int64_t place = 0; place < (int64_t)num_parts_ * kSize; ++place)
            if (int bucket = place % kSize / kCopies; bucket < kBuckets) weights[bucket] += scratch_.histograms[place];
        return weights;
    }

    int64_t take_members(float least, float factor, int bucket) {  // fills scratch_.members; returns their number
        scratch_.members.resize(num_blocks_ * kBlock + kLanes);
        float* members = scratch_.members.data();
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (scratch_.maxima[b] < least) continue;
            const float* values = block(b);
            for (int i = 0; i < kBlock; i += kLanes) {
                Words is_found = find_buckets(load<Floats>(values + i), least, factor) == (uint32_t)bucket;
                if (!any(is_found)) continue;
                int32_t is_in[kLanes];  // -1: found
                store(is_in, is_found);
                keep_in_memory(is_in);
                for (int lane = 0; lane < kLanes; ++lane) {
                    *members = values[i + lane];
                    members -= is_in[lane];
                }
            }
        }
        return members - scratch_.members.data();
    }

    // Like find_weight, among the first n members; values above them weigh `before`.
    template <bool is_mass> Floor find_among(int64_t n, double before, double goal) {
        float* members = scratch_.members.data();
        while (n > kFewMembers) {
            uint32_t low = ~0u, high = 0;  // bits of -value rise as values fall
            for (int64_t i = 0; i < n; ++i) {
                low = std::min(low, order(members[i]));
                high = std::max(high, order(members[i]));
            }
            if (low == high) break;
            int shift = 0;
            while ((high - low) >> shift >= kBuckets) ++shift;
            std::vector<double> weights(kBuckets, 0.0);
            for (int64_t begin = 0; begin < n; begin += kLanes) {
                double own[kLanes];
                weigh<is_mass>(members + begin, own);
                for (int64_t i = begin; i < std::min(begin + kLanes, n); ++i)
                    weights[(order(members[i]) - low) >> shift] += own[i - begin];
            }
            uint32_t bucket = 0;
            while (bucket < (high - low) >> shift && before + weights[bucket] < goal) before += weights[bucket++];
            n = std::remove_if(members, members + n, [=](float value) {
                    return (order(value) - low) >> shift != bucket;
                }) - members;
        }
        if (n > kFewMembers) return find_on_floor<is_mass>(members[0], n, before, goal);
        std::sort(members, members + n, std::greater<>());
        for (int64_t i = 0; i < n;) {
            int64_t end = std::upper_bound(members + i, members + n, members[i], std::greater<>()) - members;
            double weight = 1;
            if (is_mass) weight = std::exp((double)members[i]);
            if (end == n || before + (end - i) * weight >= goal)
                return find_on_floor<is_mass>(members[i], end - i, before, goal);
            before += (end - i) * weight;
            i = end;
        }
        return {};
    }

    static uint32_t order(float value) { return bits<uint32_t>(value) & 0x7FFFFFFF; }

    // n tokens equal the lowest value kept. For top_k all are kept, for top_p as many as reach the goal.
    template <bool is_mass> Floor find_on_floor(float lowest, int64_t n, double before, double goal) {
        if (!is_mass) return {lowest};
        double wanted = std::ceil((goal - before) / std::exp((double)lowest));
        if (!(wanted < n)) return {lowest};
        int64_t left = std::max<int64_t>(1, wanted);
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (scratch_.maxima[b] < lowest) continue;
            int64_t on = std::count(block(b), block(b) + kBlock, lowest);
            if (on < left) {
                left -= on;
                continue;
            }
            for (int64_t i = 0;; ++i)
                if (block(b)[i] == lowest && --left == 0) return {lowest, b * kBlock + i};
        }
        return {lowest};
    }

    // --- choosing

    int64_t draw(int64_t likeliest, Floor floor) {
        uint64_t word = mix64(mix64(params_.seed) ^ (uint64_t)batch_.positions[row_]);
        Key key{(uint32_t)(word >> 32), (uint32_t)word};
        Best first{key.noise(likeliest), likeliest};  // its value is 0, and no filter excludes it
        std::vector<Best> best(num_parts_, first);
        for_parts([&](int part, int64_t begin, int64_t end) {
            Best own = first;
            for (int64_t b = begin; b < end; ++b) {
                float least = std::max(own.score - kMaxGumbel - kSlack, floor.lowest);
                if (scratch_.maxima[b] >= least) draw(b, key, floor, own);
            }
            best[part] = own;
        });
        for (const Best& one : best) first.take(one.score, one.id);
        return first.id;
    }

    void draw(int64_t b, Key key, Floor floor, Best& best) {
        const float* values = block(b);
        float ceilings[kBlock];  // upper bounds of the scores
        Floats most = Floats{} + kMinusInfinity;
        for (int i = 0; i < kBlock; i += kLanes) {
            Floats value = load<Floats>(values + i);
            Floats ceiling = value + key.ceiling(kLane + (uint32_t)(b * kBlock + i));
            ceiling = value >= floor.lowest ? ceiling : kMinusInfinity;
            store(ceilings + i, ceiling);
            most = larger(ceiling, most);
        }
        if (largest(most) < best.score - kSlack) return;
        for (int i = 0; i < kBlock; ++i) {
            int64_t id = b * kBlock + i;
            if (ceilings[i] < best.score - kSlack || (values[i] == floor.lowest && id > floor.last_id)) continue;
            best.take(values[i] + key.noise(id), id);
        }
    }
};

}  // namespace

extern "C" void baton_sample(const BatonSampling* batch, int num_threads) {
    static thread_local Scratch scratch;
    bool is_split = batch->vocabulary >= kSplitTokens && num_threads > 1;
    int64_t num_shared = is_split ? batch->num_rows / num_threads * num_threads : batch->num_rows;
    bool is_small = batch->num_rows * batch->vocabulary < kSplitTokens;
#pragma omp parallel for num_threads(is_small ? 1 : num_threads) schedule(dynamic, 1)
    for (int64_t row = 0; row < num_shared; ++row) batch->tokens[row] = Row(*batch, row, 1, scratch).choose();
    for (int64_t row = num_shared; row < batch->num_rows; ++row)
        batch->tokens[row] = Row(*batch, row, num_threads, scratch).choose();
}
