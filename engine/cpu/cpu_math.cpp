// The ceilings of products: what the CPU multiplies in registers, by which way fastest, and reads from memory.
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
// has_loads: each product's operands come from L1, as in a product of matrices.
double multiply_tiles(int64_t num_rounds, bool is_8bit, bool has_loads) {
    alignas(64) static const char operands[4][1024] = {};
    const uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    configure_tiles(rows, 8);
    for (int64_t round = 0; round < num_rounds; ++round) {
        if (has_loads) {
            TILE_LOAD(4, operands[0], 64);
            TILE_LOAD(5, operands[1], 64);
            TILE_LOAD(6, operands[2], 64);
            TILE_LOAD(7, operands[3], 64);
        }
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

// Operations done by each of `num_threads` at once; 0 where this build has no such math. math: MathKind. has_loads: see
// multiply_tiles; others ignore it.
extern "C" double baton_multiply_registers(int math, int is_8bit, int has_loads, int64_t num_rounds, int num_threads) {
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
        if (math == kTiles) done = multiply_tiles(num_rounds, is_8bit, has_loads);
#endif
    }
    return done;
}

// Reads `num_bytes`, a multiple of 4096 times `num_threads`; returns a sum, so that the compiler keeps the loads.
extern "C" int64_t baton_read(const char* from, int64_t num_bytes, int num_threads) {
    const int64_t share = num_bytes / num_threads;
    int64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) reduction(+ : total)
    for (int thread = 0; thread < num_threads; ++thread) {
        Ints sums[4] = {};
        const char* at = from + thread * share;
        for (const char* const end = at + share; at < end; at += 256) {
            for (int line = 0; line < 4; ++line) __builtin_prefetch(at + 8192 + line * 64, 0, 2);
            for (int i = 0; i < 256; i += (int)sizeof(Ints)) sums[i / 64] += load<Ints>(at + i);
        }
        for (int lane = 0; lane < kLanes; ++lane) total += (sums[0] + sums[1] + sums[2] + sums[3])[lane];
    }
    return total;
}
