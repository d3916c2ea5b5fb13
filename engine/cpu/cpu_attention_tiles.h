// Paged attention by AMX tiles, for many query rows of a KV head; for few: cpu_attention_few.h, which gives a row the
// same bits. Scores are computed transposed: keys are rows, as pages have them, so that they are not packed, and a query
// row is a lane of vectors, so that softmax reduces nothing across lanes.
//
//              32 query rows                   32 query rows
//            +---------------+               +---------------+
//   kSpan    |  scores'      |      head     |  output'      |
//   keys     |  = K Q'       |      dim      |  += V' P'     |
//            +---------------+               +---------------+
//
// A unit of work is a strip of query rows with a span of keys. Three are under way: tiles multiply the scores of the
// next one and the values of the last one, while vectors turn this one's scores into probabilities. Values are
// transposed once a span, for all strips. Spans begin at multiples of kSpan, so no row depends on others of its block.
//
// Operands of tiles, 1 KiB each: [16][32] of K and V', and panels [16 pairs][16 rows][2] of Q' and P'.
#pragma once
#include "cpu_amx.h"
#include "cpu_paged.h"

#if defined(BATON_AMX) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define BATON_AMX_PAGES
namespace {

constexpr int64_t kSpan = 256;  // fewer read and write a strip's output more often; more leave L2
constexpr int64_t kRun = 16;    // keys of a tile
constexpr int64_t kSpanRuns = kSpan / kRun, kSpanTiles = kSpan / 32;
constexpr int kTileValues = 512;
constexpr int64_t kStrip = 32;  // query rows

// 2^x, relative error 8e-5: probabilities are rounded to bfloat16. Exactly 0 for minus infinity.
inline Floats exp2_roughly(Floats x) {
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    Floats p = f * 7.802451813e-2f + 2.260671712e-1f;
    p = p * f + 6.958335298e-1f;
    p = p * f + 9.999252200e-1f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);  // times 2^floor(x)
}

// Of scores, given the largest one times scale_log2.
inline Floats find_probabilities(Floats scores, float scale_log2, Floats top) {
    return exp2_roughly(scores * scale_log2 - top);
}
// How much smaller than before probabilities are, as the largest scores grow.
inline Floats find_shrinks(Floats before, Floats top, float scale_log2) {
    return exp2_nonpositive(before == top ? Floats{} : (before - top) * scale_log2);
}
inline Floats find_offsets(Floats top, float scale_log2) {
    return top == kMinusInfinity ? Floats{} : top * scale_log2;  // nothing visible yet
}

// Rounds pairs to [16][2] bfloat16; ties go up. Faster than instructions for it, which need another to interleave.
inline void store_pairs(bfloat16* to, Floats even, Floats odd) {
    store(to, (bits<Words>(even) + 0x8000) >> 16 | ((bits<Words>(odd) + 0x8000) & 0xFFFF0000));
}

// The keys and values of one KV head that a block's queries see, a span at a time.
struct Spans {
    const BatonBatch& batch;
    const BatonLayer& layer;
    int64_t dim = batch.head_dim, padded = round_up(dim, 32), depth = padded / 32;  // of keys
    int64_t value_dim = batch.value_dim, padded_values = round_up(value_dim, 32);
    int64_t begin_key, end_key;
    const bfloat16* keys;  // of the head
    const int32_t* pages;
    float scale_log2 = batch.scale * 1.44269504f;
    bfloat16* copies = nullptr;  // this thread's: [2][kSpan][padded], K and V
    const bfloat16 *key_runs[kSpanRuns], *value_runs[kSpanRuns];
    // Runs of K and V that are fetched beside the work, from the last on; lines of the run under way.
    const char *fetched[2 * kSpanRuns], *line = nullptr, *end_line = nullptr;
    int64_t num_fetched = 0, lines_a_step = 1;

    Spans(const BatonBatch& batch, const BatonLayer& layer, const Block& of) : batch(batch), layer(layer) {
        begin_key = std::max<int64_t>(0, of.position - layer.window + 1), end_key = of.position + of.num_queries;
        keys = find_keys(of.head), pages = of.pages;
    }
    const bfloat16* find_keys(int64_t head) const {
        return (const bfloat16*)batch.pool + layer.layer * batch.layer_stride + head * batch.head_stride;
    }
    const bfloat16* find_key(const bfloat16* of_head, int64_t key) const {
        return of_head + pages[key / batch.page_tokens] * batch.page_stride + key % batch.page_tokens * dim;
    }
    int64_t first_span() const { return begin_key / kSpan * kSpan; }
    int64_t span_begin(int64_t span) const { return std::max<int64_t>(0, begin_key - span) / 32 * 32; }
    int64_t span_end(int64_t span) const { return round_up(std::min(kSpan, end_key - span), 32); }
    Floats cap(Floats scores) const {
        return tanh(scores * (batch.scale / batch.softcap)) * (batch.softcap / batch.scale);
    }

    // Finds the runs of keys and values of a span: in place, or copied where tiles would read what is not there. Then
    // `fetch` fetches the next span, at the end the first one of the head that this thread will probably process next.
    void open(int64_t span, int64_t next_head) {
        for (int64_t n = span_begin(span); n < span_end(span); n += kRun) {
            const int64_t run = n / kRun, count = std::clamp<int64_t>(end_key - span - n, 0, kRun);
            if (count == kRun && padded == dim && batch.page_tokens % kRun == 0) {
                key_runs[run] = find_key(keys, span + n);
                value_runs[run] = key_runs[run] + batch.kv_stride;
                continue;
            }
            bfloat16 *key = copies + n * padded, *value = batch.kv_stride ? key + kSpan * padded : key;
            key_runs[run] = key, value_runs[run] = value;
            std::memset((void*)key, 0, kRun * padded * 2);
            std::memset((void*)value, 0, kRun * padded * 2);
            for (int64_t i = 0; i < count; ++i, key += padded, value += padded) {
                const bfloat16* const from = find_key(keys, span + n + i);
                std::copy_n(from, dim, key);
                if (batch.kv_stride) std::copy_n(from + batch.kv_stride, dim, value);
            }
        }
        if (span + kSpan < end_key) plan_fetch(keys, span + kSpan);
        else if (next_head < batch.num_kv_heads) plan_fetch(find_keys(next_head), first_span());
    }
    void plan_fetch(const bfloat16* of_head, int64_t span) {
        num_fetched = 0, line = end_line;
        for (int64_t n = round_up(std::min(kSpan, end_key - span), kRun) - kRun; n >= span_begin(span); n -= kRun) {
            fetched[num_fetched++] = (const char*)find_key(of_head, span + n);
            if (!batch.kv_stride) continue;
            fetched[num_fetched] = fetched[num_fetched - 1] + batch.kv_stride * 2;
            ++num_fetched;
        }
    }
    void fetch() {
        for (int64_t i = 0; i < lines_a_step; ++i, line += 64) {
            if (line == end_line) {
                if (!num_fetched) return;
                line = fetched[--num_fetched], end_line = line + round_up(kRun * dim * 2, 64);
            }
            __builtin_prefetch(line, 0, 2);
        }
    }
};

// c[32][32] = or += a times b. a: tiles of 16 rows at `upper` and at `lower`, `step` values apart along the depth; b: two
// panels, `panel` values apart. Calls `meanwhile` for each tile of depth: a core does both at once only where tiles and
// vectors take turns in the program.
template <bool add, class Work>
void multiply_unit(const bfloat16* upper, const bfloat16* lower, int64_t row_bytes, int64_t step, const bfloat16* b,
                   int64_t panel, float* c, int64_t num_tiles, Work&& meanwhile) {
    float* const below = c + 16 * kStrip;
    asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
    if constexpr (add) {
        TILE_LOAD(0, c, kStrip * 4);
        TILE_LOAD(1, c + 16, kStrip * 4);
        TILE_LOAD(2, below, kStrip * 4);
        TILE_LOAD(3, below + 16, kStrip * 4);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t tile = 0; tile < num_tiles; ++tile, upper += step, lower += step, b += kTileValues) {
        TILE_LOAD(4, upper, row_bytes);
        TILE_LOAD(6, b, 64);
        TILE_LOAD(7, b + panel, 64);
        TILE_LOAD(5, lower, row_bytes);
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
        meanwhile();
    }
    TILE_STORE(0, c, kStrip * 4);
    TILE_STORE(1, c + 16, kStrip * 4);
    TILE_STORE(2, below, kStrip * 4);
    TILE_STORE(3, below + 16, kStrip * 4);
    asm volatile("" ::: "memory");
}
// Values d of 32 rows, 16 at `first` and 16 at `second`, to tiles [16 values][32 rows] at `low` and `high`: of each 8
// values the first 4 or, with `upper`, the others.
template <bool upper>
void transpose_values(const bfloat16* first, const bfloat16* second, int64_t row, bfloat16* low, bfloat16* high) {
    Words words[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        const bfloat16* const at = i < 8 ? first + 2 * i * row : second + (2 * i - 16) * row;
        const __m512i even = load<__m512i>(at), odd = load<__m512i>(at + row);
        words[i] = (Words)(upper ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd));
    }
    transpose(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        store((i < 8 ? low : high) + (i % 8 / 4 * 8 + i % 4 + (upper ? 4 : 0)) * 32, words[i]);
}

// A block's query rows with one KV head.
struct TileBlock : Spans {
    struct Unit {
        int64_t strip, span;      // the span's first key
        int64_t begin, end;       // keys of the span, multiples of 32, that rows of the strip see
        bool is_cut, is_odd;      // some rows do not see some of these keys; which of both buffers is its
        Floats tops[2];           // the largest scores, not scaled
    };
    int64_t num_strips;
    // This thread's memory.
    Ints* positions;                  // [rows / 16], of the sequence
    bfloat16 *queries, *values[2];    // [strips][2][depth] panels; [padded_values / 16][kSpanTiles]
    float* output;                    // [strips][padded_values][32]
    Floats *sums, *maxima;            // [strips][2]
    float* scores[2];                 // [kSpan][32]
    bfloat16* probabilities[2];       // [2][kSpanTiles] panels

    using Spans::Spans;
    int64_t first_position(int64_t strip) const { return positions[strip * 2][0]; }
    int64_t last_position(int64_t strip) const { return positions[strip * 2 + 1][15]; }

    // Turns `unit` into the next one; false if it was the last.
    bool advance(Unit& unit) const {
        for (;;) {
            if (++unit.strip == num_strips) unit.strip = 0, unit.span += kSpan;
            if (unit.span >= end_key) return false;
            const int64_t first = first_position(unit.strip), last = last_position(unit.strip);
            const int64_t begin = std::max<int64_t>(0, first - layer.window + 1 - unit.span);
            const int64_t end = std::min(kSpan, last + 1 - unit.span);
            if (begin >= end) continue;
            unit.begin = begin / 32 * 32, unit.end = round_up(end, 32), unit.is_odd = !unit.is_odd;
            unit.is_cut = unit.span + unit.end > first + 1 || unit.span + unit.begin < last - layer.window + 1;
            std::fill_n(unit.tops, 2, Floats{} + kMinusInfinity);
            return true;
        }
    }

    template <class Work> void multiply_scores(const Unit& unit, int64_t n, Work&& meanwhile) const {
        const bfloat16* const panels = queries + unit.strip * 2 * depth * kTileValues;
        multiply_unit<false>(key_runs[n / kRun], key_runs[n / kRun + 1], padded * 2, 32, panels,
                                   depth * kTileValues, scores[unit.is_odd] + n * kStrip, depth, meanwhile);
    }
    template <class Work> void multiply_values(const Unit& unit, int64_t d, Work&& meanwhile) const {
        const int64_t begin = unit.begin / 32, tile = d / 16 * kSpanTiles + begin;
        const bfloat16* const upper = values[unit.span / kSpan % 2] + tile * kTileValues;
        multiply_unit<true>(upper, upper + kSpanTiles * kTileValues, 64, kTileValues,
                                  probabilities[unit.is_odd] + begin * kTileValues, kSpanTiles * kTileValues,
                            output + (unit.strip * padded_values + d) * kStrip, unit.end / 32 - begin, meanwhile);
    }
    // Caps the scores of 32 keys and hides those that a row does not see.
    void change_scores(const Unit& unit, int64_t n, float* at) const {
        for (int64_t key = n; key < n + 32; ++key)
            for (int panel = 0; panel < 2; ++panel, at += 16) {
                const Ints last = positions[unit.strip * 2 + panel] - (int32_t)unit.span;
                const Ints first = last - (int32_t)std::min<int64_t>(layer.window - 1, 1 << 30);
                Floats score = load<Floats>(at);
                if (batch.softcap > 0) score = cap(score);
                store(at, ((int32_t)key >= first) & ((int32_t)key <= last) ? score : Floats{} + kMinusInfinity);
            }
    }
    // The largest scores of 32 keys.
    void find_tops(Unit& unit, int64_t n) const {
        float* const at = scores[unit.is_odd] + n * kStrip;
        if (unit.is_cut || batch.softcap > 0) change_scores(unit, n, at);
        Floats tops[4];  // so many do not wait for each other
        for (int i = 0; i < 4; ++i) tops[i] = load<Floats>(at + i * 16);
        for (int64_t i = 4; i < 64; i += 4)
#pragma GCC unroll 4
            for (int64_t j = 0; j < 4; ++j) tops[j] = larger(load<Floats>(at + (i + j) * 16), tops[j]);
        for (int i = 0; i < 4; ++i) unit.tops[i % 2] = larger(tops[i], unit.tops[i % 2]);
    }
    // Turns a unit's scores into probabilities, four keys at a time, evenly beside a number of products.
    struct Softening {
        TileBlock& block;
        const float *at, *end;
        bfloat16* to;
        int64_t steps, products;
        Floats* totals;  // [4][2]: sums of every fourth step's probabilities
        int64_t due = 0, part = 0;
        Floats offsets[2];  // the rows' maxima, scaled

        void operator()() {
            for (due += steps; due >= products && at < end; due -= products) soften();
        }
        void soften() {
#pragma GCC unroll 2
            for (int panel = 0; panel < 2; ++panel) {
                Floats p[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const Floats scores = load<Floats>(at + i * kStrip + panel * 16);
                    p[i] = find_probabilities(scores, block.scale_log2, offsets[panel]);
                }
                totals[part + panel] += (p[0] + p[1]) + (p[2] + p[3]);
                store_pairs(to + panel * kSpan * 16, p[0], p[1]);
                store_pairs(to + panel * kSpan * 16 + 32, p[2], p[3]);
            }
            at += 4 * kStrip, to += 64, part = (part + 2) % 8;
            block.fetch();
        }
    };
    // Everything of a unit that vectors do, with the tiles of the next one and of the last one, if there are.
    void step(const Unit& unit, Unit* next, const Unit* last) {
        const float* const at = scores[unit.is_odd];
        bfloat16* const to = probabilities[unit.is_odd] + unit.begin * 16;
        Floats totals[8]{};
        Softening soften{*this, at + unit.begin * kStrip, at + unit.end * kStrip, to, (unit.end - unit.begin) / 4, 1, totals};
        soften.products = (depth * (next ? next->end - next->begin : 0) +
                           padded_values / 32 * (last ? last->end - last->begin : 0)) / 32;
        Floats shrinks[2];
        for (int panel = 0; panel < 2; ++panel) {
            Floats &maximum = maxima[unit.strip * 2 + panel], top = larger(unit.tops[panel], maximum);
            soften.offsets[panel] = find_offsets(top, scale_log2);
            shrinks[panel] = find_shrinks(maximum, top, scale_log2);
            maximum = top;
        }
        if (next)
            for (int64_t n = next->begin; n < next->end; n += 32) {
                multiply_scores(*next, n, soften);
                if (n > next->begin) find_tops(*next, n - 32);
            }
        if (last)
            for (int64_t d = 0; d < padded_values; d += 32) multiply_values(*last, d, soften);
        while (soften.at < soften.end) soften.soften();
        if (next) find_tops(*next, next->end - 32);
        for (int half = 4; half > 1; half /= 2)
            for (int i = 0; i < half; ++i) totals[i] += totals[i + half];
        for (int panel = 0; panel < 2; ++panel) {
            Floats& sum = sums[unit.strip * 2 + panel];
            sum = sum * shrinks[panel] + totals[panel];
            if (-reduce(-shrinks[panel], larger) == 1.0f) continue;
            float* to = output + unit.strip * padded_values * kStrip + panel * 16;
            for (int64_t d = 0; d < value_dim; ++d, to += kStrip) store(to, load<Floats>(to) * shrinks[panel]);
        }
    }

    void transpose_span(int64_t span) {
        for (int64_t n = span_begin(span); n < span_end(span); n += 32)
            for (int64_t d = 0; d < padded_values; d += 32) {
                bfloat16* const low = values[span / kSpan % 2] + (d / 16 * kSpanTiles + n / 32) * kTileValues;
                bfloat16* const high = low + kSpanTiles * kTileValues;
                const bfloat16* const* const runs = value_runs + n / kRun;
                transpose_values<false>(runs[0] + d, runs[1] + d, padded, low, high);
                transpose_values<true>(runs[0] + d, runs[1] + d, padded, low, high);
            }
    }

    void run(int64_t next_head) {
        const auto nothing = [] {};
        Unit last, unit, next;
        bool has_last = false;
        unit.strip = -1, unit.span = first_span(), unit.is_odd = false;
        advance(unit);
        int64_t opened = -1, transposed = -1;
        const auto enter = [&](int64_t span) {
            if (span != opened) open(opened = span, next_head);
        };
        enter(unit.span);
        for (int64_t n = unit.begin; n < unit.end; n += 32) {
            multiply_scores(unit, n, nothing);
            find_tops(unit, n);
        }
        for (;; last = unit, unit = next, has_last = true) {
            if (unit.span != transposed) transpose_span(transposed = unit.span);
            next = unit;
            const bool has_next = advance(next);
            if (has_next) enter(next.span);  // after this span's values have been read
            step(unit, has_next ? &next : nullptr, has_last ? &last : nullptr);
            if (!has_next) break;
        }
        for (int64_t d = 0; d < padded_values; d += 32) multiply_values(unit, d, nothing);
    }
};

inline void attend_strips(const BatonBatch& batch, const BatonLayer& layer, const Block& of) {
    constexpr uint8_t tile_rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    configure_tiles(tile_rows, 8);
    const int64_t group = batch.num_heads / batch.num_kv_heads, rows = of.num_queries * group;
    TileBlock block{batch, layer, of};
    const int64_t dim = block.dim, padded = block.padded, depth = block.depth;
    const int64_t value_dim = block.value_dim, padded_values = block.padded_values;
    block.num_strips = (rows + kStrip - 1) / kStrip;
    block.lines_a_step = (dim - 1) / (4 * block.num_strips) + 1;  // of 16 * dim a span, in 64 steps a strip

    const int64_t panels = block.num_strips * 2;
    scratch.reserve(panels * (3 * 64 + padded * 16 * 6) + padded * kSpan * 8 + 2 * kSpan * kStrip * 6 + 16 * 64);
    block.positions = scratch.take<Ints>(panels);
    block.sums = scratch.take<Floats>(panels);
    block.maxima = scratch.take<Floats>(panels);
    block.queries = scratch.take<bfloat16>(panels * padded * 16);
    block.output = scratch.take<float>(panels * padded_values * 16);
    block.copies = scratch.take<bfloat16>(2 * padded * kSpan);
    for (int i = 0; i < 2; ++i) {
        block.values[i] = scratch.take<bfloat16>(padded_values * kSpan);
        block.scores[i] = scratch.take<float>(kSpan * kStrip);
        block.probabilities[i] = scratch.take<bfloat16>(kSpan * kStrip);
    }
    std::fill_n(block.output, panels * padded_values * 16, 0.0f);
    for (int64_t panel = 0, row = 0; panel < panels; ++panel) {
        const bfloat16* from[16];
        block.maxima[panel] = Floats{} + kMinusInfinity, block.sums[panel] = Floats{};
        for (int i = 0; i < 16; ++i, row += row + 1 < rows) {  // the last row fills up the last strip
            const int64_t token = row / group, of_head = of.head * group + row % group;
            from[i] = (const bfloat16*)layer.query + (of.token + token) * layer.query_token;
            from[i] += of_head * layer.query_head;
            block.positions[panel][i] = of.position + token;
            if (!layer.sinks) continue;
            block.maxima[panel][i] = layer.sinks[of_head] / batch.scale;  // as if a key had this score
            block.sums[panel][i] = 1.0f;
        }
        for (int64_t d = 0; d < padded; d += 32) {
            Words words[16];
            for (int i = 0; i < 16; ++i) words[i] = load_part<Words>(from[i] + d, (dim - d) * 2);
            transpose(words);
            bfloat16* const to = block.queries + (panel * depth + d / 32) * kTileValues;
            for (int i = 0; i < 16; ++i) store(to + i * 32, words[i]);
        }
    }
    block.run(of.next_head);
    for (int64_t panel = 0; panel < panels; ++panel) {
        const float* at = block.output + panel / 2 * padded_values * kStrip + panel % 2 * 16;
        const Floats factors = 1.0f / block.sums[panel];
        const int64_t count = std::min<int64_t>(16, rows - panel * 16);
        bfloat16* to[16];
        for (int64_t i = 0, row = panel * 16; i < count; ++i, ++row) {
            const int64_t of_token = (of.token + row / group) * batch.num_heads;
            to[i] = (bfloat16*)layer.out + (of_token + of.head * group + row % group) * value_dim;
        }
        for (int64_t d = 0; d < value_dim; d += 16) {
            Words words[16];
            for (int i = 0; i < 16; ++i, at += kStrip) words[i] = (Words)(load<Floats>(at) * factors);
            transpose(words);
            for (int64_t i = 0; i < count; ++i) store_part(to[i] + d, narrow((Floats)words[i]), value_dim - d);
        }
    }
}

}  // namespace
#endif
