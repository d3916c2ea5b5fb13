// The arithmetic of products by instruction set: how a word of weights is read, and what it is multiplied with.
//
// A word of 4 bytes holds 2 bfloat16 or 4 codes of a column. CPUs that multiply words as they are have one part a word;
// others unpack a word into two parts, of one float or two 16-bit codes, and a row's words in the same way. Sums run
// along K in one order whatever the number of rows. Sums of codes are exact.
#pragma once
#include "cpu_values.h"

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__ARM_FEATURE_DOTPROD)
#define BATON_DOTS 1
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define BATON_SQUARES 1
#endif

constexpr int kMaxSums = kRegisters == 32 ? 24 : 12;  // in registers: leaves some for operands, hides a sum's latency

// How bfloat16 is multiplied; Math of cpu_math.py. kTiles: AMX, or Arm's products of 2 rows and 2 columns.
enum MathKind { kWidened, kPairs, kTiles };

// Rounds a row to codes of -127 to 127; returns the value of code 1.
inline float round_row(const bfloat16* row, int64_t depth, int8_t* codes) {
    uint16_t peak = 0;  // positive floats are ordered like their bits
    for (int64_t k = 0; k < depth; ++k) peak = std::max<uint16_t>(peak, row[k] & 0x7FFF);
    const float unit = bits<float>((uint32_t)peak << 16) / 127.0f, factor = unit > 0 ? 1.0f / unit : 0.0f;
    for (int64_t k = 0; k < depth; ++k) codes[k] = (int8_t)round_product(bits<float>((uint32_t)row[k] << 16), factor);
    return unit;
}

// Each math: `encode` writes a row's words, kParts for each word of weights, and returns the value of 1 in that format;
// `part` is one of a word's parts.

// bfloat16, multiplied in pairs
struct Pairs {
    using Sums = Floats;
    static constexpr int kPerWord = 2, kParts = 1;
    static float encode(const bfloat16* row, int64_t depth, uint32_t* to) {
        std::memcpy(to, row, depth * 2);
        return 1.0f;
    }
#ifdef BATON_PAIRS
    static Words part(Words w, int) { return w; }
    static Sums add(Sums sum, Words w, uint32_t x) { return add_pairs(sum, w, x); }
#endif
};

// bfloat16, multiplied as floats
struct Widened {
    using Sums = Floats;
    static constexpr int kPerWord = 2, kParts = 2;
    static float encode(const bfloat16* row, int64_t depth, uint32_t* to) {
        for (int64_t k = 0; k < depth; ++k) to[k] = (uint32_t)row[k] << 16;
        return 1.0f;
    }
    static Words part(Words w, int which) { return which ? w & 0xFFFF0000u : w << 16; }
    static Sums add(Sums sum, Words w, uint32_t x) { return add_products(sum, (Floats)w, bits<float>(x)); }
};

// 8 bits, four codes at once. On x86 a row's codes are unsigned: code + 128.
struct Dots {
    using Sums = Ints;
    static constexpr int kPerWord = 4, kParts = 1;
#ifdef __x86_64__
    static constexpr int kOffset = 128;
#else
    static constexpr int kOffset = 0;
#endif
    static float encode(const bfloat16* row, int64_t depth, uint32_t* to) {
        uint8_t* const codes = (uint8_t*)to;
        const float unit = round_row(row, depth, (int8_t*)codes);
        for (int64_t k = 0; k < depth; ++k) codes[k] += kOffset;
        return unit;
    }
#ifdef BATON_DOTS
    static Words part(Words w, int) { return w; }
    static Sums add(Sums sum, Words w, uint32_t x) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVXVNNI__)
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x), (__m256i)w);
#else
        return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)vdupq_n_u32(x));
#endif
    }
#endif
};

// 8 bits, widened to 16 and multiplied in pairs: part 0 has codes 0 and 2 of a word, part 1 codes 1 and 3
struct Shorts {
    using Sums = Ints;
    static constexpr int kPerWord = 4, kParts = 2, kOffset = 0;
    static float encode(const bfloat16* row, int64_t depth, uint32_t* to) {
        int8_t* const codes = (int8_t*)(to + (depth + 3) / 4);  // the second half of the words, read before it is written
        const float unit = round_row(row, depth, codes);
        for (int64_t k = depth; k % 4; ++k) codes[k] = 0;
        for (int64_t word = 0; word < (depth + 3) / 4; ++word) {
            const uint32_t four = load<uint32_t>(codes + word * 4);
            const auto code = [=](int i) { return (uint32_t)(uint16_t)(int8_t)(four >> 8 * i); };
            to[2 * word] = code(0) | code(2) << 16, to[2 * word + 1] = code(1) | code(3) << 16;
        }
        return unit;
    }
    typedef int16_t Codes __attribute__((vector_size(sizeof(Words))));
    static Words part(Words w, int which) { return (Words)((which ? (Codes)w : (Codes)w << 8) >> 8); }
    static Sums add(Sums sum, Words w, uint32_t x) {
#if defined(__AVX512BW__)
        return sum + (Ints)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
        return sum + (Ints)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
        return sum + ((Ints)(w << 16) >> 16) * ((int32_t)(x << 16) >> 16) + ((Ints)w >> 16) * ((int32_t)x >> 16);
#endif
    }
};

#ifdef BATON_SQUARES
// sum[2 rows][2 columns] + the products of two words of each row and of each column
inline Floats add_squares(Floats sum, Words rows, Words columns, Pairs) {
    return (Floats)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
}
inline Ints add_squares(Ints sum, Words rows, Words columns, Dots) {
    return (Ints)vmmlaq_s32((int32x4_t)sum, (int8x16_t)rows, (int8x16_t)columns);
}
#endif
