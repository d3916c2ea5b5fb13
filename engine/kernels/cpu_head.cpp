// Logits in float32: out[S][V] = x[S][K] * w[V][K]', both bfloat16 as they lie in memory, sums in float32.
//
// Each output is one chain of sums over K in vector lanes and one reduction of the lanes at its end, whatever S is: the
// tiling only decides which chains run side by side. Knows pointers that Python has checked; allocates a copy of x.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16, kRows = 4, kColumns = 6;  // 24 sums of 32 registers
#else
constexpr int kLanes = 8, kRows = 2, kColumns = 4;
#endif
constexpr int kStep = 2 * kLanes;  // depth of one vector
constexpr int kBlock = 8 * kRows;      // rows of w that stay in the cache while all of x passes
constexpr int kChunk = 16 * kColumns;  // rows of x that stay there while a block of w passes: 384 KB at K = 2048
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));  // a pair of bfloat16 in each

Words load(const uint16_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
Words load_part(const uint16_t* from, int64_t count) {  // zeros after `count`
    Words words{};
    std::memcpy(&words, from, std::min<int64_t>(count, kStep) * 2);
    return words;
}
Floats add_products(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (Floats)(a << 16) * (Floats)(b << 16);
    return sum + (Floats)(a & 0xFFFF0000u) * (Floats)(b & 0xFFFF0000u);
#endif
}
template <int step, int... i> Floats rotate(Floats v, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(v, v, (i ^ step)...);
}
template <int step = kLanes / 2> float reduce(Floats v) {
    v += rotate<step>(v, std::make_integer_sequence<int, kLanes>{});
    if constexpr (step == 1) return v[0];
    else return reduce<step / 2>(v);
}

struct Weights {
    const uint16_t* w;  // [num_rows, depth]
    int64_t num_rows, depth;
};

// Outputs of `rows` rows of w from `row` on and the first `columns` of a panel, which go to `out`.
// Meanwhile fetches rows [fetch, fetch_end) of w into L2.
template <int rows, int columns>
void multiply_tile(const Weights& of, int64_t row, const uint16_t* panel, float* out, int64_t fetch,
                   int64_t fetch_end) {
    Floats sums[rows][columns] = {};
    const uint16_t* const w = of.w + row * of.depth;
    auto add = [&](auto load_row) {
        Words a[rows];
        for (int i = 0; i < rows; ++i) a[i] = load_row(w + i * of.depth);
        for (int j = 0; j < columns; ++j) {
            Words b = load(panel + j * kStep);
            for (int i = 0; i < rows; ++i) sums[i][j] = add_products(sums[i][j], a[i], b);
        }
        panel += kColumns * kStep;
    };
    int64_t k = 0;
    for (; k + kStep <= of.depth; k += kStep) {
        for (int64_t next = fetch; next < fetch_end; ++next) __builtin_prefetch(of.w + next * of.depth + k, 0, 2);
        add([k](const uint16_t* from) { return load(from + k); });
    }
    if (k < of.depth) add([&](const uint16_t* from) { return load_part(from + k, of.depth - k); });
    for (int j = 0; j < columns; ++j)
        for (int i = 0; i < rows; ++i) out[j * of.num_rows + row + i] = reduce(sums[i][j]);
}

template <int rows, int columns = kColumns, class... Rest> void multiply(int64_t num_columns, const Rest&... rest) {
    if (num_columns >= columns) return multiply_tile<rows, columns>(rest...);
    if constexpr (columns > 1) multiply<rows, columns - 1>(num_columns, rest...);
}

}  // namespace

// x: [num_columns, depth], w: [num_rows, depth], out: [num_columns, num_rows], all contiguous.
extern "C" void baton_head(const uint16_t* x, const uint16_t* w, float* out, int64_t num_columns, int64_t num_rows,
                           int64_t depth, int num_threads) {
    // Panels of x, [columns / kColumns][depth / kStep][kColumns][kStep], padded by zeros: rows whose length is a power
    // of two would all lie in the same few lines of the cache.
    const int64_t num_steps = (depth + kStep - 1) / kStep, panel = num_steps * kColumns * kStep;
    std::vector<uint16_t> panels((num_columns + kColumns - 1) / kColumns * panel);
    for (int64_t column = 0; column < num_columns; ++column)
        for (int64_t step = 0; step < num_steps; ++step)
            std::copy_n(x + column * depth + step * kStep, std::min<int64_t>(kStep, depth - step * kStep),
                        panels.data() + column / kColumns * panel + (step * kColumns + column % kColumns) * kStep);
    const Weights weights{w, num_rows, depth};
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t block = 0; block < num_rows; block += kBlock)
        for (int64_t chunk = 0; chunk < num_columns; chunk += kChunk) {
            const int64_t block_end = std::min(block + kBlock, num_rows), end = std::min(chunk + kChunk, num_columns);
            const int64_t num_tiles = (end - chunk + kColumns - 1) / kColumns;
            for (int64_t row = block, next; row < block_end; row = next) {
                const bool is_whole = row + kRows <= block_end;
                next = row + (is_whole ? kRows : 1);
                for (int64_t tile = 0; tile < num_tiles; ++tile) {  // each fetches its share of the next rows
                    const int64_t column = chunk + tile * kColumns;
                    const int64_t fetch = next + tile * kRows / num_tiles;
                    const int64_t fetch_end = std::min(next + (tile + 1) * kRows / num_tiles, num_rows);
                    auto run = [&](auto rows) {
                        multiply<rows>(end - column, weights, row, panels.data() + column / kColumns * panel,
                                       out + column * num_rows, fetch, fetch_end);
                    };
                    if (is_whole) run(std::integral_constant<int, kRows>{});
                    else run(std::integral_constant<int, 1>{});
                }
            }
        }
}
