// Products of rows with packed weights, y = x w': bfloat16 or 8-bit weights, for few rows (decode) and many (prefill).
//
// Weights are stored in tiles of 1 KiB. All instruction sets use the same order, read sequentially for any rows:
//   [N / 32][K / depth of a tile][2 panels][16 words][16 columns] words of 4 bytes along K: 2 bfloat16 or 4 codes
// N and K are zero-padded. Each output is one chain of sums along K, so a row's outputs do not depend on other rows.
// With 8-bit weights x is rounded to 8 bits too, each row by its largest value.
// Python has checked all pointers. Keeps scratch memory per thread. Throws nothing.
#include <type_traits>

#include "cpu_blocks.h"

// Mirrored field by field in engine/weights/packed.py.
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

constexpr int kPrefetchBytes = 8192;  // ahead, into L2: a core waits for fewer lines on their way into L1
constexpr int64_t kFewRows = 16;  // encoding these takes less time than waiting for other threads

#ifdef BATON_DOTS
using Bits8 = Dots;
#else
using Bits8 = Shorts;
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
