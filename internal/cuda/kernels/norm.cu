// layernorm and rmsnorm, with and without a fused addition, and their gradients. A block handles one row. Gradients
// of gamma and beta are sums over rows, computed in two steps in a fixed order (see columns.cu).
#include "common.cuh"

// A thread keeps its first KEPT groups of eight columns in registers and reads later ones from x again when
// needed. The function `first` produces a group; use(v, c) then reads or changes the groups in column order.
#define KEPT 4
template <class First> DEV void begin_row(float (*kept)[8], i64 cols, First first) {
    UNROLL for (int i = 0; i < KEPT; i++) {
        const i64 c = (threadIdx.x + (i64)i * blockDim.x) * 8;
        if (c < cols) first(kept[i], c);
    }
    for (i64 c = (threadIdx.x + (i64)KEPT * blockDim.x) * 8; c < cols; c += (i64)blockDim.x * 8) {
        float v[8];
        first(v, c);
    }
}
template <class T, class Use> DEV void over_row(float (*kept)[8], const T *x, i64 cols, Use use) {
    UNROLL for (int i = 0; i < KEPT; i++) {
        const i64 c = (threadIdx.x + (i64)i * blockDim.x) * 8;
        if (c < cols) use(kept[i], c);
    }
    for (i64 c = (threadIdx.x + (i64)KEPT * blockDim.x) * 8; c < cols; c += (i64)blockDim.x * 8) {
        float v[8];
        load_some(x + c, v, cols - c);
        use(v, c);
    }
}

// The norms of a row x, whose groups of eight are produced by the function `first`.
template <class T, class First>
DEV void layernorm(T *y, float *stats, const T *x, const T *gamma, const T *beta, i64 cols, float eps, float offset, First first) {
    float kept[KEPT][8], sum = 0, squares = 0;
    begin_row(kept, cols, [&](float *v, i64 c) {
        first(v, c);
        UNROLL for (int j = 0; j < 8; j++) sum += v[j];
    });
    const float mean = block_sum(sum) / (float)cols;
    over_row(kept, x, cols, [&](const float *v, i64 c) {
        UNROLL for (int j = 0; j < 8; j++)
            if (c + j < cols) squares += (v[j] - mean) * (v[j] - mean);
    });
    const float rstd = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
    over_row(kept, x, cols, [&](float *v, i64 c) {
        float g[8], b[8];
        load_some(gamma + c, g, cols - c);
        load_some(beta + c, b, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * rstd * (offset + g[j]) + b[j];
        store_some(y + c, v, cols - c);
    });
    if (threadIdx.x == 0) stats[0] = mean, stats[1] = rstd;
}

template <class T, class First>
DEV void rmsnorm(T *y, float *stats, const T *x, const T *gamma, i64 cols, float eps, float offset, First first) {
    float kept[KEPT][8], squares = 0;
    begin_row(kept, cols, [&](float *v, i64 c) {
        first(v, c);
        UNROLL for (int j = 0; j < 8; j++) squares += v[j] * v[j];
    });
    const float rstd = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
    over_row(kept, x, cols, [&](float *v, i64 c) {
        float g[8];
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = v[j] * rstd * (offset + g[j]);
        store_some(y + c, v, cols - c);
    });
    if (threadIdx.x == 0) stats[0] = rstd;
}

// add_eight stores eight elements of a + b + bias and returns them in v as stored.
template <class T>
DEV void add_eight(float *v, T *y, const T *a, const T *b, const void *bias, i64 bias_bf16, i64 c, i64 cols) {
    float w[8];
    load_some(a + c, v, cols - c);
    load_some(b + c, w, cols - c);
    UNROLL for (int j = 0; j < 8; j++) v[j] += w[j];
    if (bias) {
        if (bias_bf16) load_some((const bf16 *)bias + c, w, cols - c);
        else load_some((const float *)bias + c, w, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] += w[j];
    }
    UNROLL for (int j = 0; j < 8; j++) v[j] = rounded(y, v[j]);
    store_some(y + c, v, cols - c);
}

// With n = (x - mean) * rstd and g = dy * (offset + gamma): dx = rstd * (g - average(g) - n * average(g n)) +
// residual. The term average(g) is present only if the mean was subtracted.
template <bool CENTERED, class T>
DEV void norm_grad(T *dx, const T *dy, const T *x, float mean, float rstd, const T *gamma, const T *residual, i64 cols, float offset) {
    float v[8], d[8], g[8], sum = 0, along = 0;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(dy + c, d, cols - c);
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) g[j] += offset, sum += d[j] * g[j], along += d[j] * g[j] * (v[j] - mean) * rstd;
    }
    sum = CENTERED ? block_sum(sum) / (float)cols : 0.0f;
    along = block_sum(along) / (float)cols;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(dy + c, d, cols - c);
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = rstd * (d[j] * (offset + g[j]) - sum - (v[j] - mean) * rstd * along);
        if (residual) {
            load_some(residual + c, d, cols - c);
            UNROLL for (int j = 0; j < 8; j++) v[j] += d[j];
        }
        store_some(dx + c, v, cols - c);
    }
}
#define NORMS(S, T)                                                                                       \
    KERNEL(layernorm_##S, (T * y, float *stats, const T *x, const T *gamma, const T *beta, i64 cols, double eps, double offset)) { \
        const T *const from = x + blockIdx.x * cols;                                                      \
        layernorm(y + blockIdx.x * cols, stats + 2 * (i64)blockIdx.x, from, gamma, beta, cols, (float)eps, (float)offset, \
                  [&](float *v, i64 c) { load_some(from + c, v, cols - c); });                            \
    }                                                                                                     \
    KERNEL(rmsnorm_##S, (T * y, float *stats, const T *x, const T *gamma, i64 cols, double eps, double offset)) {        \
        const T *const from = x + blockIdx.x * cols;                                                      \
        rmsnorm(y + blockIdx.x * cols, stats + blockIdx.x, from, gamma, cols, (float)eps, (float)offset,                 \
                [&](float *v, i64 c) { load_some(from + c, v, cols - c); });                              \
    }                                                                                                     \
    KERNEL(add_layernorm_##S, (T * sum, const T *a, const T *b, const void *bias, i64 bias_bf16, T *y, float *stats, \
                               const T *gamma, const T *beta, i64 cols, double eps, double offset)) {                    \
        const i64 at = blockIdx.x * cols;                                                                 \
        layernorm(y + at, stats + 2 * (i64)blockIdx.x, sum + at, gamma, beta, cols, (float)eps, (float)offset,           \
                  [&](float *v, i64 c) { add_eight(v, sum + at, a + at, b + at, bias, bias_bf16, c, cols); }); \
    }                                                                                                     \
    KERNEL(add_rmsnorm_##S, (T * sum, const T *a, const T *b, const void *bias, i64 bias_bf16, T *y, float *stats, \
                             const T *gamma, i64 cols, double eps, double offset)) {                                     \
        const i64 at = blockIdx.x * cols;                                                                 \
        rmsnorm(y + at, stats + blockIdx.x, sum + at, gamma, cols, (float)eps, (float)offset,                            \
                [&](float *v, i64 c) { add_eight(v, sum + at, a + at, b + at, bias, bias_bf16, c, cols); }); \
    }                                                                                                     \
    KERNEL(layernorm_grad_##S, (T * dx, const T *dy, const T *x, const float *stats, const T *gamma, const T *residual, i64 cols, double offset)) { \
        const i64 at = blockIdx.x * cols;                                                                 \
        const float mean = stats[2 * (i64)blockIdx.x], rstd = stats[2 * (i64)blockIdx.x + 1];             \
        norm_grad<true>(dx + at, dy + at, x + at, mean, rstd, gamma, residual ? residual + at : 0, cols, (float)offset); \
    }                                                                                                     \
    KERNEL(rmsnorm_grad_##S, (T * dx, const T *dy, const T *x, const float *stats, const T *gamma, const T *residual, i64 cols, double offset)) { \
        const i64 at = blockIdx.x * cols;                                                                 \
        norm_grad<false>(dx + at, dy + at, x + at, 0.0f, stats[blockIdx.x], gamma, residual ? residual + at : 0, cols, (float)offset); \
    }
FOR_TYPES(NORMS)
