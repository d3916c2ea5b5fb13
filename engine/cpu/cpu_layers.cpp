// A decoder's elementwise work on bfloat16 rows: norms, and the norm and rotation of queries and keys.
//
// Sums are float32. Python has checked all pointers. Throws nothing.
#include <cmath>

#include "cpu_values.h"

namespace {

constexpr int64_t kRowsAThread = 4;  // fewer do not justify waking a thread

Floats load_some(const bfloat16* from, int64_t count) {
    return widen(load_part<Halves>(from, count * 2));
}
float inverse_rms(Floats squares, int64_t width, float eps) { return 1.0f / std::sqrt(reduce(squares, plus) / width + eps); }

}  // namespace

// hidden, rows, out: [num_rows, width]. hidden, unless null, += rows; out = norm(hidden, or rows) * weight [width].
extern "C" void baton_norm(float* hidden, const bfloat16* rows, const bfloat16* weight, bfloat16* out, int64_t num_rows,
                           int64_t width, float eps, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows >= 2 * kRowsAThread)
    for (int64_t row = 0; row < num_rows; ++row) {
        float* const sum = hidden ? hidden + row * width : nullptr;
        Floats squares{};
        for (int64_t i = 0; i < width; i += kLanes) {
            Floats values = load_some(rows + row * width + i, width - i);
            if (sum) {
                values += load_part<Floats>(sum + i, (width - i) * 4);
                store_part(sum + i, values, width - i);
            }
            squares += values * values;
        }
        const float factor = inverse_rms(squares, width, eps);
        for (int64_t i = 0; i < width; i += kLanes) {
            const Floats values = sum ? load_part<Floats>(sum + i, (width - i) * 4)
                                      : load_some(rows + row * width + i, width - i);
            store_part(out + row * width + i, narrow(values * factor * load_some(weight + i, width - i)), width - i);
        }
    }
}

// heads: [num_tokens, num_heads, dim], contiguous heads, tokens `stride` elements apart; changed in place.
// norm: [num_heads, dim] or null, an RMSNorm over each head. Then pairs (i, i + dim / 2) rotate by cos and signed_sin,
// [num_tokens, dim], whose first half is negated.
extern "C" void baton_turn(bfloat16* heads, int64_t stride, const bfloat16* cos, const bfloat16* signed_sin,
                           const bfloat16* norm, int64_t num_tokens, int64_t num_heads, int64_t dim, float eps,
                           int num_threads) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_tokens >= 2 * kRowsAThread)
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t head = 0; head < num_heads; ++head) {
            bfloat16* const at = heads + token * stride + head * dim;
            float factor = 1.0f;
            if (norm) {
                Floats squares{};
                for (int64_t i = 0; i < dim; i += kLanes) {
                    const Floats values = load_some(at + i, dim - i);
                    squares += values * values;
                }
                factor = inverse_rms(squares, dim, eps);
            }
            const bfloat16* const weight = norm ? norm + head * dim : nullptr;
            for (int64_t i = 0; i < half; i += kLanes) {
                const int64_t left = half - i;
                Floats low = load_some(at + i, left), high = load_some(at + half + i, left);
                if (weight) {
                    low = low * factor * load_some(weight + i, left);
                    high = high * factor * load_some(weight + half + i, left);
                }
                const bfloat16 *c = cos + token * dim + i, *s = signed_sin + token * dim + i;
                store_part(at + i, narrow(low * load_some(c, left) + high * load_some(s, left)), left);
                store_part(at + half + i, narrow(high * load_some(c + half, left) + low * load_some(s + half, left)), left);
            }
        }
}
