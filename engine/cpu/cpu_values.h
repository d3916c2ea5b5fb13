// Vectors as wide as the CPU's registers, and bfloat16.
//
// What the compiler is told to build for (build.py) decides: 16 lanes with AVX-512, 8 with AVX, else 4 (NEON, SSE).
// Wider ones would be split by the compiler, through memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

using bfloat16 = uint16_t;
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class V> V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
template <class To, class From> To bits(From v) { return load<To>(&v); }
template <class V> V load_part(const void* from, int64_t bytes) {  // zeros after `bytes`
    if (bytes >= (int64_t)sizeof(V)) return load<V>(from);
    V v{};
    if (bytes > 0) std::memcpy(&v, from, bytes);
    return v;
}
template <class V> void store_part(void* to, V v, int64_t count) {  // the first `count` values
    if (count >= kLanes) return store(to, v);
    if (count > 0) std::memcpy(to, &v, count * sizeof(v) / kLanes);
}

inline Floats widen(Halves values) { return (Floats)(__builtin_convertvector(values, Words) << 16); }

inline Halves narrow(Floats values) {  // to nearest even; NaN stays NaN
#if defined(__AVX512BF16__)
    return bits<Halves>(_mm512_cvtneps_pbh((__m512)values));
#else
    Words words = (Words)values, rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16;
    rounded = (words & 0x7FFFFFFF) > 0x7F800000 ? Words{} + 0x7FC0 : rounded;
    return __builtin_convertvector(rounded, Halves);
#endif
}

// Transposes [kLanes][kLanes] in place: swaps off-diagonal squares of side `step`, then of half that, and so on.
// Inlined and unrolled, so that rows that are used at once stay in registers.
template <int step, int... i>
inline __attribute__((always_inline)) void transpose(Words* rows, std::integer_sequence<int, i...> lanes) {
#pragma GCC unroll 16
    for (int a = 0; a < kLanes; ++a) {
        if (a & step) continue;
        Words top = rows[a], bottom = rows[a + step];
        rows[a] = __builtin_shufflevector(top, bottom, ((i & step) ? i - step + kLanes : i)...);
        rows[a + step] = __builtin_shufflevector(top, bottom, ((i & step) ? i + kLanes : i + step)...);
    }
    if constexpr (step > 1) transpose<step / 2>(rows, lanes);
}
inline __attribute__((always_inline)) void transpose(Words* rows) {
    transpose<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>{});
}

// One value of all lanes, by halves: lane i with lane i ^ step.
template <int step, int... i> Floats rotate(Floats v, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(v, v, (i ^ step)...);
}
template <int step = kLanes / 2, class Op> float reduce(Floats v, Op op) {
    v = op(v, rotate<step>(v, std::make_integer_sequence<int, kLanes>{}));
    if constexpr (step == 1) return v[0];
    else return reduce<step / 2>(v, op);
}
inline Floats larger(Floats a, Floats b) {  // b if one is NaN
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);  // GCC makes two instructions of the other
#else
    return a > b ? a : b;
#endif
}
inline Floats plus(Floats a, Floats b) { return a + b; }

// sum + w * x, rounded once where the CPU has such an instruction (the compiler contracts it)
inline Floats add_products(Floats sum, Floats w, float x) { return sum + w * x; }

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BATON_PAIRS 1
// sum + both products of each pair of bfloat16: each word of `pairs` times `pair`
inline Floats add_pairs(Floats sum, Words pairs, uint32_t pair) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
#else
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)pairs, (bfloat16x8_t)vdupq_n_u32(pair));
#endif
}
#endif

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

// x * factor as an integer in the low bits. The product is not rounded before, whatever the compiler contracts: codes
// would differ from their twins'.
inline uint32_t round_product(float x, float factor) { return bits<uint32_t>(__builtin_fmaf(x, factor, kRound)); }

// 2^x for -127 <= x <= 126, relative error 2e-7; exactly 0 for -127, whose exponent field is 0 and p exactly 1.
inline Floats exp2_in_range(Floats x) {
    Floats shifted = x + kRound;
    Floats f = x - (shifted - kRound);                 // [-0.5, 0.5]
    Floats p = f * 1.535336188e-4f + 1.339887440e-3f;  // Cephes exp2f
    p = p * f + 9.618437357e-3f;
    p = p * f + 5.550332471e-2f;
    p = p * f + 2.402264791e-1f;
    p = p * f + 6.931472028e-1f;
    p = p * f + 1.0f;
    return bits<Floats>(bits<Words>(p) + (bits<Words>(shifted) << 23));
}

// e^-x, or the nearest of 2^-126 and 2^126
inline Floats exp_of_minus(Floats x) {
    Floats power = x * -1.44269504f;
    power = power < -126.0f ? Floats{} - 126.0f : power;
    power = power > 126.0f ? Floats{} + 126.0f : power;
    return exp2_in_range(power);
}

inline Floats silu(Floats x) { return x / (1.0f + exp_of_minus(x)); }

// Relative error 3e-7: near 0, where the formula loses digits, Cephes tanhf's polynomial.
inline Floats tanh(Floats x) {
    Floats square = x * x;
    Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    return square < 0.390625f ? x + x * square * p : 2.0f / (1.0f + exp_of_minus(x + x)) - 1.0f;
}
