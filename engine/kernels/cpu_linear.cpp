// Products of rows with packed weights, y = x w': bfloat16 or 8-bit weights, for few rows (decode) and many (prefill).
//
// Weights are stored in tiles of 1 KiB. All instruction sets use the same order, read sequentially for any rows:
//   [N / 32][K / depth of a tile][2 panels][16 words][16 columns] words of 4 bytes along K: 2 bfloat16 or 4 codes
// N and K are zero-padded. Each output is one chain of sums along K, so a row's outputs do not depend on other rows.
// With 8-bit weights x is rounded to 8 bits too, each row by its largest value.
// Python has checked all pointers. Keeps scratch memory per thread. Throws nothing.
#include <type_traits>
#include <vector>

#include "cpu_amx.h"
#include "cpu_products.h"

// Mirrored field by field in engine/model/packed.py.
struct BatonProduct {
    const bfloat16* x;     // [num_rows, depth]
    const uint32_t* w;     // tiles
    const float* scale;    // [blocks * 32], in the order of the tiles, for 8-bit weights
    const int32_t* shift;  // [blocks * 32], the same order: 128 * the sum of a column's codes
    const float* bias;     // [blocks * 32] or null, the same order
    void* out;             // see Epilogue
    int64_t num_rows, num_columns, depth;
    int32_t is_8bit, epilogue, math, num_threads;  // math: MathKind; 8 bits have one besides kTiles
};
// Output: bfloat16 [rows, columns]; float32 of the same shape; or silu(gate) * up, bfloat16 [rows, columns / 2], where
// even panels hold gate's columns and odd panels up's.
enum Epilogue { kRounded, kFloats, kGated };

namespace {

constexpr int kTileWords = 256;    // a panel's part of a tile: [16 words][16 columns]
constexpr int kPrefetchBytes = 8192;  // ahead, into L2: a core waits for fewer lines on their way into L1
constexpr int64_t kFewRows = 16;  // encoding these takes less time than waiting for other threads
constexpr int kVectors = 16 / kLanes;  // of a line of 16 columns
// Rows multiplied at a time: their sums leave registers for a line of weights and, where loads are no operands, for x.
constexpr int kRows = kLanes == 16 ? 12 : 6;
constexpr int kMaxSums = kRegisters == 32 ? 24 : 12;

#ifdef BATON_DOTS
using Bits8 = Dots;
#else
using Bits8 = Shorts;
#endif

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

// With vectors. A block has up to kRows rows; blocks have about equal sizes.
template <class MathOf> struct Vectors {
    using Math = MathOf;
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

#ifdef BATON_AMX
// With AMX: a block of rows is one or two tiles of 16; x: [tiles of rows][tiles of depth][16 rows][16 words].
template <class MathOf> struct Tiles {
    using Math = MathOf;
    static constexpr bool kFillsBlocks = true;  // with rows of zeros
    static constexpr int64_t kMaxRows = 256;  // per pass: fewer would read the weights too often for tiles
    static int64_t chunk_tiles(int64_t) { return 32; }
    static int64_t block_rows(int64_t num_rows) { return num_rows <= 16 ? 16 : 32; }
    static void begin() {
        const uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
        configure_tiles(rows, 8);
    }
    static void end() { TILE_RELEASE(); }
    static void place(const uint32_t* from, uint32_t* block, int64_t tile, int64_t row, int64_t, int64_t num_tiles) {
        std::copy_n(from, 16, block + ((row / 16 * num_tiles + tile) * 16 + row % 16) * 16);
    }
    static const uint32_t* prepare(const uint32_t* w, int64_t, std::vector<uint32_t>&) { return w; }
    // sums: [32][32]
    static void add(int64_t num_rows, bool, const uint32_t* x, const uint32_t* w, int64_t first, int64_t num_tiles,
                    int64_t all_tiles, typename Math::Sums* sums, const char* next, int64_t lines) {
        const bool has_two = num_rows > 16;
        const uint32_t *upper = x + first * kTileWords, *lower = upper + all_tiles * kTileWords;
        float* const at = (float*)sums;
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
        TILE_LOAD(0, at, 128);
        TILE_LOAD(1, at + 16, 128);
        if (has_two) {
            TILE_LOAD(2, at + 512, 128);
            TILE_LOAD(3, at + 528, 128);
        }
        for (int64_t tile = 0; tile < num_tiles; ++tile, w += 2 * kTileWords) {
            for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            TILE_LOAD(6, w, 64);
            TILE_LOAD(7, w + kTileWords, 64);
            TILE_LOAD(4, upper + tile * kTileWords, 64);
            if (has_two) TILE_LOAD(5, lower + tile * kTileWords, 64);
            dot(has_two, Math{});
        }
        TILE_STORE(0, at, 128);
        TILE_STORE(1, at + 16, 128);
        if (has_two) {
            TILE_STORE(2, at + 512, 128);
            TILE_STORE(3, at + 528, 128);
        }
    }
    static void dot(bool has_two, Pairs) {
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        if (!has_two) return;
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
    }
    static void dot(bool has_two, Dots) {
        TILE_DOT_U8S8(0, 4, 6);
        TILE_DOT_U8S8(1, 4, 7);
        if (!has_two) return;
        TILE_DOT_U8S8(2, 5, 6);
        TILE_DOT_U8S8(3, 5, 7);
    }
};
#endif

#ifdef BATON_SQUARES
// With Arm's products of 2 rows and 2 columns: a block has up to 4 pairs of rows, the last one perhaps with a row of
// zeros; x: [tiles][8 pairs of words][rows][2 words].
template <class MathOf> struct Squares {
    using Math = MathOf;
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

// Writes a row's 32 columns from `column` on. sums: of both panels.
template <class Math>
void write_out(const BatonProduct& of, int64_t row, int64_t column, const typename Math::Sums* sums, float unit) {
    const auto value = [&](int v) {
        const int64_t at = column + v * kLanes;
        Floats found;
        if constexpr (std::is_same_v<typename Math::Sums, Floats>) {
            found = sums[v];
        } else {  // codes that are too large by 128 added 128 * the sum of the column's codes
            const Ints exact = Math::kOffset ? sums[v] - load<Ints>(of.shift + at) : sums[v];
            found = __builtin_convertvector(exact, Floats) * (load<Floats>(of.scale + at) * unit);
        }
        return of.bias ? found + load<Floats>(of.bias + at) : found;
    };
    for (int v = 0; v < 2 * kVectors; ++v) {
        const int64_t at = column + v * kLanes, left = of.num_columns - at;
        if (of.epilogue == kFloats) {
            store_part((float*)of.out + row * of.num_columns + at, value(v), left);
        } else if (of.epilogue == kRounded) {
            store_part((bfloat16*)of.out + row * of.num_columns + at, narrow(value(v)), left);
        } else if (v < kVectors) {  // rounds where the slow twin rounds
            const Floats gate = widen(narrow(silu(widen(narrow(value(v)))))), up = widen(narrow(value(v + kVectors)));
            const int64_t to = column / 2 + v * kLanes;
            store_part((bfloat16*)of.out + row * (of.num_columns / 2) + to, narrow(gate * up), of.num_columns / 2 - to);
        }
    }
}

// Encodes rows [begin, begin + num_rows) of x into blocks of `height` rows at `to`. In a parallel region, shared out.
template <class Path>
void encode_rows(const BatonProduct& of, int64_t begin, int64_t num_rows, int64_t height, int64_t num_tiles,
                 uint32_t* to, float* units) {
    using Math = typename Path::Math;
    constexpr int kWords = 16 * Math::kParts;  // of a tile
    static thread_local std::vector<uint32_t> row_memory;
    const int64_t filled = Path::kFillsBlocks ? (num_rows + height - 1) / height * height : num_rows;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < filled; ++row) {
        const int64_t first = row / height * height, rows = std::min(height, num_rows - first);
        uint32_t* const words = align(row_memory, num_tiles * kWords);
        std::memset(words, 0, num_tiles * kWords * 4);
        if (row < num_rows) units[row] = Math::encode(of.x + (begin + row) * of.depth, of.depth, words);
        for (int64_t tile = 0; tile < num_tiles; ++tile)
            Path::place(words + tile * kWords, to + first * num_tiles * kWords, tile, row - first, rows, num_tiles);
    }
}

template <class Path> void multiply(const BatonProduct& of) {
    using Math = typename Path::Math;
    using Sums = typename Math::Sums;
    static thread_local std::vector<uint32_t> x_memory;
    static thread_local std::vector<float> unit_memory(Path::kMaxRows);
    const int64_t tile_depth = 16 * Math::kPerWord, num_tiles = (of.depth + tile_depth - 1) / tile_depth;
    const int64_t num_blocks = (of.num_columns + 31) / 32;
    const int64_t at_once = std::clamp<int64_t>(num_blocks / (8 * of.num_threads), 1, 8);
    float* const units = unit_memory.data();
    for (int64_t begin = 0; begin < of.num_rows; begin += Path::kMaxRows) {
        const int64_t num_rows = std::min<int64_t>(Path::kMaxRows, of.num_rows - begin);
        const int64_t height = Path::block_rows(num_rows), num_heights = (num_rows + height - 1) / height;
        const int64_t block_words = height * num_tiles * 16 * Math::kParts;
        uint32_t* const x = align(x_memory, num_heights * block_words);
        // A single block of rows prefetches a little ahead in its chunk of weights; several share the next chunk.
        const int64_t lines = (32 + num_heights - 1) / num_heights, chunk = Path::chunk_tiles(num_heights);
        if (num_rows <= kFewRows) encode_rows<Path>(of, begin, num_rows, height, num_tiles, x, units);
#pragma omp parallel num_threads(of.num_threads) if (of.num_threads > 1)
        {
            static thread_local std::vector<Sums> sums_memory;
            static thread_local std::vector<uint32_t> weight_memory;
            if (num_rows > kFewRows) encode_rows<Path>(of, begin, num_rows, height, num_tiles, x, units);
            Sums* const sums = align(sums_memory, num_heights * height * 2 * kVectors);
            Path::begin();
#pragma omp for schedule(dynamic, at_once) nowait
            for (int64_t block = 0; block < num_blocks; ++block) {
                std::memset((void*)sums, 0, num_heights * height * 128);
                for (int64_t tile = 0; tile < num_tiles; tile += chunk) {
                    const int64_t count = std::min(chunk, num_tiles - tile);
                    const uint32_t* const w = of.w + (block * num_tiles + tile) * 2 * kTileWords;
                    const bool is_alone = num_heights == 1;
                    const uint32_t* const prepared = is_alone ? w : Path::prepare(w, count, weight_memory);
                    for (int64_t i = 0; i < num_heights; ++i) {
                        const char* next = (const char*)w;
                        next += is_alone ? kPrefetchBytes : (count * 32 + i * lines * count) * 64;
                        Path::add(std::min(height, num_rows - i * height), is_alone, x + i * block_words, prepared, tile,
                                  count, num_tiles, sums + i * height * 2 * kVectors, next, i * lines < 32 ? lines : 0);
                    }
                }
                for (int64_t row = 0; row < num_rows; ++row)
                    write_out<Math>(of, begin + row, block * 32, sums + row * 2 * kVectors, units[row]);
            }
            Path::end();
        }
    }
}

// Packs a panel: 16 plain rows of `bytes` bytes each, transposed in 4-byte words. A panel's tiles are two apart.
void write_panel(const void* const* rows, int64_t bytes, uint32_t* to) {
    for (int64_t at = 0; at < bytes; at += kLanes * 4)
        for (int first = 0; first < 16; first += kLanes) {
            Words words[kLanes] = {};
            for (int column = 0; column < kLanes; ++column)
                if (rows[first + column]) words[column] = load_part<Words>((const char*)rows[first + column] + at, bytes - at);
            transpose(words);
            uint32_t* const tile = to + at / 64 * 2 * kTileWords + at % 64 * 4 + first;
            for (int word = 0; word < kLanes; ++word) store(tile + word * 16, words[word]);
        }
}

}  // namespace

// Packs plain rows [num_rows, depth] into every `step`-th panel from `first` on. scale and shift: for 8-bit weights.
extern "C" void baton_pack(const bfloat16* from, int64_t num_rows, int64_t depth, uint32_t* w, int64_t first,
                           int64_t step, float* scale, int32_t* shift, int num_threads) {
    const int64_t tile_depth = scale ? 64 : 32, num_tiles = (depth + tile_depth - 1) / tile_depth;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t group = 0; group < (num_rows + 15) / 16; ++group) {
        const int64_t panel = first + group * step;
        std::vector<int8_t> codes(scale ? 16 * depth : 0);
        const void* rows[16] = {};  // null after the last row
        for (int column = 0; column < 16 && group * 16 + column < num_rows; ++column) {
            const bfloat16* const row = from + (group * 16 + column) * depth;
            rows[column] = row;
            if (!scale) continue;
            int8_t* const code = codes.data() + column * depth;
            scale[panel * 16 + column] = round_row(row, depth, code);
            int32_t sum = 0;
            for (int64_t k = 0; k < depth; ++k) sum += code[k];
            shift[panel * 16 + column] = 128 * sum;
            rows[column] = code;
        }
        write_panel(rows, depth * (scale ? 1 : 2), w + (panel / 2 * num_tiles * 2 + panel % 2) * kTileWords);
    }
}

// Unpacks `num_panels` panels of bfloat16 to [16 * num_panels, depth].
extern "C" void baton_unpack(const uint32_t* w, int64_t first, int64_t num_panels, int64_t depth, bfloat16* out,
                             int num_threads) {
    const int64_t num_tiles = (depth + 31) / 32;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t panel = first; panel < first + num_panels; ++panel)
        for (int64_t at = 0; at < depth; at += 2 * kLanes)
            for (int column = 0; column < 16; column += kLanes) {
                const int64_t tile = (panel / 2 * num_tiles + at / 32) * 2 + panel % 2;
                Words words[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    words[i] = load<Words>(w + tile * kTileWords + (at % 32 / 2 + i) * 16 + column);
                transpose(words);
                bfloat16* const to = out + ((panel - first) * 16 + column) * depth + at;
                for (int i = 0; i < kLanes; ++i)
                    std::memcpy(to + i * depth, words + i, std::min<int64_t>(2 * kLanes, depth - at) * 2);
            }
}

// Unpacks rows to [num_ids, depth] for an embedding. scale: for 8-bit weights, else null.
extern "C" void baton_take_rows(const uint32_t* w, const float* scale, int64_t depth, const int64_t* ids,
                                int64_t num_ids, bfloat16* out, int num_threads) {
    const int64_t tile_depth = scale ? 64 : 32, num_tiles = (depth + tile_depth - 1) / tile_depth;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_ids > 8)
    for (int64_t i = 0; i < num_ids; ++i) {
        const int64_t panel = ids[i] / 16, column = ids[i] % 16;
        const uint32_t* const from = w + (panel / 2 * num_tiles * 2 + panel % 2) * kTileWords + column;
        for (int64_t k = 0; k < depth; ++k) {
            const int64_t word = k / (scale ? 4 : 2);
            const uint32_t value = from[word / 16 * 2 * kTileWords + word % 16 * 16];
            if (!scale) {
                out[i * depth + k] = value >> 16 * (k % 2);
                continue;
            }
            const float code = (int8_t)(value >> 8 * (k % 4));
            const Floats row = Floats{} + code * scale[ids[i]];
            out[i * depth + k] = narrow(row)[0];
        }
    }
}

extern "C" void baton_multiply(const BatonProduct* product) {
#ifdef BATON_AMX
    if (product->math == kTiles)
        return product->is_8bit ? multiply<Tiles<Dots>>(*product) : multiply<Tiles<Pairs>>(*product);
#elif defined(BATON_SQUARES)
    if (product->math == kTiles)
        return product->is_8bit ? multiply<Squares<Dots>>(*product) : multiply<Squares<Pairs>>(*product);
#endif
    if (product->is_8bit) return multiply<Vectors<Bits8>>(*product);
#ifdef BATON_PAIRS
    if (product->math == kPairs) return multiply<Vectors<Pairs>>(*product);
#endif
    multiply<Vectors<Widened>>(*product);
}
