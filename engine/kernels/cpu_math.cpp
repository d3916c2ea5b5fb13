// What the CPU multiplies in registers, without memory: the ceiling of products, and which way is the fastest.
#include "cpu_amx.h"
#include "cpu_products.h"

namespace {

// Makes the compiler compute the value.
template <class Vector> void keep(Vector& value) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(value));
#else
    asm volatile("" : "+w"(value));
#endif
}

template <class Math> double multiply_registers(int64_t num_rounds) {
    typename Math::Sums sum[kMaxSums] = {};
    Words weights = Words{};
    uint32_t x = 0;
    asm volatile("" : "+r"(x));  // not a constant
    for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kMaxSums; ++i) keep(weights), sum[i] = Math::add(sum[i], weights, x);
#pragma GCC unroll 24
        for (int i = 0; i < kMaxSums; ++i) keep(sum[i]);
    }
    return 2.0 * num_rounds * kMaxSums * kLanes * Math::kPerWord / Math::kParts;
}

#ifdef BATON_SQUARES
template <class Math> double multiply_squares(int64_t num_rounds) {
    typename Math::Sums sum[kMaxSums] = {};
    Words rows = Words{}, columns = Words{};
    for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kMaxSums; ++i) keep(columns), sum[i] = add_squares(sum[i], rows, columns, Math{});
#pragma GCC unroll 24
        for (int i = 0; i < kMaxSums; ++i) keep(sum[i]);
    }
    return 2.0 * num_rounds * kMaxSums * 4 * 2 * Math::kPerWord;
}
#endif

#ifdef BATON_AMX
double multiply_tiles(int64_t num_rounds, bool is_8bit) {
    const uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    configure_tiles(rows, 8);
    for (int64_t round = 0; round < num_rounds; ++round) {
        if (is_8bit) {
            TILE_DOT_U8S8(0, 4, 6);
            TILE_DOT_U8S8(1, 4, 7);
            TILE_DOT_U8S8(2, 5, 6);
            TILE_DOT_U8S8(3, 5, 7);
        } else {
            TILE_DOT_BF16(0, 4, 6);
            TILE_DOT_BF16(1, 4, 7);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
    }
    TILE_RELEASE();
    return 2.0 * num_rounds * 4 * 16 * 16 * (is_8bit ? 64 : 32);
}
#endif

}  // namespace

// Whether this process may use kTiles; requests AMX's from the system, for the whole process.
extern "C" int baton_request_tiles() {
#ifdef BATON_SQUARES
    return 1;
#else
    return request_amx();
#endif
}

// Operations done by each of `num_threads` at once; 0 where this build has no such math. math: MathKind.
extern "C" double baton_multiply_registers(int math, int is_8bit, int64_t num_rounds, int num_threads) {
    double done = 0;
#pragma omp parallel num_threads(num_threads) reduction(max : done)
    {
        if (math == kWidened) done = is_8bit ? multiply_registers<Shorts>(num_rounds) : multiply_registers<Widened>(num_rounds);
#ifdef BATON_PAIRS
        if (math == kPairs && !is_8bit) done = multiply_registers<Pairs>(num_rounds);
#endif
#ifdef BATON_DOTS
        if (math == kPairs && is_8bit) done = multiply_registers<Dots>(num_rounds);
#endif
#ifdef BATON_SQUARES
        if (math == kTiles) done = is_8bit ? multiply_squares<Dots>(num_rounds) : multiply_squares<Pairs>(num_rounds);
#endif
#ifdef BATON_AMX
        if (math == kTiles) done = multiply_tiles(num_rounds, is_8bit);
#endif
    }
    return done;
}
