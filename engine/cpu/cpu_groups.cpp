// Products of rows with weights in groups of 32 along K, of 4 or 8 bits: w[n, k] = scale * code + minimum.
//
// All instruction sets use the same order, read sequentially for any rows; N is padded by zeros:
//   [N / 32][K / 32] x ([2 panels][words][16 columns], then tables of [2 panels][16 columns])
// With 8 bits word i of 8 holds codes 4 i to 4 i + 3; with 4 bits word i of 4 has those of word i in its low nibbles and
// those of word i + 4 in its high ones.
// x is rounded to 13 bits, each group of a row by its largest value, or to 8 where weights have been rounded to 4 too,
// which costs more; sums of a group's codes are exact. With AMX, many rows stay bfloat16.
#include "cpu_tiles.h"

// What a group's tables hold besides its scales; Tables of engine/formats/groups.py. BatonProduct's form is
// 2 * tables + (bits == 8), or kNarrow for 4 bits with scales times rows of 8 bits.
enum Tables {
    kScales,      // nothing: the middle code, 8 or 128, stands for 0; float16
    kZeros,       // the code that stands for 0; float16
    kMinimums,    // minimums; float16
    kScales32,    // like kScales, in float32
    kMinimums32,  // like kMinimums, in float32
};
constexpr int kNarrow = 10, kNumForms = 11;

namespace {

constexpr int kGroup = 32;
constexpr int kLowBits = 5;  // of a value of x: code = high * 32 + low, -16 <= low < 16

Floats load_floats(const float* from) { return load<Floats>(from); }
Floats load_floats(const uint16_t* from) {  // float16, finite
    const Halves halves = load<Halves>(from);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__ARM_NEON)
    return (Floats)vcvt_f32_f16((float16x4_t)halves);
#else
    const Words words = __builtin_convertvector(halves, Words);
    const Floats size = (Floats)((words & 0x7FFF) << 13) * 0x1p112f;  // the exponent's bias grows from 15 to 127
    return (Floats)((Words)size | (words & 0x8000) << 16);
#endif
}

// a * b + c, rounded once
#if defined(__FMA__) || defined(__ARM_NEON)
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif
Floats fuse(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The same value, in a register from here on: without it GCC reorders sums until their terms need memory.
template <class V> V keep(V value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

// Rounds a group of x to codes up to `most`; returns the value of code 1.
float round_values(const bfloat16* values, int most, int16_t* codes) {
    uint16_t peak = 0;  // positive floats are ordered like their bits
    for (int k = 0; k < kGroup; ++k) peak = std::max<uint16_t>(peak, values[k] & 0x7FFF);
    const float unit = bits<float>((uint32_t)peak << 16) / most, factor = unit > 0 ? 1.0f / unit : 0.0f;
    for (int k = 0; k < kGroup; ++k) codes[k] = (int16_t)round_product(bits<float>((uint32_t)values[k] << 16), factor);
    return unit;
}

// Each math: `split` makes the parts of four codes of weights, `encode` kWords words of four codes of a row, `add` adds
// their products; with `start`, `finish` has their sum. If it is signed, so are all codes.

// Four codes at once
struct GroupBytes {
    struct Part { Words codes; };
#if defined(__ARM_FEATURE_DOTPROD)
    static constexpr bool kIsSigned = true;
#else
    static constexpr bool kIsSigned = false;
#endif
    template <int bits> static Part split(Words words) {
        if constexpr (bits == 4) return {words & 0x0F0F0F0Fu};
        return {kIsSigned ? words ^ 0x80808080u : words};
    }
#if defined(BATON_DOTS)
    static Ints dot(Ints sum, Words codes, uint32_t x) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#else
        return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_u32(x));
#endif
    }
#endif
};

#if defined(BATON_DOTS)
// times the high and the low part of a row's
struct GroupDots : GroupBytes {
    struct Sums { Ints high, low; };
    static constexpr int kWords = 2;
    static void encode(const int16_t* codes, uint32_t* to) {
        int8_t* const parts = (int8_t*)to;
        for (int k = 0; k < 4; ++k) {
            const int high = (codes[k] + (1 << (kLowBits - 1))) >> kLowBits;
            parts[k] = (int8_t)high, parts[4 + k] = (int8_t)(codes[k] - high * (1 << kLowBits));
        }
    }
    static Sums begin(Ints start) { return {Ints{}, start}; }
    static void add(Sums& sums, Part part, const uint32_t* x) {
        sums.high = dot(sums.high, part.codes, x[0]), sums.low = dot(sums.low, part.codes, x[1]);
    }
    static Ints finish(Sums sums, Ints) { return sums.low + (sums.high << kLowBits); }
};
#endif

#if defined(BATON_DOTS) || defined(__AVX2__)
// 4 bits times a row's 8
struct GroupNarrow : GroupBytes {
    using Sums = Ints;
    static constexpr int kWords = 1;
    static void encode(const int16_t* codes, uint32_t* to) {
        for (int k = 0; k < 4; ++k) ((int8_t*)to)[k] = (int8_t)codes[k];
    }
#if defined(BATON_DOTS)
    static Sums begin(Ints start) { return start; }
    static void add(Sums& sums, Part part, const uint32_t* x) { sums = dot(sums, part.codes, x[0]); }
    static Ints finish(Sums sums, Ints) { return sums; }
#else  // 16 bits hold the sums of a group's pairs: 8 x 2 x 15 x 127 = 30,480
    static Sums begin(Ints) { return Ints{}; }
#if defined(__AVX512BW__)
    static void add(Sums& sums, Part part, const uint32_t* x) {
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)part.codes, _mm512_set1_epi32(x[0]));
        sums = keep((Ints)_mm512_add_epi16((__m512i)sums, pairs));
    }
    static Ints finish(Sums sums, Ints start) {
        return start + (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
    }
#else
    static void add(Sums& sums, Part part, const uint32_t* x) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)part.codes, _mm256_set1_epi32(x[0]));
        sums = keep((Ints)_mm256_add_epi16((__m256i)sums, pairs));
    }
    static Ints finish(Sums sums, Ints start) {
        return start + (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
    }
#endif
#endif
};
#endif

// Codes of 16 bits in pairs: codes 0 and 2, then 1 and 3
struct GroupShorts {
    struct Part { Words even, odd; };
    using Sums = Ints;
    static constexpr bool kIsSigned = false;
    static constexpr int kWords = 2;
    template <int bits> static Part split(Words words) {
        constexpr uint32_t kMask = bits == 4 ? 0x000F000Fu : 0x00FF00FFu;
        return {keep(words & kMask), keep(words >> 8 & kMask)};
    }
    static void encode(const int16_t* codes, uint32_t* to) {
        for (int part = 0; part < 2; ++part)
            to[part] = (uint16_t)codes[part] | (uint32_t)(uint16_t)codes[part + 2] << 16;
    }
    static void add(Sums& sums, Part part, const uint32_t* x) {
        sums = keep(Shorts::add(sums, part.even, x[0]));
        sums = keep(Shorts::add(sums, part.odd, x[1]));
    }
    static Sums begin(Ints start) { return start; }
    static Ints finish(Sums sums, Ints) { return sums; }
};

#if defined(BATON_DOTS)
template <bool is_narrow> using GroupMath = std::conditional_t<is_narrow, GroupNarrow, GroupDots>;
#elif defined(__AVX2__)
template <bool is_narrow> using GroupMath = std::conditional_t<is_narrow, GroupNarrow, GroupShorts>;
#else
template <bool> using GroupMath = GroupShorts;
#endif

// A path of cpu_blocks.h: all rows of a pass are one block, x is [groups][rows][kRowWords].
template <int form> struct Grouped {
    static constexpr bool kIsNarrow = form == kNarrow;
    static constexpr int kForm = form, kBits = form % 2 ? 8 : 4, kTables = kIsNarrow ? kScales : form / 2;
    static constexpr int kMostCode = kIsNarrow ? 127 : 127 << kLowBits;
    static constexpr bool kIsWide = kTables >= kScales32, kHasMinimums = kTables != kScales && kTables != kScales32;
    using Table = std::conditional_t<kIsWide, float, uint16_t>;
    using Group = GroupMath<kIsNarrow>;
    // Added to each code, so that its product needs no more than a scale: a group's sum begins with kShift times the sum
    // of the row's codes.
    static constexpr int kTooSmall = Group::kIsSigned && kBits == 8 ? 128 : 0;
    static constexpr int kShift = kTooSmall - (kHasMinimums ? 0 : 1 << (kBits - 1));
    // A group's sum begins with the bits of kRound, where sums up to 2^22 make it a float, kRound + sum. kRound times a
    // float16 is exact, so fuse(kRound + sum, scale, -kRound * scale) is sum * scale rounded once.
    static constexpr bool kIsFloat = kFuses && !kIsWide && kBits == 4;  // sums up to 15 x 4064 x 32
    static constexpr int kCodeWords = 32 * kBits;  // of both panels
    static constexpr int kTileDepth = kGroup, kBlockWords = kCodeWords + 8 * sizeof(Table) * (kHasMinimums ? 2 : 1);
    // After a row's codes: the value of code 1, the group's sum, what sums begin with.
    static constexpr int kRowParts = 8 * Group::kWords, kRowWords = kRowParts + 3;
    static constexpr int64_t kMaxRows = 64;  // per pass: weights are read rarely enough, and sums stay in L1
    static constexpr bool kFillsBlocks = false;
    static constexpr int kRowsAtOnce = 4;  // and vectors of columns: their sums stay in registers
    static constexpr int kAtOnce = kRegisters == 32 || sizeof(typename Group::Sums) == sizeof(Ints) ? 2 : 1;

    struct Math {
        using Sums = Floats;
        static float encode(const bfloat16* row, int64_t depth, uint32_t* to) {
            for (int64_t k = 0; k < depth; k += kGroup, to += kRowWords) {
                int16_t codes[kGroup];
                const float unit = round_values(row + k, kMostCode, codes);
                int32_t sum = 0;
                for (int i = 0; i < kGroup; ++i) sum += codes[i];
                for (int word = 0; word < 8; ++word) Group::encode(codes + 4 * word, to + Group::kWords * word);
                to[kRowParts] = bits<uint32_t>(unit);
                to[kRowParts + 1] = bits<uint32_t>(unit * sum);
                to[kRowParts + 2] = kShift * sum + (kIsFloat ? bits<uint32_t>(kRound) : 0);
            }
            return 1.0f;
        }
    };
    static int64_t block_rows(int64_t num_rows) { return num_rows; }
    static int64_t chunk_tiles(int64_t) { return INT64_MAX; }
    static const uint32_t* prepare(const uint32_t* w, int64_t, std::vector<uint32_t>&) { return w; }
    static void begin() {}
    static void end() {}
    static void place(const uint32_t* from, uint32_t* block, int64_t tile, int64_t row, int64_t rows, int64_t) {
        std::copy_n(from, kRowWords, block + (tile * rows + row) * kRowWords);
    }
    static void add(int64_t num_rows, bool, const uint32_t* x, const uint32_t* w, int64_t, int64_t num_tiles, int64_t,
                    Floats* sums, const char* next, int64_t lines) {
        for (int64_t tile = 0; tile < num_tiles; ++tile, w += kBlockWords, x += num_rows * kRowWords) {
            for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            for (int v = 0; v < 2 * kVectors; v += kAtOnce) add_rows(num_rows, x, w, v, sums + v);
        }
    }
    static Floats load_minimums(const Table* tables, Floats scale) {
        if constexpr (!kHasMinimums) return -(scale * (float)(1 << (kBits - 1)));
        else return kTables == kZeros ? -(scale * load_floats(tables + 32)) : load_floats(tables + 32);
    }
    // One group's products of rows and kAtOnce vectors of columns from `first` on.
    template <int rows = kRowsAtOnce>
    static void add_rows(int64_t num_rows, const uint32_t* x, const uint32_t* w, int first, Floats* sums) {
        for (; num_rows >= rows; num_rows -= rows, x += rows * kRowWords, sums += rows * 2 * kVectors)
            add_block<rows>(x, w, first, sums);
        if constexpr (rows > 1) add_rows<rows - 1>(num_rows, x, w, first, sums);
    }
    template <int rows> static void add_block(const uint32_t* x, const uint32_t* w, int first, Floats* sums) {
        typename Group::Sums dots[rows][kAtOnce];
        const auto start = [=](int row) { return Ints{} + (int32_t)x[row * kRowWords + kRowParts + 2]; };
#pragma GCC unroll 4
        for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
            for (int i = 0; i < kAtOnce; ++i) dots[row][i] = Group::begin(start(row));
        const uint32_t* const of_vector = w + first / kVectors * (kCodeWords / 2) + first % kVectors * kLanes;
#pragma GCC unroll 8
        for (int word = 0; word < 8; ++word) {
            typename Group::Part parts[kAtOnce];
#pragma GCC unroll 2
            for (int i = 0; i < kAtOnce; ++i) {
                const uint32_t* const at = of_vector + i / kVectors * (kCodeWords / 2) + i % kVectors * kLanes;
                parts[i] = Group::template split<kBits>(load<Words>(at + word % kBits * 16) >> word / kBits * 4);
            }
#pragma GCC unroll 4
            for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
                for (int i = 0; i < kAtOnce; ++i)
                    Group::add(dots[row][i], parts[i], x + row * kRowWords + Group::kWords * word);
        }
#pragma GCC unroll 2
        for (int i = 0; i < kAtOnce; ++i) {
            const Table* const tables = (const Table*)(w + kCodeWords) + (first + i) * kLanes;
            const Floats scale = load_floats(tables), offset = scale * -kRound;
            Floats minimum{};
            if constexpr (kHasMinimums) minimum = load_minimums(tables, scale);
#pragma GCC unroll 4
            for (int row = 0; row < rows; ++row) {
                const uint32_t* const of_group = x + row * kRowWords + kRowParts;
                const Ints dot = Group::finish(dots[row][i], start(row));
                const Floats value = kIsFloat ? fuse((Floats)dot, scale, offset)
                                              : __builtin_convertvector(dot, Floats) * scale;
                Floats& sum = sums[row * 2 * kVectors + i];
                sum = add_products(sum, value, bits<float>(of_group[0]));
                if constexpr (kHasMinimums) sum = add_products(sum, minimum, bits<float>(of_group[1]));
            }
        }
    }
    // Codes of `words` from bit `shift` on, as floats.
    static Floats codes_at(Words words, int shift) {
#ifdef __AVX512F__
        if constexpr (kBits == 4) {  // the instruction looks at 4 bits
            const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            return (Floats)_mm512_permutexvar_ps((__m512i)(words >> shift), values);
        }
#endif
        return __builtin_convertvector((Ints)(words >> shift & ((1 << kBits) - 1)), Floats);
    }
    // Words of two bfloat16 each, low and high.
    static Words pair(Floats low, Floats high) {
#ifdef __AVX512BF16__
        constexpr auto index = [](int i) { return (uint32_t)i | (uint32_t)(i + 16) << 16; };
        const __m512i order =
            _mm512_setr_epi32(index(0), index(1), index(2), index(3), index(4), index(5), index(6), index(7), index(8),
                              index(9), index(10), index(11), index(12), index(13), index(14), index(15));
        return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
        return __builtin_convertvector(narrow(low), Words) | __builtin_convertvector(narrow(high), Words) << 16;
#endif
    }
    // Part v of 2 * kVectors of words k / 2 of 32 columns of one group in bfloat16: of a tile of PackedShape.
    // to: [2 panels][16 words][16 columns]
    static void widen(const uint32_t* w, int v, uint32_t* to) {
        const Table* const tables = (const Table*)(w + kCodeWords) + v * kLanes;
        const Floats scale = load_floats(tables), minimum = load_minimums(tables, scale);
        const auto value = [=](Words words, int shift) {
            if constexpr (kIsWide) return keep(codes_at(words, shift) * scale) + minimum;  // rounded before the sum
            return fuse(codes_at(words, shift), scale, minimum);  // code * scale is exact
        };
        const int panel = v / kVectors, column = v % kVectors * kLanes;
        for (int word = 0; word < 8; ++word, to += 32) {
            const Words words = load<Words>(w + panel * (kCodeWords / 2) + word % kBits * 16 + column);
            uint32_t* const pairs = to + panel * kTileWords + column;
            const int shift = word / kBits * 4;
            store(pairs, pair(value(words, shift), value(words, shift + 8)));
            store(pairs + 16, pair(value(words, shift + 16), value(words, shift + 24)));
        }
    }
    // The value of a column's codes of one group, in float32 like Groups.dense.
    static void take(const uint32_t* w, int64_t column, bfloat16* to) {
        const int lane = column % kLanes;
        const Table* const tables = (const Table*)(w + kCodeWords) + column - lane;
        const Floats scales = load_floats(tables);
        const float scale = scales[lane], minimum = load_minimums(tables, scales)[lane];
        for (int k = 0; k < kGroup; ++k) {
            const int word = k / 4 % kBits;
            const uint32_t codes = w[column / 16 * (kCodeWords / 2) + word * 16 + column % 16];
            const int code = codes >> (8 * (k % 4) + (k / 4 - word)) & ((1 << kBits) - 1);
            const float product = (double)scale * code;  // rounded before the sum
            to[k] = narrow(Floats{} + (product + minimum))[0];
        }
    }
};

#ifdef BATON_AMX
constexpr int64_t kManyRows = 64;  // a prompt's: steps of decode, which drafts must not change, have fewer

// Many rows: each tile of weights is widened to bfloat16 once for all rows of a pass.
template <int form> struct WidenedTiles : StoredTiles<Pairs> {
    static constexpr int kBlockWords = Grouped<form>::kBlockWords;
    static constexpr bool kWidens = true;
    static void widen(const uint32_t* w, int part, uint32_t* to) { Grouped<form>::widen(w, part, to); }
};
#endif

float round_to_float16(float value) {
    const uint32_t size = bits<uint32_t>(value) & 0x7FFFFFFF, sign = bits<uint32_t>(value) & 0x80000000;
    uint32_t rounded = (size + 0xFFF + (size >> 13 & 1)) & ~0x1FFFu;
    if (size < 0x38800000) rounded = bits<uint32_t>(bits<float>(size) + 0.75f - 0.75f);  // multiples of 2^-24
    if (rounded > 0x477FE000) rounded = size > 0x7F800000 ? 0x7FC00000 : 0x7F800000;  // 65,504
    return bits<float>(sign | rounded);
}

// found: the nearest codes -8 to 7 of a group under a scale; returns the sum of squared errors.
double round_group(const float* group, float scale, float* found) {
    const float factor = scale != 0 ? 1 / scale : 0;
    double sums[8] = {};
    for (int first = 0; first < kGroup; first += 8)
        for (int i = 0; i < 8; ++i) {
            const float value = group[first + i], nearest = __builtin_rintf(value * factor);
            const float above = nearest > -8 ? nearest : -8, code = above < 7 ? above : 7, error = code * scale - value;
            found[first + i] = code;
            sums[i] += (double)error * error;
        }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Calls what(Grouped<form>{}).
template <int form = 0, class What> void with_form(int wanted, What what) {
    if (wanted == form) return what(Grouped<form>{});
    if constexpr (form + 1 < kNumForms) with_form<form + 1>(wanted, what);
}

}  // namespace

// Packs codes [num_rows, depth] and the form's tables, [num_rows, depth / 32] each, into every `step`-th panel from
// `first` on.
extern "C" void baton_pack_groups(const uint8_t* codes, const void* scale, const void* second, int64_t num_rows,
                                  int64_t depth, int form, uint32_t* w, int64_t first, int64_t step, int num_threads) {
    const auto pack = [=](auto path) {
        using Path = decltype(path);
        using Table = typename Path::Table;
        const int64_t num_tiles = depth / kGroup;
#pragma omp parallel for schedule(static) num_threads(num_threads)
        for (int64_t row = 0; row < num_rows; ++row) {
            const int64_t panel = first + row / 16 * step, column = panel % 2 * 16 + row % 16;
            for (int64_t tile = 0; tile < num_tiles; ++tile) {
                uint32_t* const to = w + (panel / 2 * num_tiles + tile) * Path::kBlockWords;
                uint32_t words[8];
                std::memcpy(words, codes + row * depth + tile * kGroup, kGroup);
                for (int word = 0; word < Path::kBits; ++word)
                    to[panel % 2 * (Path::kCodeWords / 2) + word * 16 + row % 16] =
                        Path::kBits == 8 ? words[word] : words[word] | words[word + 4] << 4;
                Table* const tables = (Table*)(to + Path::kCodeWords) + column;
                tables[0] = ((const Table*)scale)[row * num_tiles + tile];
                if (Path::kHasMinimums) tables[32] = ((const Table*)second)[row * num_tiles + tile];
            }
        }
    };
    with_form(form, pack);
}

// Unpacks rows to [num_ids, depth] for an embedding.
extern "C" void baton_take_group_rows(const uint32_t* w, int form, int64_t depth, const int64_t* ids, int64_t num_ids,
                                      bfloat16* out, int num_threads) {
    const auto take = [=](auto path) {
        const int64_t num_tiles = depth / kGroup;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_ids > 8)
        for (int64_t i = 0; i < num_ids; ++i)
            for (int64_t tile = 0; tile < num_tiles; ++tile)
                path.take(w + (ids[i] / 32 * num_tiles + tile) * path.kBlockWords, ids[i] % 32,
                          out + i * depth + tile * kGroup);
    };
    with_form(form, take);
}

extern "C" void baton_multiply_groups(const BatonProduct* product) {
    with_form(product->form, [=](auto path) {
#ifdef BATON_AMX
        if (product->math == kTiles && product->num_rows >= kManyRows)
            return multiply_tiles<WidenedTiles<path.kForm>>(*product);
#endif
        multiply<decltype(path)>(*product);
    });
}

// Rounds rows [num_rows, depth] to codes of 4 bits around 8, and scales [num_rows, depth / 32]: per group the scale with
// the least squared error, of those that are `shrinks` of the largest value. Equals groups.round_to_4_bits.
extern "C" void baton_round_groups(const void* rows, int is_float, int64_t num_groups, const float* shrinks,
                                   int num_shrinks, uint8_t* codes, float* scale, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t at = 0; at < num_groups; ++at) {
        float group[kGroup], found[2][kGroup] = {};
        for (int k = 0; k < kGroup; ++k)
            group[k] = is_float ? ((const float*)rows)[at * kGroup + k]
                                : bits<float>((uint32_t)((const bfloat16*)rows)[at * kGroup + k] << 16);
        uint32_t most = 0;  // positive floats are ordered like their bits
        for (int k = 0; k < kGroup; ++k) most = std::max(most, bits<uint32_t>(group[k]) & 0x7FFFFFFF);
        int peak = 0;
        while ((bits<uint32_t>(group[peak]) & 0x7FFFFFFF) != most) ++peak;
        double least = __builtin_inf();
        int best = 0;  // of `found`
        scale[at] = 0;
        for (int i = 0; i < num_shrinks; ++i) {
            const float tried = round_to_float16(group[peak] * shrinks[i]);
            const double error = round_group(group, tried, found[1 - best]);
            if (error < least) least = error, scale[at] = tried, best = 1 - best;
        }
        for (int k = 0; k < kGroup; ++k) codes[at * kGroup + k] = (uint8_t)(found[best][k] + 8);
    }
}
