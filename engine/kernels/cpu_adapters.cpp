// What adapters add to a product, y += B A x, for rows in tiles of one adapter each; and the end of a product whose
// gate and up were kept apart for them. Sums are float32. Python has checked all pointers. Throws nothing.
#include "cpu_values.h"

namespace {

constexpr int kTileRows = 16, kColumns = 64, kRanks = 4, kRowsAtOnce = 4;

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

// s[row, j .. j + count] of the tile's rows
template <class T>
void shrink(const BatonAdapters& of, const int32_t* tile, int64_t j, int64_t count) {
    const int64_t depth = of.depth, width = of.num_parts * of.max_rank;
    const T* const a = (const T*)of.a + (tile[0] * width + j) * depth;
    for (int first = 0; first < tile[2]; first += kRowsAtOnce) {
        const int num_rows = std::min(kRowsAtOnce, tile[2] - first);
        const T* x[kRowsAtOnce];
        for (int r = 0; r < kRowsAtOnce; ++r)
            x[r] = (const T*)of.x + of.rows[tile[1] + first + std::min(r, num_rows - 1)] * depth;
        Floats sums[kRanks][kRowsAtOnce] = {};
        for (int64_t k = 0; k < depth; k += kLanes) {
            Floats values[kRowsAtOnce];
            for (int r = 0; r < kRowsAtOnce; ++r) values[r] = r < num_rows ? load_some(x[r] + k, depth - k) : Floats{};
            for (int i = 0; i < kRanks; ++i) {
                if (i >= count) break;
                const Floats weights = load_some(a + i * depth + k, depth - k);
                for (int r = 0; r < kRowsAtOnce; ++r) sums[i][r] += weights * values[r];
            }
        }
        for (int i = 0; i < count; ++i)
            for (int r = 0; r < num_rows; ++r)
                of.shrunk[(tile[1] + first + r) * width + j + i] = reduce(sums[i][r], plus);
    }
}

// out[row, columns of the block] += b s of the tile's rows
template <class T> void expand(const BatonAdapters& of, const int32_t* tile, const int32_t* block) {
    const int64_t width = of.num_parts * of.max_rank, rank = of.ranks[tile[0]];
    const T* const b = (const T*)of.b + tile[0] * of.max_rank * of.num_columns;
    for (int64_t column = block[0]; column < block[1]; column += kLanes) {
        const int64_t left = block[1] - column;
        for (int first = 0; first < tile[2]; first += kRowsAtOnce) {
            const int num_rows = std::min(kRowsAtOnce, tile[2] - first);
            const float* s[kRowsAtOnce];
            for (int r = 0; r < kRowsAtOnce; ++r)
                s[r] = of.shrunk + (tile[1] + first + std::min(r, num_rows - 1)) * width + block[2] * of.max_rank;
            Floats sums[kRowsAtOnce] = {};
            for (int64_t j = 0; j < rank; ++j) {
                const Floats weights = load_some(b + j * of.num_columns + column, left);
                for (int r = 0; r < kRowsAtOnce; ++r) sums[r] += weights * s[r][j];
            }
            for (int r = 0; r < num_rows; ++r) {
                T* const to = (T*)of.out + of.rows[tile[1] + first + r] * of.num_columns + column;
                store_some(to, load_some(to, left) + sums[r], left);
            }
        }
    }
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
                if (count > 0) shrink<T>(of, tile, group / groups * of.max_rank + j, count);
            }
#pragma omp for schedule(dynamic, 8) collapse(2)
        for (int64_t i = 0; i < of.num_tiles; ++i)
            for (int64_t block = 0; block < of.num_blocks; ++block) {
                const int32_t* const tile = of.tiles + 3 * i;
                if (tile[0] >= 0 && of.ranks[tile[0]]) expand<T>(of, tile, of.blocks + 3 * block);
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
