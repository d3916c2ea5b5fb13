// Paged attention on CPUs: online softmax over key tiles, for decode (few query rows) and prefill (many) alike.
// Pages of bfloat16 on CPUs with AMX: cpu_attention_tiles.h, cpu_attention_few.h.
//
// Python has checked all pointers, strides and page tables. Allocates only per-thread scratch. Throws nothing.
// A work item is (block of query positions, KV head). Its query rows are position-major: row = position * group + head
// in group, so every K/V page is packed once for all query heads that share it.
//
// Both products, scores = Q K' and output += P V, are one `multiply`: A is row-major, B lies in column panels:
//   [columns / kLanes][depth][kLanes] float32, any CPU, or
//   [columns / kLanes][depth / 2][kLanes][2] bfloat16, for products of pairs
//
//                      keys of a tile: kTile               head_dim
//                    +------------------------+          +----------+
//   kSubRows of a    |  scores, then softmax  |  times   |  values  |  added to the rows' output
//   block's rows     +------------------------+          +----------+
#include "cpu_attention_few.h"

namespace {

// Multiplied at a time with two vectors: sums leave registers for both and x.
constexpr int kRows = kRegisters == 32 ? 8 : 6;
constexpr int64_t kFewTokens = 16;  // writing these takes less time than waiting for other threads
constexpr int64_t kBytesAThread = 1 << 19;  // of KV: one thread reads less before another is awake

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

bool is_tree(const BatonBatch& batch, const Block& block) { return batch.ancestors && batch.ancestors[block.token]; }

// Hides from a tree's token what it does not see of the sequence's new keys, which begin at `first`.
void hide_others(int32_t ancestors, float* scores, int64_t first, int64_t end) {
    for (int64_t n = std::max<int64_t>(first, 0); n < end; ++n)
        if (!(ancestors >> (n - first) & 1)) scores[n] = kMinusInfinity;
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

template <class Math> void attend_block(const BatonBatch& batch, const BatonLayer& layer, const Block& block) {
    using Page = typename Math::Page;
    using Operand = typename Math::Operand;
    constexpr int64_t kSubRows = Math::kSubRows, kTile = Math::kTile;
    using Rows = TileRows<Page, kTile>;
    const int64_t group = batch.num_heads / batch.num_kv_heads, dim = batch.head_dim, value_dim = batch.value_dim;
    const int64_t padded = round_up(dim, Math::kStep), padded_values = round_up(value_dim, Math::kStep);
    const int64_t head = block.head;
    const int64_t first_position = block.position, end_position = first_position + block.num_queries;
    const int64_t rows = block.num_queries * group, padded_rows = round_up(rows, kSubRows);

    scratch.reserve(padded_rows * (padded * (4 + sizeof(Operand)) + sizeof(Floats) + 4) +
                    2 * padded * kTile * sizeof(Operand) + kSubRows * kTile * (4 + sizeof(Operand)) +
                    2 * sizeof(Rows) + dim * sizeof(Page) + 16 * 64);
    Operand* queries = scratch.take<Operand>(padded_rows * padded);
    float* output = scratch.take<float>(padded_rows * padded_values);
    Floats* sums = scratch.take<Floats>(padded_rows);
    float* maxima = scratch.take<float>(padded_rows);
    Operand* packed_keys = scratch.take<Operand>(padded * kTile);
    Operand* packed_values = scratch.take<Operand>(padded_values * kTile);
    float* scores = scratch.take<float>(kSubRows * kTile);
    Operand* probabilities = scratch.take<Operand>(kSubRows * kTile);
    Rows* tile = scratch.take<Rows>(1);
    Rows* next = scratch.take<Rows>(1);
    Page* zeros = scratch.take<Page>(dim);

    std::fill_n(zeros, dim, Page{});
    std::fill_n(queries, padded_rows * padded, Operand{});
    std::fill_n(output, padded_rows * padded_values, 0.0f);
    std::fill_n(sums, padded_rows, Floats{});
    std::fill_n(maxima, padded_rows, kMinusInfinity);
    for (int64_t row = 0; row < rows; ++row) {
        int64_t token = block.token + row / group;
        const Page* from = (const Page*)layer.query + token * layer.query_token +
                           (head * group + row % group) * layer.query_head;
        if constexpr (std::is_same_v<Operand, Page>) std::copy_n(from, dim, queries + row * padded);
        else widen_row(from, queries + row * padded, dim);
        if (layer.sinks) {  // as if a key had this score
            maxima[row] = layer.sinks[head * group + row % group] / batch.scale;
            sums[row][0] = 1.0f;
        }
    }

    const bool has_tree = is_tree(batch, block);
    const Page* layer_keys = (const Page*)batch.pool + layer.layer * batch.layer_stride;
    const float scale_log2 = batch.scale * 1.44269504f;
    // A multiple, so that a row's keys are summed in the same tiles whoever is beside it.
    const int64_t begin_key = std::max<int64_t>(0, first_position - layer.window + 1) / kTile * kTile;
    auto find_next = [&](int64_t of_head, int64_t first) {
        const Page* const head_keys = layer_keys + of_head * batch.head_stride;
        next->find(batch, head_keys, block.pages, first, end_position, Math::kStep, zeros);
    };
    find_next(head, begin_key);
    for (int64_t first_key = begin_key; first_key < end_position; first_key += kTile) {
        std::swap(tile, next);
        const bool is_last = first_key + kTile >= end_position;
        if (is_last && block.next_head < batch.num_kv_heads) find_next(block.next_head, begin_key);  // prefetch only
        else find_next(head, first_key + kTile);
        prefetch(next->keys, next->num_keys, dim);
        Math::pack_keys(tile->keys, tile->padded_keys, dim, padded, packed_keys);
        if (batch.kv_stride) prefetch(next->values, next->num_keys, dim);
        Math::pack_values(tile->values, tile->padded_keys, value_dim, kTile, packed_values);
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
                if (has_tree) hide_others(batch.ancestors[block.token + (row + i) / group], scores + i * kTile,
                                          block.first_new - first_key, end);
                soften<Math>(scores + i * kTile, probabilities + i * kTile, begin, end, columns, scale_log2,
                             maxima + row + i, sums + row + i, output + (row + i) * padded_values, padded_values);
            }
            Math::template multiply<true>(probabilities, kTile, packed_values, kTile, output + row * padded_values,
                                          padded_values, num_rows, columns, padded_values);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        int64_t token = block.token + row / group;
        Page* to = (Page*)layer.out + (token * batch.num_heads + head * group + row % group) * value_dim;
        write_scaled(output + row * padded_values, 1.0f / reduce(sums[row], plus), to, value_dim);
    }
}

#ifdef BATON_AMX_PAGES
void attend_tiles_or_tree(const BatonBatch& batch, const BatonLayer& layer, const Block& block) {
    if (is_tree(batch, block)) attend_block<PairsOfPages>(batch, layer, block);
    else attend_by_tiles(batch, layer, block);
}
#endif

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
        if (batch.kv_stride) std::copy_n(value + head * layer.value_head, dim, values + head * batch.head_stride);
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
    return num_keys * batch.num_kv_heads * batch.head_dim * (batch.kv_stride ? 2 : 1) * page_bytes;
}

using Attend = void (*)(const BatonBatch&, const BatonLayer&, const Block&);

template <class Page>
void attend(const BatonBatch& batch, const BatonLayer& layer, int num_threads, Attend attend_block) {
    if (count_bytes(batch, sizeof(Page)) < kBytesAThread) num_threads = 1;
    const bool is_short = batch.num_tokens <= kFewTokens;
    const bool is_new = layer.key != nullptr;
    if (is_new && is_short) write_tokens<Page>(batch, layer);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        // Every new key is in the pool before any thread attends.
        if (is_new && !is_short) write_tokens<Page>(batch, layer);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < batch.num_blocks * batch.num_kv_heads; ++item)
            attend_block(batch, layer, Block(batch, item, num_threads));
    }
}

}  // namespace

// math: MathKind, for pages of bfloat16.
extern "C" void baton_attend(const BatonBatch* batch, const BatonLayer* layer, int is_float32,
                             [[maybe_unused]] int math, int num_threads) {
    if (is_float32) return attend<float>(*batch, *layer, num_threads, attend_block<Plain<float>>);
#ifdef BATON_AMX_PAGES
    if (math == kTiles) return attend<bfloat16>(*batch, *layer, num_threads, attend_tiles_or_tree);
#endif
#ifdef BATON_PAIRS
    if (math != kWidened) return attend<bfloat16>(*batch, *layer, num_threads, attend_block<PairsOfPages>);
#endif
    attend<bfloat16>(*batch, *layer, num_threads, attend_block<Plain<bfloat16>>);
}
