// Products of rows with packed weights, y = x w': bfloat16 or 8-bit weights, for few rows (decode) and many (prefill).
//
// Weights are stored in tiles of 1 KiB. All instruction sets use the same order, read sequentially for any rows:
//   [N / 32][K / depth of a tile][2 panels][16 words][16 columns] words of 4 bytes along K: 2 bfloat16 or 4 codes
// N and K are zero-padded.
// With 8-bit weights x is rounded to 8 bits too, each row by its largest value.
#include "cpu_tiles.h"

enum Form { kBFloat16, k8Bits };

namespace {

#ifdef BATON_DOTS
using Bits8 = Dots;
#else
using Bits8 = Shorts;
#endif

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
        return product->form == k8Bits ? multiply_tiles<StoredTiles<Dots>>(*product)
                                       : multiply_tiles<StoredTiles<Pairs>>(*product);
#elif defined(BATON_SQUARES)
    if (product->math == kTiles)
        return product->form == k8Bits ? multiply<Squares<Dots>>(*product) : multiply<Squares<Pairs>>(*product);
#endif
    if (product->form == k8Bits) return multiply<Vectors<Bits8>>(*product);
#ifdef BATON_PAIRS
    if (product->math == kPairs) return multiply<Vectors<Pairs>>(*product);
#endif
    multiply<Vectors<Widened>>(*product);
}
