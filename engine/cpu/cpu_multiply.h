// Products of rows with packed weights, y = x w', for any path of cpu_blocks.h: what threads share, prefetch and write.
//
// Each output is one chain of sums along K, so a row's outputs do not depend on other rows. Python has checked all
// pointers. Keeps scratch memory per thread. Throws nothing.
#pragma once
#include <type_traits>

#include "cpu_blocks.h"

// Mirrored field by field in engine/cpu/packed.py.
struct BatonProduct {
    const bfloat16* x;     // [num_rows, depth]
    const uint32_t* w;     // tiles
    const float* scale;    // [blocks * 32], in the order of the tiles: for columns of 8-bit codes
    const int32_t* shift;  // [blocks * 32], the same order: 128 * the sum of a column's codes
    const float* bias;     // [blocks * 32] or null, the same order
    void* out;             // see Epilogue
    int64_t num_rows, num_columns, depth;
    int32_t form, epilogue, math, num_threads;  // form: of w, see the kernel; math: MathKind
};
// Output: bfloat16 [rows, columns]; float32 of the same shape; or silu(gate) * up, bfloat16 [rows, columns / 2], where
// even panels hold gate's columns and odd panels up's.
enum Epilogue { kRounded, kFloats, kGated };

namespace {

constexpr int kPrefetchBytes = 8192;  // ahead, into L2: a core waits for fewer lines on their way into L1
constexpr int64_t kStreamedBytes = 2 << 20;  // what is written next would push out what is read next
constexpr int64_t kFewRows = 16;  // encoding these takes less time than waiting for other threads

// Writes 32 columns, from `column` on, of `num_rows` rows from `row` on. sums: [num_rows][32]; units: each row's, or of
// the first where values are floats.
template <class Math, Epilogue epilogue, bool is_streamed = false>
void write_rows_as(const BatonProduct& of, int64_t row, int64_t num_rows, int64_t column, const typename Math::Sums* sums,
                   const float* units) {
    constexpr int kAll = 2 * kVectors;
    constexpr bool kHasCodes = !std::is_same_v<typename Math::Sums, Floats>;
    for (const int64_t end = row + num_rows; row < end; ++row, ++units, sums += kAll) {
        Floats values[kAll];
        for (int v = 0; v < kAll; ++v) {
            const int64_t at = column + v * kLanes;
            if constexpr (kHasCodes) {  // codes that are too large by 128 added 128 * the sum of the column's codes
                const Ints exact = Math::kOffset ? sums[v] - load<Ints>(of.shift + at) : sums[v];
                values[v] = __builtin_convertvector(exact, Floats) * (load<Floats>(of.scale + at) * *units);
            } else {
                values[v] = sums[v];
            }
            if (of.bias) values[v] += load<Floats>(of.bias + at);
        }
        if constexpr (epilogue == kGated) {  // rounds where the slow twin rounds
            const int64_t width = of.num_columns / 2, to = column / 2;
            for (int v = 0; v < kVectors; ++v) {
                const Floats gate = widen(narrow(silu(widen(narrow(values[v]))))), up = widen(narrow(values[v + kVectors]));
                store_part((bfloat16*)of.out + row * width + to + v * kLanes, narrow(gate * up), width - to - v * kLanes);
            }
#ifdef __AVX512BF16__
        } else if (epilogue == kRounded && of.num_columns - column >= 32) {  // a line of the cache
            const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
            bfloat16* const to = (bfloat16*)of.out + row * of.num_columns + column;
            if (is_streamed) _mm512_stream_si512((__m512i*)to, line);
            else _mm512_storeu_si512(to, line);
#endif
        } else {
            for (int v = 0; v < kAll; ++v) {
                const int64_t at = column + v * kLanes, index = row * of.num_columns + at, left = of.num_columns - at;
                if constexpr (epilogue == kFloats) store_part((float*)of.out + index, values[v], left);
                else store_part((bfloat16*)of.out + index, narrow(values[v]), left);
            }
        }
    }
}
// Whether lines of `out` are written past the caches, where each of them would first be read from memory.
inline bool is_large(const BatonProduct& of) {
    return of.num_rows * of.num_columns * 2 > kStreamedBytes && of.num_columns % 32 == 0 && (uintptr_t)of.out % 64 == 0;
}
template <class Math>
void write_rows(const BatonProduct& of, int64_t row, int64_t num_rows, int64_t column, const typename Math::Sums* sums,
                const float* units) {
    if (of.epilogue == kFloats) return write_rows_as<Math, kFloats>(of, row, num_rows, column, sums, units);
    if (of.epilogue == kGated) return write_rows_as<Math, kGated>(of, row, num_rows, column, sums, units);
    if (is_large(of)) return write_rows_as<Math, kRounded, true>(of, row, num_rows, column, sums, units);
    write_rows_as<Math, kRounded>(of, row, num_rows, column, sums, units);
}

// Fetches the lines that write_rows will change.
inline void fetch_outputs(const BatonProduct& of, int64_t row, int64_t num_rows, int64_t column) {
    const int64_t width = of.num_columns / (of.epilogue == kGated ? 2 : 1), bytes = of.epilogue == kFloats ? 4 : 2;
    const char* at = (const char*)of.out + (row * width + column / (of.epilogue == kGated ? 2 : 1)) * bytes;
    if (!is_large(of) || of.epilogue != kRounded)
        for (; num_rows > 0; --num_rows, at += width * bytes) __builtin_prefetch(at, 1);
}

// Encodes rows [begin, begin + num_rows) of x into blocks of `height` rows at `to`. In a parallel region, shared out.
template <class Path>
void encode_rows(const BatonProduct& of, int64_t begin, int64_t num_rows, int64_t height, int64_t num_tiles,
                 uint32_t* to, float* units) {
    using Math = typename Path::Math;
    constexpr int kWords = Path::kRowWords;
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
    const int64_t num_tiles = (of.depth + Path::kTileDepth - 1) / Path::kTileDepth;
    const int64_t num_blocks = (of.num_columns + 31) / 32;
    const int64_t at_once = std::clamp<int64_t>(num_blocks / (8 * of.num_threads), 1, 8);
    float* const units = unit_memory.data();
    for (int64_t begin = 0; begin < of.num_rows; begin += Path::kMaxRows) {
        const int64_t num_rows = std::min<int64_t>(Path::kMaxRows, of.num_rows - begin);
        const int64_t height = Path::block_rows(num_rows), num_heights = (num_rows + height - 1) / height;
        const int64_t block_words = height * num_tiles * Path::kRowWords;
        uint32_t* const x = align(x_memory, num_heights * block_words);
        // A single block of rows prefetches a little ahead in its chunk of weights; several share the next chunk.
        constexpr int64_t kLines = Path::kBlockWords / 16;
        const int64_t lines = (kLines + num_heights - 1) / num_heights, chunk = Path::chunk_tiles(num_heights);
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
                    const uint32_t* const w = of.w + (block * num_tiles + tile) * Path::kBlockWords;
                    const bool is_alone = num_heights == 1;
                    const uint32_t* const prepared = is_alone ? w : Path::prepare(w, count, weight_memory);
                    for (int64_t i = 0; i < num_heights; ++i) {
                        const char* next = (const char*)w;
                        next += is_alone ? kPrefetchBytes : (count * kLines + i * lines * count) * 64;
                        Path::add(std::min(height, num_rows - i * height), is_alone, x + i * block_words, prepared, tile,
                                  count, num_tiles, sums + i * height * 2 * kVectors, next, i * lines < kLines ? lines : 0);
                    }
                }
                write_rows<Math>(of, begin, num_rows, block * 32, sums, units);
            }
            Path::end();
        }
    }
}

}  // namespace
