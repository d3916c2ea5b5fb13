// Layers with a state of each sequence: gated short convolutions and Gated DeltaNets, token by token.
//
// Sums are float32. Python has checked all pointers. Scratch is on the stack. Throws nothing.
#include <cmath>

#include "cpu_values.h"

// The structs are mirrored field by field in cpu_states.py.
struct BatonSequences {
    const int64_t *sources, *targets;  // [count] slots; a source of -1 means zeros
    const int32_t* starts;             // [count + 1] first row of each sequence
    int64_t count;
};

// One kind of state: [num_slots][num_heads][head_dim][...], contiguous within a head; strides in elements.
struct BatonStates {
    float* data;
    int64_t slot_stride, head_stride, num_heads, head_dim;
};

struct BatonRows {
    const void* rows;
    void* out;  // contiguous, of the same type
    int64_t stride;
    int is_bfloat16, num_threads;
};

struct BatonDeltaNet {
    const float *conv, *decay_rate, *dt_bias, *norm;
    int64_t taps, value_dim;
    float eps;
};

namespace {

constexpr int64_t kChannels = 128;  // convolved at a time: whole cache lines of rows
constexpr int64_t kAhead = 8;  // rows are pages apart: too far for the hardware prefetcher
constexpr int kMostTaps = 8, kMostKeys = 256;  // mirrored in cpu_states.py
constexpr int kVectors = kRegisters == 32 ? 4 : 2;  // of a block's columns: its two sums and changes stay in registers
constexpr int64_t kColumns = kVectors * kLanes;  // 64 with AVX-512: 128 keys are 32 KiB
constexpr int64_t kTokens = 32;  // whose numbers are kept while blocks of columns pass over them
constexpr int64_t kFewValues = 1 << 19;  // one thread passes over these before another is awake: 0.1 ms
constexpr float kNormEps = 1e-6f;

Floats load_some(const float* from, int64_t count) { return load_part<Floats>(from, count * 4); }
Floats load_some(const bfloat16* from, int64_t count) { return widen(load_part<Halves>(from, count * 2)); }
void store_some(float* to, Floats values, int64_t count) { store_part(to, values, count); }
void store_some(bfloat16* to, Floats values, int64_t count) { store_part(to, narrow(values), count); }
float as_float(float value) { return value; }
float as_float(bfloat16 value) { return bits<float>((uint32_t)value << 16); }

template <class Row> Floats load_row(const BatonRows& given, int64_t row, int64_t column, int64_t left) {
    const Row* const from = (const Row*)given.rows + row * given.stride + column;
    __builtin_prefetch(from + kAhead * given.stride);
    return load_some(from, left);
}

float sum_products(const float* a, const float* b, int64_t count) {
    Floats sum{};
    for (int64_t i = 0; i < count; i += kLanes) sum += load_some(a + i, count - i) * load_some(b + i, count - i);
    return reduce(sum, plus);
}

// Convolves `count` <= kChannels channels of all sequences, from channel `first` of a head on. weight: [count][taps].
// input(row, i, left) gives kLanes inputs; output(row, i, left, sums) takes what becomes of them.
template <class Input, class Output>
void convolve(const BatonSequences& at, const BatonStates& states, int64_t head, int64_t first, int64_t count,
              const float* weight, int64_t taps, Input input, Output output) {
    const int64_t num_past = taps - 1, own = head * states.head_stride + first * num_past;
    float weights[kMostTaps][kChannels]{}, inputs[kMostTaps][kChannels]{};  // by age: oldest first
    for (int64_t c = 0; c < count; ++c)
        for (int64_t k = 0; k < taps; ++k) weights[k][c] = weight[c * taps + k];
    for (int64_t b = 0; b < at.count; ++b) {
        const float* const from = at.sources[b] < 0 ? nullptr : states.data + at.sources[b] * states.slot_stride + own;
        for (int64_t c = 0; c < count; ++c)
            for (int64_t k = 0; k < num_past; ++k) inputs[k][c] = from ? from[c * num_past + k] : 0.0f;
        for (int64_t row = at.starts[b]; row < at.starts[b + 1]; ++row)
            for (int64_t i = 0; i < count; i += kLanes) {
                store(inputs[num_past] + i, input(row, i, count - i));
                Floats sum{};
                for (int64_t k = 0; k < taps; ++k) {
                    const Floats values = load<Floats>(inputs[k] + i);
                    sum += values * load<Floats>(weights[k] + i);
                    if (k) store(inputs[k - 1] + i, values);  // one token older
                }
                output(row, i, count - i, sum);
            }
        float* const to = states.data + at.targets[b] * states.slot_stride + own;
        for (int64_t c = 0; c < count; ++c)
            for (int64_t k = 0; k < num_past; ++k) to[c * num_past + k] = inputs[k][c];
    }
}

int count_threads(const BatonRows& given, int64_t num_values) {
    return num_values < kFewValues ? 1 : given.num_threads;
}

int64_t count_blocks(const BatonStates& states) {
    return states.num_heads * ((states.head_dim + kChannels - 1) / kChannels);
}

// body(head, first channel in the head, channels) of a block.
template <class Body> void visit_block(const BatonStates& states, int64_t block, Body body) {
    const int64_t head = block % states.num_heads, first = block / states.num_heads * kChannels;
    body(head, first, std::min(kChannels, states.head_dim - first));
}

template <class Row>
void gated_conv(const BatonRows& given, const BatonSequences& at, const BatonStates& states, const float* weight,
                const float* bias, int64_t taps) {
    const int64_t width = states.num_heads * states.head_dim;
    const int num_threads = count_threads(given, at.starts[at.count] * 3 * width);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t block = 0; block < count_blocks(states); ++block)
        visit_block(states, block, [&](int64_t head, int64_t first, int64_t count) {
            const int64_t channel = head * states.head_dim + first;
            const auto load_at = [&](int64_t row, int64_t part, int64_t i, int64_t left) {
                return load_row<Row>(given, row, part * width + channel + i, left);
            };
            convolve(
                at, states, head, first, count, weight + channel * taps, taps,
                [&](int64_t row, int64_t i, int64_t left) {
                    return load_at(row, 0, i, left) * load_at(row, 2, i, left);
                },
                [&](int64_t row, int64_t i, int64_t left, Floats sums) {
                    if (bias) sums += load_some(bias + channel + i, left);
                    store_some((Row*)given.out + row * width + channel + i, load_at(row, 1, i, left) * sums, left);
                });
        });
}

// What a token does to one head's memory M, [key_dim][value_dim]: M = decay M + unit key x change.
struct Token {
    const float *query, *key;  // [key_dim], not yet of length 1
    float* value;              // [value_dim], then what the query finds
    float query_factor, key_factor, product;  // to length 1 (the query to key_dim^-1/2); unit query times unit key
    float decay, beta;
};

struct Sums {
    Floats key[kVectors], query[kVectors];
};

// One pass over a block of kColumns columns of M: its products with the next token's key and query, if there is one,
// and before them, if there is a `change`, M = decay M + key x change, written to `to`.
template <bool changes, bool sums>
inline Sums pass(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t num_keys,
                 const Token* token, const Floats* change, const Token* next) {
    Sums sum{};
    Floats by[kVectors];
    if constexpr (changes) std::copy_n(change, kVectors, by);
    for (int64_t k = 0; k < num_keys; ++k)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            Floats values = load<Floats>(from + k * from_stride + j * kLanes);
            if constexpr (changes) {
                values = add_products(values * token->decay, by[j], token->key[k]);
                store(to + k * to_stride + j * kLanes, values);
            }
            if constexpr (sums) {
                sum.key[j] = add_products(sum.key[j], values, next->key[k]);
                sum.query[j] = add_products(sum.query[j], values, next->query[k]);
            }
        }
    return sum;
}

// Tokens in their order, over `width` <= kColumns columns of M from column `first` on. M has value_dim columns in all.
void remember(const float* from, float* to, int64_t num_keys, int64_t value_dim, int64_t first, int64_t width,
              const Token* tokens, int64_t num_tokens) {
    alignas(64) float block[kMostKeys * kColumns];  // M between tokens
    const bool is_direct = from && width == kColumns;
    if (!is_direct)
        for (int64_t k = 0; k < num_keys; ++k)
            for (int64_t i = 0; i < kColumns; i += kLanes)
                store(block + k * kColumns + i, from ? load_some(from + k * value_dim + i, width - i) : Floats{});
    const float* memory = is_direct ? from : block;
    int64_t stride = is_direct ? value_dim : kColumns;
    Sums sum = pass<false, true>(memory, stride, nullptr, 0, num_keys, nullptr, nullptr, tokens);
    for (int64_t t = 0; t < num_tokens; ++t) {
        const Token& token = tokens[t];
        Floats change[kVectors];
        for (int j = 0; j < kVectors; ++j) {
            float* const value = token.value + first + j * kLanes;
            const int64_t left = width - j * kLanes;
            const Floats delta = token.beta * (load_some(value, left) - token.decay * token.key_factor * sum.key[j]);
            store_some(value, token.decay * token.query_factor * sum.query[j] + token.product * delta, left);
            change[j] = token.key_factor * delta;
        }
        if (t + 1 < num_tokens)
            sum = pass<true, true>(memory, stride, block, kColumns, num_keys, &token, change, &token + 1);
        else if (width == kColumns)
            pass<true, false>(memory, stride, to, value_dim, num_keys, &token, change, nullptr);
        else
            pass<true, false>(memory, stride, block, kColumns, num_keys, &token, change, nullptr);
        memory = block, stride = kColumns;
    }
    if (width == kColumns) return;
    for (int64_t k = 0; k < num_keys; ++k)
        for (int64_t i = 0; i < width; i += kLanes)
            store_some(to + k * value_dim + i, load<Floats>(block + k * kColumns + i), width - i);
}

// values * weight / their root mean square * silu(gate)
template <class Row>
void gate_norm(const float* values, const float* weight, const Row* gate, Row* out, int64_t count, float eps) {
    const float factor = 1.0f / std::sqrt(sum_products(values, values, count) / count + eps);
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats normed = load_some(values + i, count - i) * factor * load_some(weight + i, count - i);
        store_some(out + i, normed * silu(load_some(gate + i, count - i)), count - i);
    }
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The numbers of a token before the memory is read.
Token prepare(const float* query, const float* key, float* value, int64_t num_keys, float a, float b,
              float decay_rate) {
    const float query_factor = 1.0f / std::sqrt((sum_products(query, query, num_keys) + kNormEps) * num_keys);
    const float key_factor = 1.0f / std::sqrt(sum_products(key, key, num_keys) + kNormEps);
    const float product = sum_products(query, key, num_keys) * query_factor * key_factor;
    return {query,   key, value, query_factor, key_factor, product, std::exp(decay_rate * softplus(a)),
            1.0f / (1.0f + std::exp(-b))};
}

// One sequence and value head. mixed: see `delta_net`; overwrites the sequence's values.
template <class Row>
void run_head(const BatonRows& given, const BatonSequences& at, const BatonDeltaNet& layer, const BatonStates& keys,
              const BatonStates& memory, float* mixed, int64_t b, int64_t head) {
    const int64_t num_heads = memory.num_heads, num_keys = keys.head_dim, value_dim = layer.value_dim;
    const int64_t key_width = keys.num_heads * num_keys, value_width = num_heads * value_dim;
    const int64_t num_rows = at.starts[at.count], key_head = head / (num_heads / keys.num_heads);
    float* const query = mixed + key_head * num_keys * num_rows;
    float* const value = mixed + (2 * key_width + head * value_dim) * num_rows;
    float* const to = memory.data + at.targets[b] * memory.slot_stride + head * memory.head_stride;
    const float* from =
        at.sources[b] < 0 ? nullptr : memory.data + at.sources[b] * memory.slot_stride + head * memory.head_stride;
    for (int64_t row = at.starts[b], end = at.starts[b + 1]; row < end; row += kTokens, from = to) {
        Token tokens[kTokens];
        const int64_t num_tokens = std::min(kTokens, end - row);
        const Row* const gates = (const Row*)given.rows + row * given.stride + 2 * key_width + value_width;  // z, b, a
        for (int64_t t = 0; t < num_tokens; ++t) {
            const float* const own = query + (row + t) * num_keys;
            const Row* const b_of = gates + t * given.stride + value_width + head;
            tokens[t] = prepare(own, own + key_width * num_rows, value + (row + t) * value_dim, num_keys,
                                as_float(b_of[num_heads]) + layer.dt_bias[head], as_float(b_of[0]),
                                layer.decay_rate[head]);
        }
        for (int64_t first = 0; first < value_dim; first += kColumns)
            remember(from ? from + first : nullptr, to + first, num_keys, value_dim, first,
                     std::min(kColumns, value_dim - first), tokens, num_tokens);
        for (int64_t t = 0; t < num_tokens; ++t)
            gate_norm(tokens[t].value, layer.norm, gates + t * given.stride + head * value_dim,
                      (Row*)given.out + (row + t) * value_width + head * value_dim, value_dim, layer.eps);
    }
}

// states: of queries, keys and values. mixed: scratch for them after the convolution, each head's as [T][head_dim].
template <class Row>
void delta_net(const BatonRows& given, const BatonSequences& at, const BatonDeltaNet& layer, const BatonStates* states,
               const BatonStates& memory, float* mixed) {
    const int64_t key_blocks = count_blocks(states[0]), num_blocks = 2 * key_blocks + count_blocks(states[2]);
    const int64_t key_width = states[0].num_heads * states[0].head_dim;
    const int64_t num_rows = at.starts[at.count];
    const int num_threads = count_threads(given, num_rows * memory.num_heads * memory.head_dim * layer.value_dim);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t part = std::min<int64_t>(block / key_blocks, 2);
            visit_block(states[part], block - part * key_blocks, [&](int64_t head, int64_t first, int64_t count) {
                const int64_t head_dim = states[part].head_dim, channel = part * key_width + head * head_dim + first;
                float* const to = mixed + (channel - first) * num_rows + first;
                convolve(
                    at, states[part], head, first, count, layer.conv + channel * layer.taps, layer.taps,
                    [&](int64_t row, int64_t i, int64_t left) {
                        return load_row<Row>(given, row, channel + i, left);
                    },
                    [&](int64_t row, int64_t i, int64_t left, Floats sums) {
                        store_some(to + row * head_dim + i, silu(sums), left);
                    });
            });
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < at.count * memory.num_heads; ++item)
            run_head<Row>(given, at, layer, states[0], memory, mixed, item / memory.num_heads, item % memory.num_heads);
    }
}

}  // namespace

// rows: gates, out gates and values, [T][3 channels]; out: [T][channels]. bias: null or [channels].
extern "C" void baton_gated_conv(const BatonRows* given, const BatonSequences* at, const BatonStates* states,
                                 const float* weight, const float* bias, int64_t taps) {
    (given->is_bfloat16 ? gated_conv<bfloat16> : gated_conv<float>)(*given, *at, *states, weight, bias, taps);
}

// rows: queries, keys, values, z, b, a. states: of queries, keys, values, and the memory. mixed: see `delta_net`.
extern "C" void baton_delta_net(const BatonRows* given, const BatonSequences* at, const BatonDeltaNet* layer,
                                const BatonStates* states, float* mixed) {
    (given->is_bfloat16 ? delta_net<bfloat16> : delta_net<float>)(*given, *at, *layer, states, states[3], mixed);
}
