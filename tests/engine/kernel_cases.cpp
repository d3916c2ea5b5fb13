// Runs the CPU kernels on made-up inputs and writes their results, floats, to stdout: the same program for each
// instruction set, so that results of one that only an emulator runs can be compared with those of this machine.
//
// argv[1]: how bfloat16 is multiplied (MathKind).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu_tiles.h"
namespace groups {
#include "cpu_groups.cpp"
}
namespace layers {
#include "cpu_layers.cpp"
}
namespace linear {
#include "cpu_linear.cpp"
}
namespace paged {
#include "cpu_paged.cpp"
}
namespace sampling {
#include "cpu_sampling.cpp"
}

static uint64_t state = 1;
static float draw() {  // -1 to 1
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)(state >> 33) / 1073741824.0f - 1.0f;
}
static bfloat16 round_float(float value) { return (bits<uint32_t>(value) + 0x8000) >> 16; }
static std::vector<float> floats(size_t count, float scale = 1) {
    std::vector<float> values(count);
    for (float& value : values) value = draw() * scale;
    return values;
}
static std::vector<bfloat16> halves(size_t count, float scale = 1) {
    std::vector<bfloat16> values(count);
    for (bfloat16& value : values) value = round_float(draw() * scale);
    return values;
}
static void write(const std::vector<float>& values) { std::fwrite(values.data(), 4, values.size(), stdout); }
static void write(const std::vector<bfloat16>& values) {
    for (bfloat16 half : values) write(std::vector<float>{bits<float>((uint32_t)half << 16)});
}

static void run_products(int math) {
    const int64_t shapes[][2] = {{300, 64}, {67, 200}, {32, 30}};  // N, K
    for (auto [num_columns, depth] : shapes)
        for (int is_8bit = 0; is_8bit < 2; ++is_8bit) {
            const int64_t tile_depth = is_8bit ? 64 : 32, num_blocks = (num_columns + 31) / 32;
            const int64_t num_words = num_blocks * ((depth + tile_depth - 1) / tile_depth) * 512;
            std::vector<uint32_t> memory(num_words + 4096);
            uint32_t* const w = (uint32_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
            std::vector<float> scale(num_blocks * 32), bias = floats(num_blocks * 32);
            std::vector<int32_t> shift(num_blocks * 32);
            const std::vector<bfloat16> weight = halves(num_columns * depth, 0.3f);
            linear::baton_pack(weight.data(), num_columns, depth, w, 0, 1, is_8bit ? scale.data() : nullptr, shift.data(), 1);
            for (int64_t num_rows : {1, 2, 5, 7, 13, 40})
                for (int epilogue : {0, 1, 2}) {
                    if (epilogue == 2 && num_columns % 32) continue;
                    const std::vector<bfloat16> x = halves(num_rows * depth);
                    std::vector<float> out(num_rows * num_columns);
                    BatonProduct product{};
                    product.x = x.data(), product.w = w, product.scale = scale.data(), product.shift = shift.data();
                    product.bias = bias.data(), product.out = out.data();
                    product.num_rows = num_rows, product.num_columns = num_columns, product.depth = depth;
                    product.form = is_8bit, product.epilogue = epilogue, product.math = math, product.num_threads = 2;
                    linear::baton_multiply(&product);
                    const bfloat16* const rounded = (const bfloat16*)out.data();
                    const int64_t count = num_rows * num_columns / (epilogue == 2 ? 2 : 1);
                    if (epilogue == 1) write(out);
                    else write(std::vector<bfloat16>(rounded, rounded + count));
                }
            const int64_t ids[] = {0, num_columns - 1, 17};
            std::vector<bfloat16> taken(3 * depth), plain(num_blocks * 32 * depth);
            linear::baton_take_rows(w, is_8bit ? scale.data() : nullptr, depth, ids, 3, taken.data(), 1);
            write(taken);
            if (is_8bit) continue;
            linear::baton_unpack(w, 0, num_blocks * 2, depth, plain.data(), 1);
            write(plain);
        }
}

// Rows of 3 groups, in all forms. Scales and minimums are float16 numbers.
static void run_groups() {
    const int64_t num_columns = 67, depth = 96, num_tables = num_columns * 3, ids[] = {0, 66, 17};
    for (int form = 0; form < groups::kNumForms; ++form) {
        std::vector<uint32_t> memory(3 * 3 * (256 + 64) + 4096);
        uint32_t* const w = (uint32_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
        std::vector<uint8_t> codes(num_columns * depth);
        for (uint8_t& code : codes) code = (uint8_t)(draw() * 127 + 128) >> (form % 2 ? 0 : 4);
        std::vector<float> scale = floats(num_tables, 0.05f), minimum = floats(num_tables, 0.5f);
        std::vector<uint16_t> halves_of[2];
        for (std::vector<float>* table : {&scale, &minimum})
            for (float& value : *table) {
                value = groups::round_to_float16(value);
                const uint32_t word = bits<uint32_t>(value), size = word & 0x7FFFFFFF;
                const uint32_t half = size < 0x38800000 ? (uint32_t)(bits<float>(size) * 0x1p24f) : (size >> 13) - (112 << 10);
                halves_of[table == &minimum].push_back(word >> 16 & 0x8000 | half);
            }
        const bool is_wide = form != groups::kNarrow && form / 2 >= groups::kScales32;
        groups::baton_pack_groups(codes.data(), is_wide ? (void*)scale.data() : halves_of[0].data(),
                                  is_wide ? (void*)minimum.data() : halves_of[1].data(), num_columns, depth, form, w, 0, 1, 1);
        for (int64_t num_rows : {1, 2, 5, 7, 13, 70}) {
            const std::vector<bfloat16> x = halves(num_rows * depth);
            std::vector<float> out(num_rows * num_columns);
            BatonProduct product{};
            product.x = x.data(), product.w = w, product.out = out.data();
            product.num_rows = num_rows, product.num_columns = num_columns, product.depth = depth;
            product.form = form, product.epilogue = kFloats, product.num_threads = 2;
            groups::baton_multiply_groups(&product);
            write(out);
        }
        std::vector<bfloat16> taken(3 * depth);
        groups::baton_take_group_rows(w, form, depth, ids, 3, taken.data(), 1);
        write(taken);
    }
    std::vector<float> rows = floats(20 * 96), shrinks(16), scale(60);
    std::vector<uint8_t> codes(rows.size());
    for (int i = 0; i < 16; ++i) shrinks[i] = (1 - 0.02f * i) / -8;
    groups::baton_round_groups(rows.data(), 1, 60, shrinks.data(), 16, codes.data(), scale.data(), 2);
    write(scale);
    write(std::vector<float>(codes.begin(), codes.end()));
}

// Two sequences, with 1 and 20 new tokens, of 70 and 45 in all, in pages of 16 tokens; 4 heads over 2 KV heads.
template <class Page> static void run_attention(int math, std::vector<Page> (*make)(size_t, float), int64_t dim) {
    const int32_t cu_seqlens_q[] = {0, 1, 21}, seq_lens[] = {70, 45};
    const int32_t page_table[] = {3, 0, 7, 1, 6, 4, 2, 5, 0, 0}, blocks[] = {0, 0, 1, 0, 1, 8, 1, 16};
    std::vector<int64_t> slots{6 * 16 + 69 % 16};
    for (int position = 25; position < 45; ++position)
        slots.push_back(page_table[5 + position / 16] * 16 + position % 16);
    const int64_t run = 16 * dim;
    std::vector<Page> pool = make(8 * 2 * 2 * run, 1), query = make(21 * 4 * dim, 3), key = make(21 * 2 * dim, 1);
    std::vector<Page> value = make(21 * 2 * dim, 1), out(21 * 4 * dim);
    const float sinks[] = {-1, 0, 1, 8};
    for (auto [window, softcap] : {std::pair<int64_t, float>{1000, 0}, {30, 0}, {30, 3}}) {
        paged::BatonBatch batch{pool.data(), cu_seqlens_q, seq_lens, page_table, slots.data(), blocks, nullptr, 5,
                                21, 4, 8, 4 * run, 2 * run, 0, run, 4, 2, 16, dim, dim, 0.2f, softcap};
        paged::BatonLayer layer{query.data(), key.data(), value.data(), out.data(), 4 * dim, dim, 2 * dim, dim, 2 * dim,
                                dim, 0, window, softcap > 0 ? sinks : nullptr};
        paged::baton_attend(&batch, &layer, sizeof(Page) == 4, math, 2);
        write(out);
        write(pool);
    }
}

static void run_layers() {
    for (int64_t width : {64, 200}) {
        std::vector<bfloat16> rows = halves(9 * width), weight = halves(width), out(9 * width);
        std::vector<float> hidden = floats(9 * width, 1);
        for (float* sum : {(float*)nullptr, hidden.data()}) {
            layers::baton_norm(sum, rows.data(), weight.data(), out.data(), 9, width, 1e-5f, 2);
            write(out);
        }
        write(hidden);
    }
    for (int64_t dim : {64, 24}) {
        std::vector<bfloat16> heads = halves(9 * 3 * dim), cos = halves(9 * dim), sin = halves(9 * dim), norm = halves(3 * dim);
        layers::baton_turn(heads.data(), 3 * dim, cos.data(), sin.data(), norm.data(), 9, 3, dim, 1e-5f, 2);
        write(heads);
    }
}

static void run_sampling() {
    for (int64_t vocabulary : {40, 1000, 9000}) {
        const int64_t num_rows = 24;
        std::vector<float> logits = floats(num_rows * vocabulary, 8);
        std::vector<int64_t> tokens(num_rows), positions(num_rows);
        std::vector<sampling::Params> params(num_rows);
        for (int64_t row = 0; row < num_rows; ++row) {
            sampling::Params& own = params[row];
            own.temperature = row % 4 * 0.5f, own.top_k = row % 3 ? 0 : 5, own.top_p = row % 2 ? 0.9 : 1;
            own.min_p = row % 5 ? 0 : 0.05, own.seed = row * 77, own.repetition_penalty = 1, positions[row] = row;
        }
        sampling::BatonSampling batch{};
        batch.logits = logits.data(), batch.tokens = tokens.data(), batch.num_rows = num_rows, batch.vocabulary = vocabulary;
        batch.least_temperature = 1e-5f, batch.most = 1e30f;
        batch.params = params.data(), batch.positions = positions.data();
        sampling::baton_sample(&batch, 2);
        write(std::vector<float>(tokens.begin(), tokens.end()));
    }
}

int main(int, char** arguments) {
    const int math = std::atoi(arguments[1]);
    run_products(math);
    run_groups();
    for (int64_t dim : {64, 24}) {
        run_attention<bfloat16>(math, halves, dim);
        run_attention<float>(math, floats, dim);
    }
    run_layers();
    run_sampling();
}
