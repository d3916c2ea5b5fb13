// Paged attention by AMX tiles for at most 16 query rows of a KV head, such as answers have: what takes time is reading
// keys and values. A row gets the same bits as from cpu_attention_tiles.h: the same sums in the same order.
//
//              kRows query rows                       16 values of head dim
//            +-----------------+                        +----------------------+
//   kSpan    |    scores'      |   softmax,     kRows   |       output         |
//   keys     |    = K Q'       |   then turned  rows    |       += P V         |
//            +-----------------+                        +----------------------+
//
// A vector has all rows of 16 / kRows keys. Values are paired 32 keys ahead of their product, in L1. Tiles are as narrow
// as the rows, and the second product has them as rows, which takes less time than columns.
//
// Operands: [16][32] of K and, row-major, of P; panels [16 pairs][kRows][2] of Q', [16 pairs][16 values][2] of V.
#pragma once
#include "cpu_attention_tiles.h"

#ifdef BATON_AMX_PAGES
namespace {

inline Floats permute(Floats a, Ints order, Floats b) {
    return (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)order, (__m512)b);
}

// [4 rows][16] of quarters [4] |-> [4][16] whose row r has every quarter r.
inline void turn_quarters(Floats* rows) {
    const __m512 a = (__m512)rows[0], b = (__m512)rows[1], c = (__m512)rows[2], d = (__m512)rows[3];
    const __m512 low_ab = _mm512_shuffle_f32x4(a, b, 0x44), high_ab = _mm512_shuffle_f32x4(a, b, 0xEE);
    const __m512 low_cd = _mm512_shuffle_f32x4(c, d, 0x44), high_cd = _mm512_shuffle_f32x4(c, d, 0xEE);
    rows[0] = (Floats)_mm512_shuffle_f32x4(low_ab, low_cd, 0x88);
    rows[1] = (Floats)_mm512_shuffle_f32x4(low_ab, low_cd, 0xDD);
    rows[2] = (Floats)_mm512_shuffle_f32x4(high_ab, high_cd, 0x88);
    rows[3] = (Floats)_mm512_shuffle_f32x4(high_ab, high_cd, 0xDD);
}

// words [16][kRows], 16 at a time, |-> [kRows][16].
template <int kRows> void turn_rows(Floats* words) {
    if constexpr (kRows == 16) {
        transpose((Words*)words);
    } else if constexpr (kRows == 8) {
        const Ints low{0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};
        Floats rows[8];
        for (int i = 0; i < 4; ++i) {
            rows[i] = permute(words[2 * i], low, words[2 * i + 1]);
            rows[4 + i] = permute(words[2 * i], low + 4, words[2 * i + 1]);
        }
        turn_quarters(rows);
        turn_quarters(rows + 4);
        std::copy_n(rows, 8, words);
    } else {
        const Ints order{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        for (int i = 0; i < 4; ++i) words[i] = permute(words[i], order, Floats{});
        turn_quarters(words);
    }
}

template <int kRows> struct RowBlock : Spans {
    static constexpr int kPanel = 32 * kRows;   // values of Q'
    static constexpr int kStep = kRows / 4;     // vectors of four keys
    // This thread's memory.
    bfloat16 *queries, *values, *probabilities;  // [depth] panels; two of 2 panels; [kSpanTiles][kRows][32]
    float *scores, *output;                      // [kSpan][kRows]; [padded_values / 16][kRows][16]
    // A lane for each row, and again for the next keys of a vector.
    Floats maxima, sums, tops;
    Ints last, ahead;  // the row's position; the lane's place among a vector's keys

    using Spans::Spans;

    // The scores of 32 keys.
    void multiply_scores(int64_t n) {
        float* const to = scores + n * kRows;
        const bfloat16 *upper = key_runs[n / kRun], *lower = key_runs[n / kRun + 1], *panel = queries;
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
        TILE_ZERO(0);
        TILE_ZERO(1);
        for (int64_t d = 0; d < padded; d += 32, upper += 32, lower += 32, panel += kPanel) {
            TILE_LOAD(3, panel, kRows * 4);
            TILE_LOAD(2, upper, padded * 2);
            TILE_DOT_BF16(0, 2, 3);
            TILE_LOAD(4, lower, padded * 2);
            TILE_DOT_BF16(1, 4, 3);
        }
        TILE_STORE(0, to, kRows * 4);
        TILE_STORE(1, to + 16 * kRows, kRows * 4);
        asm volatile("" ::: "memory");
    }
    // 32 values of 32 keys: of each 8 values, the first 4 go into one panel and the others into the next.
    bfloat16* pair_values(int64_t n, int64_t d) {
        bfloat16 *const panels = values + n / 32 % 2 * 2 * kTileValues, *to = panels;
        for (int half = 0; half < 2; ++half) {
            const bfloat16* from = value_runs[n / kRun + half] + d;
            for (int pair = 0; pair < 8; ++pair, from += 2 * padded, to += 32) {
                const __m512i even = load<__m512i>(from), odd = load<__m512i>(from + padded);
                store(to, _mm512_unpacklo_epi16(even, odd));
                store(to + kTileValues, _mm512_unpackhi_epi16(even, odd));
                fetch();
            }
        }
        return panels;
    }
    // The largest scores of 32 keys; caps them and hides those that a row does not see.
    void find_tops(int64_t span, int64_t n) {
        float* at = scores + n * kRows;
        const bool is_cut = span + n + 32 > last[0] + 1 || span + n <= last[kLanes - 1] - layer.window;
        const int32_t window = std::min<int64_t>(layer.window, 1 << 30);
        Ints left = last - (int32_t)(span + n) - ahead;  // keys that a row sees from here on
        for (int i = 0; i < 2 * kRows; ++i, at += kLanes, left -= kLanes / kRows) {
            Floats score = load<Floats>(at);
            if (batch.softcap > 0) score = cap(score);
            if (is_cut) score = (left >= 0) & (left < window) ? score : Floats{} + kMinusInfinity;
            if (is_cut || batch.softcap > 0) store(at, score);
            tops = larger(score, tops);
        }
    }
    // Over the keys of a vector: `op` of each row's lanes, in all of them.
    template <class Op> static Floats join(Floats v, Op op) {
        constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
        if constexpr (kRows == 4) v = op(v, rotate<4>(v, lanes));
        if constexpr (kRows <= 8) v = op(v, rotate<8>(v, lanes));
        return v;
    }
    // Scores of keys [begin, end) to probabilities; shrinks what was summed before.
    void soften(int64_t begin, int64_t end) {
        const Floats top = larger(join(tops, larger), maxima), offsets = find_offsets(top, scale_log2);
        const Floats shrinks = find_shrinks(maxima, top, scale_log2);
        Floats totals[4]{};  // of every fourth four keys
        maxima = top;
        for (int64_t n = begin; n < end; n += 32) {
            const float* at = scores + n * kRows;
            Floats words[kRows];
            for (int i = 0; i < 8; i += 2, at += 2 * kStep * kLanes) {  // eight keys
                Floats p[2 * kStep];
                for (int j = 0; j < 2 * kStep; ++j)
                    p[j] = find_probabilities(load<Floats>(at + j * kLanes), scale_log2, offsets);
                for (int j = 0; j < 2; ++j) totals[(i + j) % 4] += total(p + j * kStep);
                pair_keys(p, (Words*)words + i * kStep / 2);
            }
            turn_rows<kRows>(words);
            for (int row = 0; row < kRows; ++row) store(probabilities + (n * kRows + row * 32), words[row]);
        }
        sums = sums * shrinks + ((totals[0] + totals[2]) + (totals[1] + totals[3]));
        if (-reduce(-shrinks, larger) == 1.0f) return;
        float* to = output;
        for (int64_t d = 0; d < padded_values; d += 16)
            for (int row = 0; row < kRows; ++row, to += 16) store(to, load<Floats>(to) * shrinks[row]);
    }
    // Of four keys, as cpu_attention_tiles.h sums them: two pairs, then both.
    static Floats total(const Floats* p) {
        if constexpr (kRows == 16) return (p[0] + p[1]) + (p[2] + p[3]);
        if constexpr (kRows == 8) return join(p[0], plus) + join(p[1], plus);
        return join(p[0], plus);
    }
    // Eight keys to four pairs of bfloat16 of each row.
    static void pair_keys(const Floats* p, Words* to) {
        if constexpr (kRows == 16) {
            for (int i = 0; i < 4; ++i) store_pairs((bfloat16*)(to + i), p[2 * i], p[2 * i + 1]);
        } else {
            for (int i = 0; i < kStep; ++i) {
                const __m512 a = (__m512)p[2 * i], b = (__m512)p[2 * i + 1];
                constexpr int kEven = kRows == 8 ? 0x44 : 0x88, kOdd = kRows == 8 ? 0xEE : 0xDD;
                store_pairs((bfloat16*)(to + i), (Floats)_mm512_shuffle_f32x4(a, b, kEven),
                            (Floats)_mm512_shuffle_f32x4(a, b, kOdd));
            }
        }
    }
    void multiply_values(int64_t begin, int64_t end, int64_t d) {
        float* const to = output + d * kRows;
        const bfloat16* next = pair_values(begin, d);
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
        TILE_LOAD(5, to, 64);
        TILE_LOAD(6, to + 16 * kRows, 64);
        for (int64_t n = begin; n < end; n += 32) {
            const bfloat16* const panels = next;
            if (n + 32 < end) next = pair_values(n + 32, d);
            asm volatile("" ::: "memory");
            TILE_LOAD(7, probabilities + n * kRows, 64);
            TILE_LOAD(2, panels, 64);
            TILE_DOT_BF16(5, 7, 2);
            TILE_LOAD(4, panels + kTileValues, 64);
            TILE_DOT_BF16(6, 7, 4);
        }
        TILE_STORE(5, to, 64);
        TILE_STORE(6, to + 16 * kRows, 64);
        asm volatile("" ::: "memory");
    }
    void run(int64_t next_head) {
        for (int64_t span = first_span(); span < end_key; span += kSpan) {
            const int64_t begin = span_begin(span), end = span_end(span);
            open(span, next_head);
            tops = Floats{} + kMinusInfinity;
            for (int64_t n = begin; n < end; n += 32) {
                multiply_scores(n);
                if (n > begin) find_tops(span, n - 32);
            }
            find_tops(span, end - 32);
            soften(begin, end);
            for (int64_t d = 0; d < padded_values; d += 32) multiply_values(begin, end, d);
        }
    }
};

template <int kRows> void attend_few(const BatonBatch& batch, const BatonLayer& layer, const Block& of) {
    // Tiles 0 and 1: scores; 2 and 4: keys or values; 3: queries; 5 and 6: output; 7: probabilities.
    constexpr uint8_t tile_rows[8] = {16, 16, 16, 16, 16, kRows, kRows, kRows};
    constexpr uint8_t row_bytes[8] = {kRows * 4, kRows * 4, 64, kRows * 4, 64, 64, 64, 64};
    configure_tiles(tile_rows, 8, row_bytes);
    const int64_t group = batch.num_heads / batch.num_kv_heads, rows = of.num_queries * group;
    RowBlock<kRows> block{batch, layer, of};
    const int64_t dim = block.dim, padded = block.padded;
    const int64_t value_dim = block.value_dim, padded_values = block.padded_values;
    block.lines_a_step = std::max<int64_t>(1, dim / 8 / block.depth);  // two rows of keys and of values

    scratch.reserve(padded * kRows * 6 + padded * kSpan * 4 + 4 * kTileValues * 2 + kRows * kSpan * 6 + 8 * 64);
    block.queries = scratch.take<bfloat16>(padded * kRows);
    block.output = scratch.take<float>(padded_values * kRows);
    block.copies = scratch.take<bfloat16>(2 * padded * kSpan);
    block.values = scratch.take<bfloat16>(4 * kTileValues);
    block.scores = scratch.take<float>(kRows * kSpan);
    block.probabilities = scratch.take<bfloat16>(kRows * kSpan);
    std::fill_n(block.output, padded_values * kRows, 0.0f);
    block.maxima = Floats{} + kMinusInfinity, block.sums = Floats{};
    const auto find_row = [&](const auto* tensor, int64_t row, int64_t of_token, int64_t of_head) {
        return tensor + (of.token + row / group) * of_token + (of.head * group + row % group) * of_head;
    };
    const bfloat16* from[kRows];
    for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t row = std::min<int64_t>(lane % kRows, rows - 1);  // the last row fills up the tiles
        from[lane % kRows] = find_row((const bfloat16*)layer.query, row, layer.query_token, layer.query_head);
        block.last[lane] = of.position + row / group, block.ahead[lane] = lane / kRows;
        if (!layer.sinks) continue;
        block.maxima[lane] = layer.sinks[of.head * group + row % group] / batch.scale;  // as if a key had this score
        block.sums[lane] = 1.0f;
    }
    for (int64_t d = 0; d < padded; d += 2)
        for (int i = 0; i < kRows; ++i)
            store(block.queries + d / 2 * kRows * 2 + i * 2, d < dim ? load_part<uint32_t>(from[i] + d, (dim - d) * 2) : 0);
    block.run(of.next_head);
    const Floats factors = 1.0f / block.sums;
    const Ints order{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};  // panels have 4 of each 8 values
    for (int64_t row = 0; row < rows; ++row) {
        auto* const to = const_cast<bfloat16*>(
            find_row((const bfloat16*)layer.out, row, batch.num_heads * value_dim, value_dim));
        for (int64_t d = 0; d < value_dim; d += 32) {
            const float* const at = block.output + d * kRows + row * 16;
            const Floats low = load<Floats>(at) * factors[row], high = load<Floats>(at + 16 * kRows) * factors[row];
            store_part(to + d, narrow(permute(low, order, high)), value_dim - d);
            store_part(to + d + 16, narrow(permute(low, order + 8, high)), value_dim - d - 16);
        }
    }
}

inline void attend_by_tiles(const BatonBatch& batch, const BatonLayer& layer, const Block& block) {
    const int64_t rows = block.num_queries * batch.num_heads / batch.num_kv_heads;
    if (rows <= 4) attend_few<4>(batch, layer, block);
    else if (rows <= 8) attend_few<8>(batch, layer, block);
    else if (rows <= 16) attend_few<16>(batch, layer, block);
    else attend_strips(batch, layer, block);
    TILE_RELEASE();
}

}  // namespace
#endif
