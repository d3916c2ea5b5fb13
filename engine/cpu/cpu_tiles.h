// Products of rows with packed weights by AMX tiles, for any number of rows.
//
//                     a pass's depth                       32 columns
//                 +-------------------+                   +----------+
//   a pass's rows |  x: kCachedBytes  |    a pass's depth |  w, one  |  from memory: read once a pass, the next block
//   (in pairs of  |  at most, so that |                   |   block  |  is fetched into L2 meanwhile
//   tiles: 32)    |  L2 keeps it      |                   +----------+
//                 +-------------------+
//
// Rows are laid out once a pass, by all threads: [rows / 32][all tiles of depth][2 tiles][16 rows][16 words]. Two tiles
// of rows times two of columns stay in registers over a pass's depth: 4 loads for 4 products, from L2. A deeper product
// keeps its sums between passes over the depth, for a run of blocks, so that x is read again only once a run.
#pragma once
#include "cpu_amx.h"
#include "cpu_multiply.h"

#ifdef BATON_AMX
namespace {

constexpr int64_t kCachedBytes = 1 << 20;  // of x, of L2's 2 MiB: two blocks of w take 256 KiB at a depth of 2,048
constexpr int64_t kPassRows = 256;  // weights that are read from memory for fewer rows leave tiles idle
constexpr int64_t kRunBlocks = 16, kRunBytes = 1 << 19;  // of blocks whose sums are kept
constexpr int64_t kWidenedTiles = 64;  // of depth: two blocks of them take 256 KiB
constexpr int kTile = kTileWords;

#define BATON_DOT(c, a, b)                                                     \
    do {                                                                       \
        if constexpr (std::is_same_v<Math, Pairs>) TILE_DOT_BF16(c, a, b); \
        else TILE_DOT_U8S8(c, a, b);                                       \
    } while (0)

// sums[16 * kTall][32] += x[num_tiles][kTall] times w[num_tiles][2]. kTall: tiles of rows, 1 or 2.
// Next operands are loaded as soon as products have read the last ones: a core whose other thread is busy has few tiles
// to rename. Calls `meanwhile` for each tile of depth: vectors have nothing to do while tiles are multiplied.
template <class Math, int kTall, class Work>
void add_depth(const uint32_t* x, const uint32_t* w, int64_t num_tiles, bool is_first, typename Math::Sums* sums,
               Work meanwhile) {
    float* const at = (float*)sums;
    asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
    if (is_first) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        TILE_LOAD(0, at, 128);
        TILE_LOAD(1, at + 16, 128);
        if constexpr (kTall == 2) {
            TILE_LOAD(2, at + 512, 128);
            TILE_LOAD(3, at + 528, 128);
        }
    }
    TILE_LOAD(6, w, 64);
    TILE_LOAD(4, x, 64);
    TILE_LOAD(7, w + kTile, 64);
    if constexpr (kTall == 2) TILE_LOAD(5, x + kTile, 64);
    for (int64_t tile = 1; tile < num_tiles; ++tile) {
        x += kTall * kTile, w += 2 * kTile;
        BATON_DOT(0, 4, 6);
        BATON_DOT(1, 4, 7);
        TILE_LOAD(4, x, 64);
        if constexpr (kTall == 2) BATON_DOT(2, 5, 6);
        TILE_LOAD(6, w, 64);
        if constexpr (kTall == 2) {
            BATON_DOT(3, 5, 7);
            TILE_LOAD(5, x + kTile, 64);
        }
        TILE_LOAD(7, w + kTile, 64);
        meanwhile();
    }
    BATON_DOT(0, 4, 6);
    BATON_DOT(1, 4, 7);
    if constexpr (kTall == 2) {
        BATON_DOT(2, 5, 6);
        BATON_DOT(3, 5, 7);
    }
    meanwhile();
    TILE_STORE(0, at, 128);
    TILE_STORE(1, at + 16, 128);
    if constexpr (kTall == 2) {
        TILE_STORE(2, at + 512, 128);
        TILE_STORE(3, at + 528, 128);
    }
}
#undef BATON_DOT

// Weights that are stored in tiles: nothing to do.
template <class MathOf> struct StoredTiles {
    using Math = MathOf;
    static constexpr int kTileDepth = 16 * Math::kPerWord, kBlockWords = 2 * kTile;
    static constexpr bool kWidens = false;
    static void widen(const uint32_t*, int, uint32_t*) {}
};

// Tiles `count` of a block from `tile` on.
struct Item {
    const uint32_t* w;
    int64_t block, tile, count;
};

// What is left to widen of an item.
template <class Source> struct Widening {
    Item item;
    uint32_t* to;
    int vector = 0;
    void step() {  // half a tile
        if (item.count <= 0) return;
        for (const int end = vector + kVectors; vector < end; ++vector) Source::widen(item.w, vector, to);
        if (vector < 2 * kVectors) return;
        vector = 0, item.w += Source::kBlockWords, to += 2 * kTile, --item.count;
    }
    void finish() {
        while (Source::kWidens && item.count > 0) step();
    }
};

// Lays out rows [begin, begin + num_rows) of x, 16 at a time. In a parallel region, shared out.
template <class Math>
void lay_out_rows(const BatonProduct& of, int64_t begin, int64_t num_rows, int64_t num_tiles, uint32_t* to,
                  float* units) {
    static thread_local std::vector<uint32_t> row_memory;
    const bool is_copy = std::is_same_v<Math, Pairs> && of.depth % (16 * Math::kPerWord) == 0;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < num_rows; first += 16) {
        const int64_t tall = num_rows - first / 32 * 32 > 16 ? 2 : 1, count = std::min<int64_t>(num_rows - first, 16);
        uint32_t* const encoded = is_copy ? nullptr : align(row_memory, 16 * num_tiles * 16);
        const uint32_t* rows[16];
        for (int64_t i = 0; i < count; ++i) {
            const bfloat16* const row = of.x + (begin + first + i) * of.depth;
            rows[i] = is_copy ? (const uint32_t*)row : encoded + i * num_tiles * 16;
            if (is_copy) continue;
            std::memset((void*)(rows[i] + (num_tiles - 1) * 16), 0, 64);
            units[first + i] = Math::encode(row, of.depth, (uint32_t*)rows[i]);
        }
        uint32_t* at = to + first / 32 * 2 * num_tiles * kTile + first % 32 / 16 * kTile;
        for (int64_t tile = 0; tile < num_tiles; ++tile, at += tall * kTile) {
            for (int64_t i = 0; i < count; ++i) std::memcpy(at + i * 16, rows[i] + tile * 16, 64);
            std::memset(at + count * 16, 0, (16 - count) * 64);
        }
    }
}

// Rows of sums that are still to be written.
template <class Math> struct Unwritten {
    const typename Math::Sums* sums;
    const float* units;
    int64_t row, num_rows, column;
    void write(const BatonProduct& of, int64_t count) {
        count = std::min(count, num_rows);
        write_rows<Math>(of, row, count, column, sums, units);
        sums += count * 2 * kVectors, units += count, row += count, num_rows -= count;
    }
};

// Some rows of a product, which all threads multiply.
template <class Source> struct TilePass {
    using Math = typename Source::Math;
    static constexpr int64_t kRows = (Source::kWidens ? 2 : 1) * kPassRows;  // widening takes as long for fewer
    static constexpr int64_t kLines = Source::kBlockWords / 16, kPair = 32 * 2 * kVectors;
    const BatonProduct& of;
    int64_t begin, num_rows, num_tiles;
    int64_t num_blocks = (of.num_columns + 31) / 32, num_pairs = (num_rows + 31) / 32;
    int64_t most_tiles = Source::kWidens ? std::min(num_tiles, kWidenedTiles) : num_tiles;
    int64_t part = std::min(most_tiles, kCachedBytes / (num_pairs * 2 * kTile * 4));  // of the depth
    int64_t most_blocks = std::min(kRunBlocks, kRunBytes / (num_pairs * kPair * (int64_t)sizeof(Floats)));
    int64_t run = std::clamp(num_blocks / (2 * of.num_threads), (int64_t)1, most_blocks);  // of blocks
    int64_t lines = (kLines + num_pairs - 1) / num_pairs;  // of the next block, to be fetched for each tile of depth

    // An item of a run: blocks of a part of the depth, then those of the next part.
    Item find(int64_t first, int64_t width, int64_t item) const {
        const int64_t tile = item / width * part, block = first + item % width;
        return {of.w + (block * num_tiles + tile) * Source::kBlockWords, block, tile, std::min(part, num_tiles - tile)};
    }
    // A run of blocks from `first` on, by one thread.
    void multiply(const uint32_t* x, const float* units, int64_t first) const {
        static thread_local std::vector<typename Math::Sums> sums_memory;
        static thread_local std::vector<uint32_t> widened_memory;
        const bool keeps_sums = part < num_tiles;
        const int64_t width = std::min(run, num_blocks - first), num_items = width * ((num_tiles + part - 1) / part);
        auto* const sums = align(sums_memory, (keeps_sums ? width * num_pairs : 1) * kPair);
        uint32_t* const widened = Source::kWidens ? align(widened_memory, 2 * part * 2 * kTile) : nullptr;
        Unwritten<Math> unwritten{};  // is written before the next sums are stored, maybe at the same place
        Widening<Source> widening{find(first, width, 0), widened};
        widening.finish();
        for (int64_t item = 0; item < num_items; ++item) {
            const auto [stored, block, tile, count] = find(first, width, item);
            const uint32_t* const w = Source::kWidens ? widened + item % 2 * part * 2 * kTile : stored;
            const bool has_next = Source::kWidens && item + 1 < num_items;
            widening = {has_next ? find(first, width, item + 1) : Item{}, widened + (item + 1) % 2 * part * 2 * kTile};
            const char* next = (const char*)stored;
            next += num_pairs == 1 ? kPrefetchBytes : num_tiles * kLines * 64 * (Source::kWidens ? 2 : 1);
            const char* const end = next + count * kLines * 64;
            const int64_t rows_a_tile = (31 + count) / count, calls_a_step = std::max<int64_t>(num_pairs / 2, 1);
            int64_t calls = 0;
            const auto meanwhile = [&] {
                if (next < end)
                    for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
                if (unwritten.num_rows) unwritten.write(of, rows_a_tile);
                if (has_next && ++calls % calls_a_step == 0) widening.step();
            };
            for (int64_t i = 0; i < num_pairs; ++i) {
                const int64_t row = i * 32, left = std::min<int64_t>(num_rows - row, 32);
                auto* const at = sums + (keeps_sums ? (block - first) * num_pairs + i : 0) * kPair;
                const uint32_t* const rows = x + row / 16 * num_tiles * kTile;
                if (left > 16) add_depth<Math, 2>(rows + tile * 2 * kTile, w, count, tile == 0, at, meanwhile);
                else add_depth<Math, 1>(rows + tile * kTile, w, count, tile == 0, at, meanwhile);
                if (tile + count < num_tiles) continue;
                unwritten = {at, units + row, begin + row, left, block * 32};
                fetch_outputs(of, begin + row, left, block * 32);
            }
            widening.finish();
        }
        unwritten.write(of, 32);
    }
};

template <class Source> void multiply_tiles(const BatonProduct& of) {
    using Pass = TilePass<Source>;
    static thread_local std::vector<uint32_t> x_memory;
    static thread_local std::vector<float> unit_memory(Pass::kRows);
    const uint8_t tile_rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    const int64_t num_tiles = (of.depth + Source::kTileDepth - 1) / Source::kTileDepth;
    float* const units = unit_memory.data();
    for (int64_t begin = 0; begin < of.num_rows; begin += Pass::kRows) {
        const Pass pass{of, begin, std::min(Pass::kRows, of.num_rows - begin), num_tiles};
        uint32_t* const x = align(x_memory, pass.num_pairs * 2 * num_tiles * kTile);
        const auto lay_out = [&] { lay_out_rows<typename Pass::Math>(of, begin, pass.num_rows, num_tiles, x, units); };
        if (pass.num_rows <= kFewRows) lay_out();
#pragma omp parallel num_threads(of.num_threads) if (of.num_threads > 1)
        {
            if (pass.num_rows > kFewRows) lay_out();
            configure_tiles(tile_rows, 8);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t first = 0; first < pass.num_blocks; first += pass.run) pass.multiply(x, units, first);
            TILE_RELEASE();
        }
    }
}

}  // namespace
#endif
