// Paged attention on CPUs: online softmax over key tiles, for decode (few query rows) and prefill (many) alike.
//
// Python has checked all pointers, strides and page tables. Allocates only per-thread scratch. Throws nothing.
// A work item is (block of query positions, KV head). Its query rows are position-major: row = position * group + head
// in group, so every K/V page is packed once for all query heads that share it.
//
// Both products, scores = Q K' and output += P V, are one `multiply`: A is row-major, B lies in column panels:
//   [columns / kLanes][depth][kLanes] float32, any CPU, or
//   [columns / kLanes][depth / 2][kLanes][2] bfloat16, for products of pairs and AMX tiles
//
//                      keys of a tile: kTile               head_dim
//                    +------------------------+          +----------+
//   kSubRows of a    |  scores, then softmax  |  times   |  values  |  added to the rows' output
//   block's rows     +------------------------+          +----------+
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cpu_amx.h"
#include "cpu_products.h"

// Fixed for all layers of one batch; mirrored field by field in cpu_paged.py.
struct BatonBatch {
    void* pool;                    // runs of page_tokens rows of head_dim; the strides below locate a run
    const int32_t* cu_seqlens_q;   // [B + 1]
    const int32_t* seq_lens;       // [B]
    const int32_t* page_table;     // [B, page_table_width]
    const int64_t* slot_mapping;   // [num_tokens]: page * page_tokens + row in the page
    const int32_t* blocks;         // [num_blocks, 2]: sequence, first query position among its new tokens
    int64_t page_table_width, num_tokens, num_blocks, block_tokens;
    int64_t page_stride, head_stride, layer_stride, kv_stride;  // in elements; kv: from keys to values
    int64_t num_heads, num_kv_heads, page_tokens, head_dim;
    float scale, softcap;  // softcap: 0 for none
};

// One layer's tensors, [T, heads, head_dim]; strides in elements.
struct BatonLayer {
    const void *query, *key, *value;  // key and value: null if they are in the pool
    void* out;  // contiguous
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t layer, window;  // window: keys a query sees, itself included
    const float* sinks;     // [num_heads] logits that join the softmax and have no value; null: none
};

namespace {

constexpr int kRows = kRegisters == 32 ? 8 : 6;  // multiplied at a time with two vectors: sums leave registers for both and x
constexpr int64_t kFewTokens = 16;  // writing these takes less time than waiting for other threads
constexpr int64_t kBytesAThread = 1 << 19;  // of KV: one thread reads less before another is awake
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

void widen_row(const bfloat16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = bits<float>((uint32_t)from[i] << 16);
}
void write_scaled(const float* from, float factor, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] * factor;
}
void write_scaled(const float* from, float factor, bfloat16* to, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const Floats values = load_part<Floats>(from + i, (n - i) * 4);
        store_part(to + i, narrow(values * factor), n - i);
    }
}

// 2^x for x <= 0; exactly 0 below -100, so that no product with it is a (slow) denormal.
Floats exp2_nonpositive(Floats x) { return exp2_in_range(x < -100.0f ? Floats{} - 127.0f : x); }

// c[rows][2 panels] = a[rows][depth] * panels, plus c if `add`. Depth counts words of 4 bytes: a float or a pair.
template <class Math, bool add, int rows>
void multiply_rows(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t panel, float* c, int64_t ldc,
                   int64_t depth) {
    Floats sum[rows][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < 2; ++j) sum[i][j] = add ? load<Floats>(c + i * ldc + j * kLanes) : Floats{};
    for (int64_t k = 0; k < depth; ++k) {
        const Words first = load<Words>(b + k * kLanes), second = load<Words>(b + panel + k * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
            sum[i][0] = Math::add_word(sum[i][0], first, a[i * lda + k]);
            sum[i][1] = Math::add_word(sum[i][1], second, a[i * lda + k]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < 2; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
}
template <class Math, bool add, int rows = kRows>
void multiply_block(int64_t num_rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t panel, float* c,
                    int64_t ldc, int64_t depth) {
    if (num_rows >= rows) return multiply_rows<Math, add, rows>(a, lda, b, panel, c, ldc, depth);
    if constexpr (rows > 1) multiply_block<Math, add, rows - 1>(num_rows, a, lda, b, panel, c, ldc, depth);
}

// c[rows][columns] = a[rows][depth] * panels of `capacity` operands of depth, plus c if `add`.
template <class Math> struct WithVectors {
    template <bool add, class Operand>
    static void multiply(const Operand* a, int64_t lda, const Operand* b, int64_t capacity, float* c, int64_t ldc,
                         int64_t rows, int64_t depth, int64_t columns) {
        constexpr int kPerWord = 4 / sizeof(Operand);
        const int64_t panel = capacity / kPerWord * kLanes, step = (rows + kRows - 1) / kRows;
        const int64_t height = (rows + step - 1) / step;  // blocks of about equal heights
        for (; rows > 0; rows -= height, a += height * lda, c += height * ldc)
            for (int64_t j = 0; j < columns; j += 2 * kLanes)
                multiply_block<Math, add>(std::min(rows, height), (const uint32_t*)a, lda / kPerWord,
                                          (const uint32_t*)b + j / kLanes * panel, panel, c + j, ldc, (depth + kPerWord - 1) / kPerWord);
    }
};

// Any CPU: pages of T, arithmetic in float32.
template <class T> struct Plain : WithVectors<Plain<T>> {
    using Page = T;
    using Operand = float;
    static constexpr int kStep = 2 * kLanes;  // head dimensions and keys are padded to this
    static constexpr int kSubRows = 16;  // query rows that share scores
    static constexpr int kTile = 64;     // keys packed at a time: K and V of D=64 bf16 are 16 KB, a third of L1
    static void begin(int64_t) {}
    static void end() {}
    static void store_probability(float* to, Floats p) { store(to, p); }
    static Floats add_word(Floats sum, Words b, uint32_t a) { return add_products(sum, (Floats)b, bits<float>(a)); }

    static void pack_keys(const T* const* rows, int64_t num_keys, int64_t dim, int64_t padded, float* to) {
        for (int64_t n = 0; n < num_keys; n += kLanes, to += padded * kLanes)
            for (int64_t d = 0; d < dim; d += kLanes * 4 / (int)sizeof(T)) {
                Words words[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    words[i] = load_part<Words>((const char*)(rows[n + i] + d), (dim - d) * sizeof(T));
                transpose(words);
                for (int i = 0; i < kLanes; ++i)
                    if constexpr (sizeof(T) == 4) {
                        store(to + (d + i) * kLanes, words[i]);
                    } else {  // a word holds dimensions d + 2i (low half) and d + 2i + 1
                        store(to + (d + 2 * i) * kLanes, words[i] << 16);
                        store(to + (d + 2 * i + 1) * kLanes, words[i] & 0xFFFF0000u);
                    }
            }
    }
    static void pack_values(const T* const* rows, int64_t num_keys, int64_t dim, int64_t capacity, float* to) {
        for (int64_t n = 0; n < num_keys; ++n)
            for (int64_t d = 0; d < dim; d += kLanes) {
                const char* from = (const char*)(rows[n] + d);
                float* at = to + d * capacity + n * kLanes;
                if constexpr (sizeof(T) == 4) {
                    store(at, load_part<Words>(from, (dim - d) * 4));
                } else {
                    store(at, __builtin_convertvector(load_part<Halves>(from, (dim - d) * 2), Words) << 16);
                }
            }
    }
};

#ifdef BATON_PAIRS
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
template <int half, int... i> Shorts interleave(Shorts a, Shorts b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (half * kLanes + i / 2 + (i % 2) * 2 * kLanes)...);
}

// Pages of bfloat16, products of pairs summed in float32.
struct PairsOfPages : WithVectors<PairsOfPages> {
    using Page = bfloat16;
    using Operand = bfloat16;
    static constexpr int kStep = 2 * kLanes, kSubRows = 16, kTile = 64;
    static void begin(int64_t) {}
    static void end() {}
    static void store_probability(bfloat16* to, Floats p) { store(to, narrow(p)); }
    static Floats add_word(Floats sum, Words b, uint32_t a) { return add_pairs(sum, b, a); }

    static void pack_keys(const Page* const* rows, int64_t num_keys, int64_t dim, int64_t padded, bfloat16* to) {
        for (int64_t n = 0; n < num_keys; n += kLanes, to += padded * kLanes)
            for (int64_t d = 0; d < dim; d += 2 * kLanes) {
                Words words[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    words[i] = load_part<Words>((const char*)(rows[n + i] + d), (dim - d) * 2);
                transpose(words);
                for (int i = 0; i < kLanes; ++i) store(to + (d / 2 + i) * 2 * kLanes, words[i]);
            }
    }
    static void pack_values(const Page* const* rows, int64_t num_keys, int64_t dim, int64_t capacity, bfloat16* to) {
        auto lanes = std::make_integer_sequence<int, 2 * kLanes>{};
        for (int64_t n = 0; n < num_keys; n += 2)
            for (int64_t d = 0; d < dim; d += 2 * kLanes) {
                Shorts even = load_part<Shorts>((const char*)(rows[n] + d), (dim - d) * 2);
                Shorts odd = load_part<Shorts>((const char*)(rows[n + 1] + d), (dim - d) * 2);
                store(to + d * capacity + n * kLanes, interleave<0>(even, odd, lanes));
                store(to + (d + kLanes) * capacity + n * kLanes, interleave<1>(even, odd, lanes));
            }
    }
};
#endif

#if defined(BATON_AMX) && defined(__AVX512BF16__)
#define BATON_AMX_PAIRS
struct TilesOfPages : PairsOfPages {
    static constexpr int kSubRows = 32;  // two tiles of rows times two of columns: four loads for four products
    static constexpr int kTile = 256;    // from L2: a row's softmax and its output are touched less often
    static void begin(int64_t num_rows) {  // tiles 0 to 3: sums; 4, 5: A; 6, 7: B
        const uint8_t height = std::min<int64_t>(num_rows, 16), rows[8] = {height, height, height, height, height, height, 16, 16};
        configure_tiles(rows, 8);
    }
    static void end() { TILE_RELEASE(); }
    // Reads and writes min(block's rows, 16) rows, or 32; depth and columns are zero-padded to 32.
    template <bool add>
    static void multiply(const bfloat16* a, int64_t lda, const bfloat16* b, int64_t capacity, float* c, int64_t ldc,
                         int64_t rows, int64_t depth, int64_t columns) {
        if (rows > 16) multiply_tiles<add, true>(a, lda, b, capacity * 16, c, ldc, depth, columns);
        else multiply_tiles<add, false>(a, lda, b, capacity * 16, c, ldc, depth, columns);
    }
    template <bool add, bool has_two>
    static void multiply_tiles(const bfloat16* a, int64_t lda, const bfloat16* b, int64_t panel, float* c, int64_t ldc,
                               int64_t depth, int64_t columns) {
        for (int64_t j = 0; j < columns; j += 32, b += 2 * panel) {
            float *const upper = c + j, *const lower = upper + 16 * ldc;
            if constexpr (add) {
                TILE_LOAD(0, upper, ldc * 4);
                TILE_LOAD(1, upper + 16, ldc * 4);
                if constexpr (has_two) {
                    TILE_LOAD(2, lower, ldc * 4);
                    TILE_LOAD(3, lower + 16, ldc * 4);
                }
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            }
            for (int64_t k = 0; k < depth; k += 32) {
                TILE_LOAD(4, a + k, lda * 2);
                TILE_LOAD(6, b + k * 16, 64);
                TILE_LOAD(7, b + panel + k * 16, 64);
                if constexpr (has_two) TILE_LOAD(5, a + 16 * lda + k, lda * 2);
                TILE_DOT_BF16(0, 4, 6);
                TILE_DOT_BF16(1, 4, 7);
                if constexpr (has_two) {
                    TILE_DOT_BF16(2, 5, 6);
                    TILE_DOT_BF16(3, 5, 7);
                }
            }
            TILE_STORE(0, upper, ldc * 4);
            TILE_STORE(1, upper + 16, ldc * 4);
            if constexpr (has_two) {
                TILE_STORE(2, lower, ldc * 4);
                TILE_STORE(3, lower + 16, ldc * 4);
            }
        }
    }
};
#endif

// One thread's memory, kept between calls; grows to the largest block so far.
struct Scratch {
    char* memory = nullptr;
    size_t capacity = 0, used = 0;
    ~Scratch() { std::free(memory); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return;
        std::free(memory);
        capacity = round_up(bytes, 4096);
        memory = (char*)std::aligned_alloc(64, capacity);
        if (!memory) std::abort();
    }
    template <class T> T* take(size_t count) {
        T* at = (T*)(memory + used);
        used += round_up(count * sizeof(T), 64);
        return at;
    }
};
thread_local Scratch scratch;

// Pointers to the K and V rows of a tile's keys; rows that pad the tile point at zeros.
template <class Page, int kTile> struct TileRows {
    const Page *keys[kTile], *values[kTile];
    int64_t num_keys, padded_keys;

    // Keys [first, end) of the KV head whose keys in page 0 are at `head_keys`; none if first >= end.
    void find(const BatonBatch& batch, const Page* head_keys, const int32_t* pages, int64_t first, int64_t end,
              int64_t step, const Page* zeros) {
        int64_t page = first / batch.page_tokens, row = first % batch.page_tokens;
        num_keys = std::clamp<int64_t>(end - first, 0, kTile);
        padded_keys = round_up(num_keys, step);
        for (int64_t n = 0; n < num_keys; ++page, row = 0) {
            const Page* at = head_keys + pages[page] * batch.page_stride + row * batch.head_dim;
            for (; row < batch.page_tokens && n < num_keys; ++row, ++n, at += batch.head_dim) {
                keys[n] = at;
                values[n] = at + batch.kv_stride;
            }
        }
        std::fill(keys + num_keys, keys + padded_keys, zeros);
        std::fill(values + num_keys, values + padded_keys, zeros);
    }
};

// One head of a page is only a few KB: too short for the hardware prefetcher.
template <class Page> void prefetch(const Page* const* rows, int64_t count, int64_t dim) {
    for (int64_t n = 0; n < count; ++n)
        for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(Page)) __builtin_prefetch(rows[n] + d);
}

// Caps scores in place. They are q·k, not scaled yet, before and after.
void cap_scores(float* scores, int64_t columns, float scale, float softcap) {
    const float before = scale / softcap, after = softcap / scale;
    for (int64_t n = 0; n < columns; n += kLanes) store(scores + n, tanh(load<Floats>(scores + n) * before) * after);
}

// One online-softmax step for one row: scores[columns] -> probabilities, of which only [begin, end) are visible.
// Rescales `output` and `sums` when the row's maximum grows. Columns is a multiple of kLanes.
template <class Math> void soften(float* scores, typename Math::Operand* probabilities, int64_t begin, int64_t end,
                                  int64_t columns, float scale_log2, float* maximum, Floats* sums, float* output,
                                  int64_t dim) {
    std::fill(scores, scores + begin, kMinusInfinity);
    std::fill(scores + end, scores + columns, kMinusInfinity);
    Floats highest = Floats{} + *maximum;
    for (int64_t n = 0; n < columns; n += kLanes) highest = larger(highest, load<Floats>(scores + n));
    float top = reduce(highest, larger);
    if (top == kMinusInfinity) {  // nothing visible yet
        std::memset((void*)probabilities, 0, columns * sizeof *probabilities);
        return;
    }
    Floats sum{};
    for (int64_t n = 0; n < columns; n += kLanes) {
        Floats p = exp2_nonpositive(load<Floats>(scores + n) * scale_log2 - top * scale_log2);
        sum += p;
        Math::store_probability(probabilities + n, p);
    }
    if (top != *maximum) {
        float shrink = std::exp2((*maximum - top) * scale_log2);
        *sums *= shrink;
        for (int64_t d = 0; d < dim; ++d) output[d] *= shrink;
        *maximum = top;
    }
    *sums += sum;
}

// `next_head`: the same sequence's head that this thread will probably process next, if it exists.
template <class Math>
void attend_block(const BatonBatch& batch, const BatonLayer& layer, int64_t sequence, int64_t first_query, int64_t head,
                  int64_t next_head) {
    using Page = typename Math::Page;
    using Operand = typename Math::Operand;
    constexpr int64_t kSubRows = Math::kSubRows, kTile = Math::kTile;
    using Rows = TileRows<Page, kTile>;
    const int64_t group = batch.num_heads / batch.num_kv_heads, dim = batch.head_dim;
    const int64_t padded = round_up(dim, Math::kStep);
    const int64_t query_begin = batch.cu_seqlens_q[sequence];
    const int64_t query_len = batch.cu_seqlens_q[sequence + 1] - query_begin;
    const int64_t num_queries = std::min(batch.block_tokens, query_len - first_query);
    const int64_t first_position = batch.seq_lens[sequence] - query_len + first_query;
    const int64_t end_position = first_position + num_queries;
    const int64_t rows = num_queries * group, padded_rows = round_up(rows, kSubRows);

    scratch.reserve(padded_rows * (padded * (4 + sizeof(Operand)) + sizeof(Floats) + 4) +
                    2 * padded * kTile * sizeof(Operand) + kSubRows * kTile * (4 + sizeof(Operand)) +
                    2 * sizeof(Rows) + dim * sizeof(Page) + 16 * 64);
    Operand* queries = scratch.take<Operand>(padded_rows * padded);
    float* output = scratch.take<float>(padded_rows * padded);
    Floats* sums = scratch.take<Floats>(padded_rows);
    float* maxima = scratch.take<float>(padded_rows);
    Operand* packed_keys = scratch.take<Operand>(padded * kTile);
    Operand* packed_values = scratch.take<Operand>(padded * kTile);
    float* scores = scratch.take<float>(kSubRows * kTile);
    Operand* probabilities = scratch.take<Operand>(kSubRows * kTile);
    Rows* tile = scratch.take<Rows>(1);
    Rows* next = scratch.take<Rows>(1);
    Page* zeros = scratch.take<Page>(dim);

    std::fill_n(zeros, dim, Page{});
    std::fill_n(queries, padded_rows * padded, Operand{});
    std::fill_n(output, padded_rows * padded, 0.0f);
    std::fill_n(sums, padded_rows, Floats{});
    std::fill_n(maxima, padded_rows, kMinusInfinity);
    for (int64_t row = 0; row < rows; ++row) {
        int64_t token = query_begin + first_query + row / group;
        const Page* from = (const Page*)layer.query + token * layer.query_token +
                           (head * group + row % group) * layer.query_head;
        if constexpr (std::is_same_v<Operand, Page>) std::copy_n(from, dim, queries + row * padded);
        else widen_row(from, queries + row * padded, dim);
        if (layer.sinks) {  // as if a key had this score
            maxima[row] = layer.sinks[head * group + row % group] / batch.scale;
            sums[row][0] = 1.0f;
        }
    }

    const Page* layer_keys = (const Page*)batch.pool + layer.layer * batch.layer_stride;
    const int32_t* pages = batch.page_table + sequence * batch.page_table_width;
    const float scale_log2 = batch.scale * 1.44269504f;
    Math::begin(rows);
    const int64_t begin_key = std::max<int64_t>(0, first_position - layer.window + 1);
    auto find_next = [&](int64_t of_head, int64_t first) {
        next->find(batch, layer_keys + of_head * batch.head_stride, pages, first, end_position, Math::kStep, zeros);
    };
    find_next(head, begin_key);
    for (int64_t first_key = begin_key; first_key < end_position; first_key += kTile) {
        std::swap(tile, next);
        const bool is_last = first_key + kTile >= end_position;
        if (is_last && next_head < batch.num_kv_heads) find_next(next_head, begin_key);  // prefetch only
        else find_next(head, first_key + kTile);
        prefetch(next->keys, next->num_keys, dim);
        Math::pack_keys(tile->keys, tile->padded_keys, dim, padded, packed_keys);
        prefetch(next->values, next->num_keys, dim);
        Math::pack_values(tile->values, tile->padded_keys, dim, kTile, packed_values);
        for (int64_t row = 0; row < rows; row += kSubRows) {
            int64_t num_rows = std::min(kSubRows, rows - row);
            int64_t last_position = first_position + (row + num_rows - 1) / group;
            int64_t visible = std::min(tile->num_keys, last_position + 1 - first_key);
            if (visible <= 0) continue;
            int64_t columns = round_up(visible, Math::kStep);
            Math::template multiply<false>(queries + row * padded, padded, packed_keys, padded, scores, kTile, num_rows,
                                           dim, columns);
            for (int64_t i = 0; i < num_rows; ++i) {
                int64_t position = first_position + (row + i) / group;
                int64_t end = std::clamp<int64_t>(position + 1 - first_key, 0, columns);
                int64_t begin = std::clamp<int64_t>(position + 1 - layer.window - first_key, 0, end);
                if (batch.softcap > 0) cap_scores(scores + i * kTile, columns, batch.scale, batch.softcap);
                soften<Math>(scores + i * kTile, probabilities + i * kTile, begin, end, columns, scale_log2,
                             maxima + row + i, sums + row + i, output + (row + i) * padded, padded);
            }
            Math::template multiply<true>(probabilities, kTile, packed_values, kTile, output + row * padded, padded,
                                          num_rows, columns, padded);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        int64_t token = query_begin + first_query + row / group;
        Page* to = (Page*)layer.out + (token * batch.num_heads + head * group + row % group) * dim;
        write_scaled(output + row * padded, 1.0f / reduce(sums[row], plus), to, dim);
    }
}

template <class Page> void write_token(const BatonBatch& batch, const BatonLayer& layer, int64_t token) {
    int64_t dim = batch.head_dim;
    const int64_t slot = batch.slot_mapping[token];
    Page* keys = (Page*)batch.pool + slot / batch.page_tokens * batch.page_stride + layer.layer * batch.layer_stride +
                 slot % batch.page_tokens * dim;
    Page* values = keys + batch.kv_stride;
    const Page* key = (const Page*)layer.key + token * layer.key_token;
    const Page* value = (const Page*)layer.value + token * layer.value_token;
    for (int64_t head = 0; head < batch.num_kv_heads; ++head) {
        std::copy_n(key + head * layer.key_head, dim, keys + head * batch.head_stride);
        std::copy_n(value + head * layer.value_head, dim, values + head * batch.head_stride);
    }
}

// In a parallel region, shared out and ends in a barrier.
template <class Page> void write_tokens(const BatonBatch& batch, const BatonLayer& layer) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < batch.num_tokens; ++token) write_token<Page>(batch, layer, token);
}

// Bytes of KV to read; a context shared by several blocks counts once per block.
int64_t count_bytes(const BatonBatch& batch, int64_t page_bytes) {
    int64_t num_keys = 0;
    for (int64_t block = 0; block < batch.num_blocks; ++block) num_keys += batch.seq_lens[batch.blocks[2 * block]];
    return num_keys * batch.num_kv_heads * batch.head_dim * 2 * page_bytes;
}

template <class Math> void attend(const BatonBatch& batch, const BatonLayer& layer, int num_threads) {
    using Page = typename Math::Page;
    if (count_bytes(batch, sizeof(Page)) < kBytesAThread) num_threads = 1;
    const bool is_short = batch.num_tokens <= kFewTokens;
    const bool is_new = layer.key != nullptr;
    if (is_new && is_short) write_tokens<Page>(batch, layer);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        if (is_new && !is_short) write_tokens<Page>(batch, layer);  // every new key is in the pool before any thread attends
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < batch.num_blocks * batch.num_kv_heads; ++item) {
            const int32_t* block = batch.blocks + item / batch.num_kv_heads * 2;
            int64_t head = item % batch.num_kv_heads;
            attend_block<Math>(batch, layer, block[0], block[1], head, head + num_threads);
        }
        Math::end();
    }
}

}  // namespace

// math: MathKind, for pages of bfloat16.
extern "C" void baton_attend(const BatonBatch* batch, const BatonLayer* layer, int is_float32,
                             [[maybe_unused]] int math, int num_threads) {
    if (is_float32) return attend<Plain<float>>(*batch, *layer, num_threads);
#ifdef BATON_AMX_PAIRS
    if (math == kTiles) return attend<TilesOfPages>(*batch, *layer, num_threads);
#endif
#ifdef BATON_PAIRS
    if (math != kWidened) return attend<PairsOfPages>(*batch, *layer, num_threads);
#endif
    attend<Plain<bfloat16>>(*batch, *layer, num_threads);
}
