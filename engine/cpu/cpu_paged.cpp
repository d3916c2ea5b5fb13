// Paged attention on CPUs: online softmax over key tiles, for decode (few query rows) and prefill (many) alike.
// Pages of bfloat16 on CPUs with AMX: cpu_attention_tiles.h, cpu_attention_few.h.
//
// Python has checked all pointers, strides and page tables. Allocates only per-thread scratch. Throws nothing.
// A work item is (block of query positions, KV head). Its query rows are position-major: row = position * group + head
// in group, so every K/V page is packed once for all query heads that share it. For few rows, such as answers have, it
// is turned in registers instead of packed: the same sums in the same order.
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
constexpr int64_t kTouched = 256;  // keys whose pages are searched for at once: one alone costs 400 cycles of waiting
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

template <int rows = kRows, class Call> void with_rows(int64_t num_rows, Call call) {  // the number as a constant
    if (num_rows >= rows) return call(std::integral_constant<int, rows>{});
    if constexpr (rows > 1) with_rows<rows - 1>(num_rows, call);
}

int64_t find_height(int64_t rows) {  // of blocks of at most kRows, about equally high
    const int64_t num_blocks = (rows + kRows - 1) / kRows;
    return (rows + num_blocks - 1) / num_blocks;
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

// Math: Page and Operand; a word of a page's row has kParts words of operands, a word of operands has kKeys values of a
// dimension; `read_values` gives the words of 2 * kLanes dimensions of kKeys keys.
template <class Math, class Page> struct WithVectors {
    static constexpr int kStep = 2 * kLanes;  // head dimensions and keys are padded to this
    static constexpr int kSubRows = 16;       // query rows that share scores
    static constexpr int kTile = 64;          // keys at a time: packed K and V of D=64 bf16 are 16 KB, a third of L1
    static constexpr int kPageWords = 4 / sizeof(Page);  // values in a word of a page's row

    // Words of kLanes keys from dimension d on, turned: one of each key in a vector.
    static inline __attribute__((always_inline)) void turn_keys(const Page* const* rows, int64_t d, int64_t dim,
                                                                Words* words) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) words[i] = load_part<Words>(rows[i] + d, (dim - d) * sizeof(Page));
        transpose(words);
    }

    // Many query rows: keys and values are packed, then multiplied with all of them.
    template <class Operand>
    static void pack_keys(const Page* const* rows, int64_t num_keys, int64_t dim, int64_t padded, Operand* to) {
        for (int64_t n = 0; n < num_keys; n += kLanes, to += padded * kLanes) {
            uint32_t* at = (uint32_t*)to;
            for (int64_t d = 0; d < dim; d += kLanes * kPageWords) {
                Words words[kLanes];
                turn_keys(rows + n, d, dim, words);
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i)
                    for (int part = 0; part < Math::kParts; ++part, at += kLanes) store(at, Math::part(words[i], part));
            }
        }
    }
    template <class Operand>
    static void pack_values(const Page* const* rows, int64_t num_keys, int64_t dim, int64_t capacity, Operand* to) {
        for (int64_t n = 0; n < num_keys; n += Math::kKeys)
            for (int64_t d = 0; d < dim; d += kStep) {
                Words words[2];
                Math::read_values(rows + n, d, dim, words);
                for (int j = 0; j < 2; ++j) store(to + (d + j * kLanes) * capacity + n * kLanes, words[j]);
            }
    }
    // c[rows][columns] = a[rows][depth] * panels of `capacity` operands of depth, plus c if `add`.
    template <bool add, class Operand>
    static void multiply(const Operand* a, int64_t lda, const Operand* b, int64_t capacity, float* c, int64_t ldc,
                         int64_t rows, int64_t depth, int64_t columns) {
        constexpr int kPerWord = 4 / sizeof(Operand);
        const int64_t panel = capacity / kPerWord * kLanes;
        const int64_t height = find_height(rows);
        for (; rows > 0; rows -= height, a += height * lda, c += height * ldc)
            for (int64_t j = 0; j < columns; j += 2 * kLanes)
                with_rows(std::min(rows, height), [&](auto count) {
                    multiply_rows<Math, add, count>((const uint32_t*)a, lda / kPerWord,
                                                    (const uint32_t*)b + j / kLanes * panel, panel, c + j, ldc,
                                                    (depth + kPerWord - 1) / kPerWord);
                });
    }

    // Few query rows: the same sums in the same order, of keys and values that are turned and paired in registers.
    // Meanwhile rows of `next` come, where it is not null: all asked for at once they would be waited for.
    template <class Operand, class Rows>
    static void score(const Operand* queries, int64_t rows, int64_t padded, const Rows& tile, const Rows* next,
                      int64_t dim, float* scores) {
        const int64_t height = find_height(rows);
        for (; rows > 0; rows -= height, queries += height * padded, scores += height * kTile, next = nullptr)
            with_rows(std::min(rows, height), [&](auto count) {
                for (int64_t n = 0; n < tile.padded_keys; n += kLanes)
                    score_rows<count>((const uint32_t*)queries, padded * sizeof(Operand) / 4, tile.keys + n,
                                      next && n < next->padded_keys ? next->keys + n : nullptr, dim, scores + n);
            });
    }
    template <int rows>
    static void score_rows(const uint32_t* x, int64_t ldx, const Page* const* keys, const Page* const* next,
                           int64_t dim, float* scores) {
        Floats sum[rows] = {};
        for (int64_t d = 0; d < dim; d += kLanes * kPageWords) {
            if (next && d * sizeof(Page) % 64 == 0)
                for (int i = 0; i < kLanes; ++i) __builtin_prefetch(next[i] + d);
            Words words[kLanes];
            turn_keys(keys, d, dim, words);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                for (int part = 0; part < Math::kParts; ++part, ++x)
#pragma GCC unroll 8
                    for (int row = 0; row < rows; ++row)
                        sum[row] = Math::add_word(sum[row], Math::part(words[i], part), x[row * ldx]);
        }
        for (int row = 0; row < rows; ++row) store(scores + row * kTile, sum[row]);
    }
    template <class Operand, class Rows>
    static void weigh(const Operand* probabilities, int64_t rows, const Rows& tile, const Rows* next, int64_t columns,
                      int64_t dim, float* output, int64_t padded) {
        const int64_t height = find_height(rows);
        for (; rows > 0; rows -= height, probabilities += height * kTile, output += height * padded, next = nullptr)
            with_rows(std::min(rows, height), [&](auto count) {
                constexpr int kWide = count * 4 <= kRegisters / 2 ? 4 : 2;
                int64_t d = 0;
                for (; d + kWide * kLanes <= padded; d += kWide * kLanes)
                    weigh_rows<count, kWide>(probabilities, tile, next, columns, d, dim, output + d, padded);
                if (d < padded) weigh_rows<count, 2>(probabilities, tile, next, columns, d, dim, output + d, padded);
            });
    }
    template <int rows, int vectors, class Operand, class Rows>
    static void weigh_rows(const Operand* probabilities, const Rows& tile, const Rows* next, int64_t columns, int64_t d,
                           int64_t dim, float* output, int64_t padded) {
        Floats sum[rows][vectors];
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row)
            for (int j = 0; j < vectors; ++j) sum[row][j] = load<Floats>(output + row * padded + j * kLanes);
        for (int64_t n = 0; n < columns; n += Math::kKeys) {
            if (next && n < next->padded_keys)
                for (int i = 0; i < Math::kKeys; ++i)
                    for (int64_t at = d; at < d + vectors * kLanes; at += 64 / sizeof(Page))
                        __builtin_prefetch(next->values[n + i] + at);
            Words words[vectors];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j += 2) Math::read_values(tile.values + n, d + j * kLanes, dim, words + j);
#pragma GCC unroll 8
            for (int row = 0; row < rows; ++row) {
                const uint32_t p = load<uint32_t>(probabilities + row * kTile + n);
                for (int j = 0; j < vectors; ++j) sum[row][j] = Math::add_word(sum[row][j], words[j], p);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row)
            for (int j = 0; j < vectors; ++j) store(output + row * padded + j * kLanes, sum[row][j]);
    }
};

// Any CPU: pages of T, arithmetic in float32.
template <class T> struct Plain : WithVectors<Plain<T>, T> {
    using Page = T;
    using Operand = float;
    static constexpr int kParts = 4 / sizeof(T), kKeys = 1;
    static void store_probability(float* to, Floats p) { store(to, p); }
    static Floats add_word(Floats sum, Words b, uint32_t a) { return add_products(sum, (Floats)b, bits<float>(a)); }
    static Words part(Words w, int which) {  // a word of bfloat16 holds dimensions 2i (low half) and 2i + 1
        return kParts == 1 ? w : which ? w & 0xFFFF0000u : w << 16;
    }
    static void read_values(const T* const* rows, int64_t d, int64_t dim, Words* words) {
        for (int j = 0; j < 2; ++j, d += kLanes)
            if constexpr (sizeof(T) == 4) words[j] = load_part<Words>(rows[0] + d, (dim - d) * 4);
            else words[j] = (Words)widen(load_part<Halves>(rows[0] + d, (dim - d) * 2));
    }
};

#ifdef BATON_PAIRS
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
template <int half, int... i> Shorts interleave(Shorts a, Shorts b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (half * kLanes + i / 2 + (i % 2) * 2 * kLanes)...);
}

// Pages of bfloat16, products of pairs summed in float32.
struct PairsOfPages : WithVectors<PairsOfPages, bfloat16> {
    using Page = bfloat16;
    using Operand = bfloat16;
    static constexpr int kParts = 1, kKeys = 2;
    static void store_probability(bfloat16* to, Floats p) { store(to, narrow(p)); }
    static Floats add_word(Floats sum, Words b, uint32_t a) { return add_pairs(sum, b, a); }
    static Words part(Words w, int) { return w; }
    static void read_values(const Page* const* rows, int64_t d, int64_t dim, Words* words) {
        constexpr auto lanes = std::make_integer_sequence<int, 2 * kLanes>{};
        const Shorts even = load_part<Shorts>(rows[0] + d, (dim - d) * 2);
        const Shorts odd = load_part<Shorts>(rows[1] + d, (dim - d) * 2);
        words[0] = (Words)interleave<0>(even, odd, lanes), words[1] = (Words)interleave<1>(even, odd, lanes);
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

    const bool has_tree = is_tree(batch, block), is_few = rows <= kSubRows;
    const Page* layer_keys = (const Page*)batch.pool + layer.layer * batch.layer_stride;
    const float scale_log2 = batch.scale * 1.44269504f;
    // A multiple, so that a row's keys are summed in the same tiles whoever is beside it.
    const int64_t begin_key = std::max<int64_t>(0, first_position - layer.window + 1) / kTile * kTile;
    auto find_next = [&](int64_t of_head, int64_t first) {
        const Page* const head_keys = layer_keys + of_head * batch.head_stride;
        next->find(batch, head_keys, block.pages, first, end_position, Math::kStep, zeros);
        if (first % kTouched) return;
        for (int64_t n = first; n < std::min(first + kTouched, end_position); n += batch.page_tokens) {
            const Page* const at = head_keys + block.pages[n / batch.page_tokens] * batch.page_stride;
            __builtin_prefetch(at, 0, 2);
            __builtin_prefetch(at + batch.kv_stride, 0, 2);
        }
    };
    find_next(head, begin_key);
    for (int64_t first_key = begin_key; first_key < end_position; first_key += kTile) {
        std::swap(tile, next);
        const bool is_last = first_key + kTile >= end_position;
        if (is_last && block.next_head < batch.num_kv_heads) find_next(block.next_head, begin_key);  // prefetch only
        else find_next(head, first_key + kTile);
        if (is_few) {
            Math::score(queries, rows, padded, *tile, next, dim, scores);
        } else {
            prefetch(next->keys, next->num_keys, dim);
            Math::pack_keys(tile->keys, tile->padded_keys, dim, padded, packed_keys);
            if (batch.kv_stride) prefetch(next->values, next->num_keys, dim);
            Math::pack_values(tile->values, tile->padded_keys, value_dim, kTile, packed_values);
        }
        for (int64_t row = 0; row < rows; row += kSubRows) {
            int64_t num_rows = std::min(kSubRows, rows - row);
            int64_t last_position = first_position + (row + num_rows - 1) / group;
            int64_t visible = std::min(tile->num_keys, last_position + 1 - first_key);
            if (visible <= 0) continue;
            int64_t columns = round_up(visible, Math::kStep);
            if (!is_few)
                Math::template multiply<false>(queries + row * padded, padded, packed_keys, padded, scores, kTile,
                                               num_rows, dim, columns);
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
            if (is_few)
                Math::weigh(probabilities, rows, *tile, batch.kv_stride ? next : nullptr, columns, value_dim, output,
                            padded_values);
            else
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
