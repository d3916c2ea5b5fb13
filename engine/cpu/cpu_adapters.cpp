// What adapters add to a product, y += B A x, for rows in tiles of one adapter each; and the end of a product whose
// gate and up were kept apart for them. Sums are float32. Python has checked all pointers. Throws nothing.
#include "cpu_values.h"

namespace {

constexpr int kRanks = 4, kColumns = 64, kPanelColumns = 16, kPrefetched = 256;

template <class T> Floats load_some(const T* from, int64_t count);
template <> Floats load_some(const bfloat16* from, int64_t count) { return widen(load_part<Halves>(from, count * 2)); }
template <> Floats load_some(const float* from, int64_t count) { return load_part<Floats>(from, count * 4); }
void store_some(bfloat16* to, Floats values, int64_t count) { store_part(to, narrow(values), count); }
void store_some(float* to, Floats values, int64_t count) { store_part(to, values, count); }

}  // namespace

// Mirrored field by field in cpu_adapters.py.
struct BatonAdapters {
    const void* x;        // [., depth]
    const void* a;        // [slots, num_parts * max_rank, depth]
    const void* b;        // [slots, max_rank, num_columns]
    const int32_t* ranks;   // [slots]
    const int32_t* rows;    // of x and out
    const int32_t* tiles;   // [num_tiles, 3]: slot, first in `rows`, count
    const int32_t* blocks;  // [num_blocks, 3]: first column, end, part
    void* out;              // [., num_columns]
    float* shrunk;          // [all rows of tiles, num_parts * max_rank]
    int64_t num_tiles, num_blocks, depth, num_columns, num_parts, max_rank;
    int32_t num_threads;
};

namespace {

constexpr int kGroups(int rows) { return std::min(4, kRegisters / 2 / rows); }  // of lanes, with sums in registers

// The tile's rows first .. first + R; the last one again where there are fewer.
template <int R> struct Rows {
    int64_t at[R];  // in x and out
    int64_t shrunk[R];
    int count;
    Rows(const BatonAdapters& of, const int32_t* tile, int first) : count(std::min(R, tile[2] - first)) {
        for (int r = 0; r < R; ++r) {
            shrunk[r] = tile[1] + first + std::min(r, count - 1);
            at[r] = of.rows[shrunk[r]];
        }
    }
};

template <class Work> void in_rows(const int32_t* tile, Work work) {  // as many at once as there are
    for (int first = 0, left; (left = tile[2] - first) > 0; first += 4) {
        if (left > 2) work(std::integral_constant<int, 4>{}, first);
        else if (left == 2) work(std::integral_constant<int, 2>{}, first);
        else work(std::integral_constant<int, 1>{}, first);
    }
}

// s[row, j .. j + count] of the tile's rows
template <class T, int R>
void shrink(const BatonAdapters& of, const int32_t* tile, int first, int64_t j, int64_t count) {
    const int64_t depth = of.depth, width = of.num_parts * of.max_rank, whole = depth / kLanes * kLanes;
    const Rows<R> rows(of, tile, first);
    const T *a[kRanks], *x[R];
    for (int i = 0; i < kRanks; ++i) a[i] = (const T*)of.a + (tile[0] * width + j + std::min<int64_t>(i, count - 1)) * depth;
    for (int r = 0; r < R; ++r) x[r] = (const T*)of.x + rows.at[r] * depth;
    Floats sums[kRanks][R] = {};
    const auto add = [&](int64_t k, int64_t left) {
        Floats values[R];
        for (int r = 0; r < R; ++r) values[r] = load_some(x[r] + k, left);
        for (int i = 0; i < kRanks; ++i) {
            const Floats weights = load_some(a[i] + k, left);
            for (int r = 0; r < R; ++r) sums[i][r] += weights * values[r];
        }
    };
    for (int64_t k = 0; k < whole; k += kLanes) add(k, kLanes);
    if (whole < depth) add(whole, depth - whole);
    for (int i = 0; i < count; ++i)
        for (int r = 0; r < rows.count; ++r)
            of.shrunk[rows.shrunk[r] * width + j + i] = reduce(sums[i][r], plus);
}

// out[row, column .. column + left] += b s of the tile's rows, for at most G groups of lanes. block: of the first column;
// those of the others follow.
template <class T, int R, int G>
void expand_groups(const BatonAdapters& of, const T* b, const Rows<R>& rows, int64_t rank, int64_t column,
                   int64_t left, const int32_t* block) {
    const int64_t width = of.num_parts * of.max_rank;
    const float* s[G][R];
    for (int g = 0; g < G; ++g) {
        while (column + g * kLanes >= block[1]) block += 3;
        for (int r = 0; r < R; ++r) s[g][r] = of.shrunk + rows.shrunk[r] * width + block[2] * of.max_rank;
    }
    Floats sums[G][R] = {};
    for (int64_t j = 0; j < rank; ++j)
        for (int g = 0; g < G; ++g) {
            const T* const from = b + j * of.num_columns + column + g * kLanes;
            if (g * kLanes % (64 / (int)sizeof(T)) == 0) __builtin_prefetch(from + kPrefetched);
            const Floats weights = load_some(from, left - g * kLanes);
            for (int r = 0; r < R; ++r) sums[g][r] += weights * s[g][r][j];
        }
    for (int g = 0; g < G; ++g)
        for (int r = 0; r < rows.count; ++r) {
            T* const to = (T*)of.out + rows.at[r] * of.num_columns + column + g * kLanes;
            store_some(to, load_some(to, left - g * kLanes) + sums[g][r], left - g * kLanes);
        }
}

// out[row, columns of the blocks, one after the other] += b s of the tile's rows
template <class T, int R>
void expand(const BatonAdapters& of, const int32_t* tile, int first, const int32_t* block, int64_t end) {
    constexpr int kAtOnce = kGroups(R);
    const Rows<R> rows(of, tile, first);
    const T* const b = (const T*)of.b + tile[0] * of.max_rank * of.num_columns;
    for (int64_t column = block[0]; column < end;) {
        while (column >= block[1]) block += 3;
        const bool are_many = column + kAtOnce * kLanes <= end;
        if (are_many) expand_groups<T, R, kAtOnce>(of, b, rows, of.ranks[tile[0]], column, kAtOnce * kLanes, block);
        else expand_groups<T, R, 1>(of, b, rows, of.ranks[tile[0]], column, std::min(end, (int64_t)block[1]) - column, block);
        column += are_many ? kAtOnce * kLanes : kLanes;
    }
}

bool are_panels(const BatonAdapters& of) {  // all blocks: then groups of lanes never reach into the next
    for (int64_t block = 0; block < of.num_blocks; ++block)
        if (of.blocks[3 * block + 1] - of.blocks[3 * block] != kPanelColumns) return false;
    return true;
}

template <class T> void add_adapters(const BatonAdapters& of) {
    const int64_t groups = (of.max_rank + kRanks - 1) / kRanks;
#pragma omp parallel num_threads(of.num_threads) if (of.num_threads > 1)
    {
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t i = 0; i < of.num_tiles; ++i)
            for (int64_t group = 0; group < of.num_parts * groups; ++group) {
                const int32_t* const tile = of.tiles + 3 * i;
                const int64_t rank = tile[0] < 0 ? 0 : of.ranks[tile[0]];
                const int64_t j = group % groups * kRanks, count = std::min<int64_t>(kRanks, rank - j);
                if (count <= 0) continue;
                in_rows(tile, [&](auto rows, int first) {
                    shrink<T, rows>(of, tile, first, group / groups * of.max_rank + j, count);
                });
            }
        const int64_t at_once = are_panels(of) ? kColumns / kPanelColumns : 1;
#pragma omp for schedule(guided, 16) collapse(2)
        for (int64_t i = 0; i < of.num_tiles; ++i)
            for (int64_t block = 0; block < of.num_blocks; block += at_once) {
                const int32_t* const tile = of.tiles + 3 * i;
                if (tile[0] < 0 || !of.ranks[tile[0]]) continue;
                const int64_t last = std::min(block + at_once, of.num_blocks) - 1;
                in_rows(tile, [&](auto rows, int first) {
                    expand<T, rows>(of, tile, first, of.blocks + 3 * block, of.blocks[3 * last + 1]);
                });
            }
    }
}

}  // namespace

extern "C" void baton_add_adapters(const BatonAdapters* of, int is_float32) {
    if (is_float32) return add_adapters<float>(*of);
    add_adapters<bfloat16>(*of);
}

// gate_up: [num_rows, 2 * padded], 16 columns of gate and 16 of up in turn |-> out [num_rows, width]: silu(gate) * up,
// with the rounding of a product that joins them itself (cpu_multiply.h).
extern "C" void baton_join(const bfloat16* gate_up, bfloat16* out, int64_t num_rows, int64_t padded, int64_t width,
                           int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows >= 8)
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t at = 0; at < width; at += kLanes) {
            const bfloat16* const gate = gate_up + row * 2 * padded + at / 16 * 32 + at % 16;
            const Floats joined = widen(narrow(silu(widen(load<Halves>(gate))))) * widen(load<Halves>(gate + 16));
            store_part(out + row * width + at, narrow(joined), width - at);
        }
}
