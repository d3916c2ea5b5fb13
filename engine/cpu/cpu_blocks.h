// Blocks of rows times 32 columns of packed weights, by vectors or Arm's squares.
//
// A path has: kTileDepth, how far a tile reaches along K; kBlockWords and kRowWords, what a tile takes of the weights of
// a block of columns and of a row of x; kMaxRows rows a pass; block_rows, the height of a block of x; chunk_tiles, how
// many tiles of weights all blocks use before the next; place, which lays out a row's words; prepare, the weights for
// several blocks of rows; add.
#pragma once
#include <vector>

#include "cpu_products.h"

namespace {

constexpr int kTileWords = 256;  // a panel's part of a tile: [16 words][16 columns]
constexpr int kVectors = 16 / kLanes;  // of a line of 16 columns
// Rows multiplied at a time: their sums leave registers for a line of weights and, where loads are no operands, for x.
constexpr int kRows = kLanes == 16 ? 12 : 6;

template <class T> T* align(std::vector<T>& memory, size_t count) {
    if (memory.size() < count + 64) memory.resize(count + 64);
    return (T*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

// sums[rows][32] += the products of `num_tiles` tiles, for 1 or 2 panels. x: [words][parts][rows]. w: tiles, two panels
// apart, or with `is_unpacked` their parts: [tiles][2 panels][16 words][parts][16].
// Prefetches `lines` lines of 64 bytes per tile from `next` on.
template <class Math, int rows, int panels, bool is_unpacked>
void add_tiles(const uint32_t* x, const uint32_t* w, int64_t num_tiles, typename Math::Sums* sums, const char* next,
               int64_t lines) {
    constexpr int kParts = Math::kParts, kStored = is_unpacked ? kParts : 1, kAll = panels * kVectors;
    typename Math::Sums sum[rows][kAll];
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < kAll; ++v) sum[i][v] = sums[i * 2 * kVectors + v];
    for (int64_t tile = 0; tile < num_tiles; ++tile, w += 2 * kTileWords * kStored, x += 16 * kParts * rows) {
        for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
        for (int k = 0; k < 16; ++k)
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                const auto weight = [=](int v) {
                    const uint32_t* const at = w + (v / kVectors * kTileWords + k * 16) * kStored + v % kVectors * kLanes;
                    return is_unpacked ? load<Words>(at + part * 16) : Math::part(load<Words>(at), part);
                };
                const uint32_t* const of_rows = x + (k * kParts + part) * rows;
                if constexpr (rows < kAll) {  // the fewer stay in registers
#pragma GCC unroll 8
                    for (int v = 0; v < kAll; ++v) {
                        const Words words = weight(v);
#pragma GCC unroll 12
                        for (int i = 0; i < rows; ++i) sum[i][v] = Math::add(sum[i][v], words, of_rows[i]);
                    }
                } else {
                    Words words[kAll];
#pragma GCC unroll 8
                    for (int v = 0; v < kAll; ++v) words[v] = weight(v);
#pragma GCC unroll 12
                    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
                        for (int v = 0; v < kAll; ++v) sum[i][v] = Math::add(sum[i][v], words[v], of_rows[i]);
                }
            }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < kAll; ++v) sums[i * 2 * kVectors + v] = sum[i][v];
}

// Tiles of 16 words along K.
template <class MathOf> struct WordTiles {
    using Math = MathOf;
    using Sums = typename Math::Sums;
    static constexpr int kTileDepth = 16 * Math::kPerWord, kBlockWords = 2 * kTileWords, kRowWords = 16 * Math::kParts;
};

// With vectors. A block has up to kRows rows; blocks have about equal sizes.
template <class Math> struct Vectors : WordTiles<Math> {
    using Sums = typename Math::Sums;
    static constexpr bool kFillsBlocks = false;
    static constexpr int64_t kMaxRows = 128;  // per pass: at 2,048 values per row they fit into L2
    // Weight tiles that stay in L1 while all blocks of rows use them; few blocks leave less time to prefetch the next.
    static int64_t chunk_tiles(int64_t num_heights) { return Math::kParts > 1 ? 4 : num_heights > 4 ? 16 : 8; }
    static int64_t block_rows(int64_t num_rows) {
        const int64_t num_blocks = (num_rows + kRows - 1) / kRows;
        return (num_rows + num_blocks - 1) / num_blocks;
    }
    static void begin() {}
    static void end() {}
    // Copies a row's words of a tile into its block, [words][rows of the block].
    static void place(const uint32_t* from, uint32_t* block, int64_t tile, int64_t row, int64_t rows, int64_t) {
        constexpr int kWords = 16 * Math::kParts;
        for (int word = 0; word < kWords; ++word) block[(tile * kWords + word) * rows + row] = from[word];
    }
    // The weights as `add` takes them for several blocks of rows.
    static const uint32_t* prepare(const uint32_t* w, int64_t num_tiles, std::vector<uint32_t>& memory) {
        if constexpr (Math::kParts == 1) return w;
        uint32_t *const unpacked = align(memory, num_tiles * 2 * kTileWords * Math::kParts), *to = unpacked;
        for (int64_t line = 0; line < num_tiles * 32; ++line, w += 16, to += 16 * Math::kParts)
            for (int v = 0; v < 16; v += kLanes)
                for (int part = 0; part < Math::kParts; ++part) store(to + part * 16 + v, Math::part(load<Words>(w + v), part));
        return unpacked;
    }
    template <int rows = kRows>
    static void add(int64_t num_rows, bool is_alone, const uint32_t* x, const uint32_t* w, int64_t first,
                    int64_t num_tiles, int64_t, Sums* sums, const char* next, int64_t lines) {
        if (num_rows == rows) {
            const uint32_t* const from = x + first * 16 * Math::kParts * rows;
            if constexpr (Math::kParts > 1)
                if (!is_alone) return add_panels<rows, true>(from, w, num_tiles, sums, next, lines);
            return add_panels<rows, false>(from, w, num_tiles, sums, next, lines);
        }
        if constexpr (rows > 1) add<rows - 1>(num_rows, is_alone, x, w, first, num_tiles, 0, sums, next, lines);
    }
    // Both panels at once if registers suffice; else one after the other, alternating where they come from memory.
    template <int rows, bool is_unpacked>
    static void add_panels(const uint32_t* x, const uint32_t* w, int64_t num_tiles, Sums* sums, const char* next,
                           int64_t lines) {
        if constexpr (rows * 2 * kVectors <= kMaxSums) {
            add_tiles<Math, rows, 2, is_unpacked>(x, w, num_tiles, sums, next, lines);
        } else {
            constexpr int kPanel = kTileWords * (is_unpacked ? Math::kParts : 1);
            const int64_t step = is_unpacked ? num_tiles : 1;
            for (int64_t tile = 0; tile < num_tiles; tile += step, next += step * lines * 64) {
                const uint32_t* const at = x + tile * 16 * Math::kParts * rows;
                add_tiles<Math, rows, 1, is_unpacked>(at, w + tile * 2 * kPanel, step, sums, next, lines);
                add_tiles<Math, rows, 1, is_unpacked>(at, w + tile * 2 * kPanel + kPanel, step, sums + kVectors, next, 0);
            }
        }
    }
};

#ifdef BATON_SQUARES
// With Arm's products of 2 rows and 2 columns: a block has up to 4 pairs of rows, the last one perhaps with a row of
// zeros; x: [tiles][8 pairs of words][rows][2 words].
template <class Math> struct Squares : WordTiles<Math> {
    using Sums = typename Math::Sums;
    typedef uint64_t Longs __attribute__((vector_size(16)));
    static constexpr bool kFillsBlocks = true;
    static constexpr int64_t kMaxRows = 128;
    static int64_t chunk_tiles(int64_t) { return 8; }
    static int64_t block_rows(int64_t num_rows) { return std::min<int64_t>((num_rows + 1) / 2 * 2, 8); }
    static void begin() {}
    static void end() {}
    static void place(const uint32_t* from, uint32_t* block, int64_t tile, int64_t row, int64_t rows, int64_t) {
        const int64_t height = (rows + 1) / 2 * 2;
        if (row >= height) return;
        for (int pair = 0; pair < 8; ++pair) std::copy_n(from + pair * 2, 2, block + ((tile * 8 + pair) * height + row) * 2);
    }
    static const uint32_t* prepare(const uint32_t* w, int64_t, std::vector<uint32_t>&) { return w; }
    template <int pairs = 4>
    static void add(int64_t num_rows, bool is_alone, const uint32_t* x, const uint32_t* w, int64_t first,
                    int64_t num_tiles, int64_t, Sums* sums, const char* next, int64_t lines) {
        if ((num_rows + 1) / 2 == pairs) {
            for (int columns = 0; columns < 32; columns += 8, lines = 0)
                add_eight<pairs>(x + first * pairs * 32, w + columns / 16 * kTileWords + columns % 16, num_tiles,
                                 (uint32_t*)sums + columns, next, lines);
        } else if constexpr (pairs > 1) {
            add<pairs - 1>(num_rows, is_alone, x, w, first, num_tiles, 0, sums, next, lines);
        }
    }
    // Eight columns. sums: [rows][32]
    template <int pairs>
    static void add_eight(const uint32_t* x, const uint32_t* w, int64_t num_tiles, uint32_t* sums, const char* next,
                          int64_t lines) {
        Sums sum[pairs][4];  // [2 rows][2 columns] each
        for (int i = 0; i < pairs; ++i)
            for (int j = 0; j < 4; ++j) {
                const uint32_t* const at = sums + i * 64 + j * 2;
                sum[i][j] = (Sums)Longs{load<uint64_t>(at), load<uint64_t>(at + 32)};
            }
        for (int64_t tile = 0; tile < num_tiles; ++tile, w += 2 * kTileWords) {
            for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            for (int k = 0; k < 16; k += 2, x += pairs * 4) {
                Words columns[4];
                for (int half = 0; half < 2; ++half) {
                    const Words top = load<Words>(w + k * 16 + half * 4), bottom = load<Words>(w + k * 16 + 16 + half * 4);
                    columns[half * 2] = __builtin_shufflevector(top, bottom, 0, 4, 1, 5);
                    columns[half * 2 + 1] = __builtin_shufflevector(top, bottom, 2, 6, 3, 7);
                }
                for (int i = 0; i < pairs; ++i) {
                    const Words rows = load<Words>(x + i * 4);
                    for (int j = 0; j < 4; ++j) sum[i][j] = add_squares(sum[i][j], rows, columns[j], Math{});
                }
            }
        }
        for (int i = 0; i < pairs; ++i)
            for (int j = 0; j < 4; ++j) {
                const Longs rows = (Longs)sum[i][j];
                uint32_t* const at = sums + i * 64 + j * 2;
                store<uint64_t>(at, rows[0]), store<uint64_t>(at + 32, rows[1]);
            }
    }
};
#endif

}  // namespace
