// AMX tiles: 8 registers of 16 rows x 64 bytes. Requests them from the system and configures them.
//
// With -DBATON_EMULATE_AMX they are plain arrays, so that tests can check the arithmetic on any machine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef BATON_EMULATE_AMX
#define BATON_AMX 1
namespace emulated {
inline thread_local uint8_t tiles[8][16][64];
inline thread_local uint8_t rows_of[8];
inline thread_local uint16_t bytes_of[8];  // of a row

inline void load(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < rows_of[tile]; ++row)
        std::memcpy(tiles[tile][row], (const char*)from + row * stride, bytes_of[tile]);
}
inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < rows_of[tile]; ++row)
        std::memcpy((char*)to + row * stride, tiles[tile][row], bytes_of[tile]);
}
// c[m][n] += sum over k of the products of the values in a[m][k] and b[k][n], 4 bytes each
template <class Sum, class Products> void multiply(int c, int a, int b, Products products) {
    for (int m = 0; m < rows_of[c]; ++m)
        for (int n = 0; n < bytes_of[c] / 4; ++n) {
            Sum sum;
            std::memcpy(&sum, tiles[c][m] + 4 * n, 4);
            for (int k = 0; k < 16; ++k) sum = products(sum, tiles[a][m] + 4 * k, tiles[b][k] + 4 * n);
            std::memcpy(tiles[c][m] + 4 * n, &sum, 4);
        }
}
inline float widen(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    uint32_t word = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}
inline float dot_bf16(float sum, const uint8_t* a, const uint8_t* b) {
    return sum + widen(a) * widen(b) + widen(a + 2) * widen(b + 2);
}
inline int32_t dot_u8s8(int32_t sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += a[i] * (int8_t)b[i];
    return sum;
}
}  // namespace emulated
#define TILE_LOAD(tile, from, stride) emulated::load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated::store(tile, to, stride)
#define TILE_ZERO(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define TILE_DOT_BF16(c, a, b) emulated::multiply<float>(c, a, b, emulated::dot_bf16)
#define TILE_DOT_U8S8(c, a, b) emulated::multiply<int32_t>(c, a, b, emulated::dot_u8s8)
#define TILE_CONFIGURE(config)                                          \
    (std::memcpy(emulated::bytes_of, (const uint8_t*)(config) + 16, 16), \
     std::memcpy(emulated::rows_of, (const uint8_t*)(config) + 48, 8))
#define TILE_RELEASE() ((void)0)
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define BATON_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// Tile numbers are literals, since they are part of the instructions.
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_U8S8(c, a, b) _tile_dpbusd(c, a, b)
#define TILE_CONFIGURE(config) _tile_loadconfig(config)
#define TILE_RELEASE() _tile_release()
#endif

#ifdef BATON_AMX
// Call in each thread before its first tile. Tile i has rows[i] rows of bytes[i], of 64 without `bytes`; tiles from
// `count` on are unused.
inline void configure_tiles(const uint8_t* rows, int count, const uint8_t* bytes = nullptr) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int tile = 0; tile < count; ++tile) {
        config.row_bytes[tile] = bytes ? bytes[tile] : 64;
        config.rows[tile] = rows[tile];
    }
    asm volatile("" ::"r"(&config) : "memory");  // without this, GCC 12 drops the stores above
    TILE_CONFIGURE(&config);
}
#endif

// Whether this process may use AMX tiles.
inline bool request_amx() {
#if defined(BATON_EMULATE_AMX)
    return true;
#elif defined(BATON_AMX)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
