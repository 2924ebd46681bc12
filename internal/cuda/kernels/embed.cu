// embed, its gradient, and initial values.
#include "common.cuh"

#define EMBED(S, T)                                                                                         \
    KERNEL(embed_##S, (T * y, const int *tokens, const T *table, i64 vocab, i64 cols, i64 first, double scale)) { \
        const i64 row = blockIdx.x, at = (i64)tokens[row] - first;                                          \
        const bool here = at >= 0 && at < vocab;                                                            \
        ROW8(c, cols) {                                                                                     \
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};                                                          \
            if (here) load_some(table + at * cols + c, v, cols - c);                                        \
            UNROLL for (int j = 0; j < 8; j++) v[j] *= (float)scale;                                        \
            store_some(y + row * cols + c, v, cols - c);                                                    \
        }                                                                                                   \
    }                                                                                                       \
    KERNEL(embed_grad_##S, (float *dtable, const int *tokens, const T *dy, i64 rows, i64 vocab, i64 cols, i64 first, double scale)) { \
        embed_grad(dtable, tokens, dy, rows, vocab, cols, first, (float)scale);                             \
    }

#define LOOKS 8 // tokens that a thread compares between two barriers

// seen reports whether token is among tokens[0 .. end-1]. All threads of the block get the answer.
DEV bool seen(const int *tokens, i64 end, int token) {
    for (i64 i = end; i > 0; i -= LOOKS * blockDim.x) { // backwards: a frequent token tends to be recent
        float found = 0;
        UNROLL for (int k = 0; k < LOOKS; k++) {
            const i64 at = i - 1 - threadIdx.x - k * (i64)blockDim.x;
            if (at >= 0 && tokens[at] == token) found = 1;
        }
        if (block_max(found) > 0.0f) return true;
    }
    return false;
}

// The block of a token's first row adds all rows of that token, in row order; the blocks of its other rows do
// nothing. Each thread handles eight columns.
template <class T>
DEV void embed_grad(float *dtable, const int *tokens, const T *dy, i64 rows, i64 vocab, i64 cols, i64 first, float scale) {
    SHARED(u32, matches, LOOKS * 32);
    const int token = tokens[blockIdx.x], warps = blockDim.x >> 5;
    const i64 at = (i64)token - first, c = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (at < 0 || at >= vocab || seen(tokens, blockIdx.x, token)) return;
    float sum[8], d[8];
    if (c < cols) load_some(dtable + at * cols + c, sum, cols - c);
    for (i64 base = blockIdx.x; base < rows; base += LOOKS * blockDim.x) {
        UNROLL for (int k = 0; k < LOOKS; k++) {
            const i64 i = base + k * (i64)blockDim.x + threadIdx.x;
            const u32 bits = __ballot_sync(ALL, i < rows && tokens[i] == token);
            if ((threadIdx.x & 31) == 0) matches[k * warps + (threadIdx.x >> 5)] = bits;
        }
        __syncthreads();
        for (int w = 0; w < LOOKS * warps; w++)
            for (u32 left = matches[w]; left; left &= left - 1) {
                const i64 row = base + w * 32 + __ffs((int)left) - 1;
                if (c >= cols) continue;
                load_some(dy + row * cols + c, d, cols - c);
                UNROLL for (int j = 0; j < 8; j++) sum[j] += scale * d[j];
            }
        __syncthreads();
    }
    if (c < cols) store_some(dtable + at * cols + c, sum, cols - c);
}
FOR_TYPES(EMBED)

// The generator of initial values: Box-Muller in f64. It draws the same values as the VM's generator, except
// for the last bits of the f64 functions.
DEV double uniform(u64 key, u64 i) { return (double)((draw(key, i) >> 11) + 1) * 0x1p-53; }

#define INIT(S, T)                                                                                               \
    KERNEL(init_normal_##S, (T * w, i64 key, i64 rows, i64 cols, i64 row, i64 col, i64 tensor_rows, i64 tensor_cols, double std)) { \
        const i64 step = (i64)gridDim.x * blockDim.x, n = rows * cols;                                           \
        for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {                             \
            const i64 r = row + i / cols, c = col + i % cols;                                                    \
            double value = 0;                                                                                    \
            if (r < tensor_rows && c < tensor_cols) {                                                            \
                const u64 element = (u64)(r * tensor_cols + c), pair = element & ~1ull;                          \
                const double radius = sqrt(-2 * log(uniform((u64)key, pair))) * std;                             \
                double sine, cosine;                                                                             \
                sincos(2 * 3.14159265358979323846 * uniform((u64)key, pair + 1), &sine, &cosine);                \
                value = radius * (element == pair ? cosine : sine);                                              \
            }                                                                                                    \
            store(w + i, (float)value);                                                                          \
        }                                                                                                        \
    }
FOR_TYPES(INIT)
