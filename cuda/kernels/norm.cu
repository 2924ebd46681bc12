// layernorm, rmsnorm and their gradients. A block has a row; gradients of gamma and beta are sums over rows, made in two
// steps in a fixed order (see columns.cu). A row is read again from cache where it is needed again.
#include "common.cuh"

#define LAYERNORM(S, T)                                                                                   \
    KERNEL(layernorm_##S, (T * y, float *stats, const T *x, const T *gamma, const T *beta, i64 cols, double eps)) { \
        layernorm(y + blockIdx.x * cols, stats + 2 * (i64)blockIdx.x, x + blockIdx.x * cols, gamma, beta, cols, (float)eps); \
    }                                                                                                     \
    KERNEL(layernorm_grad_##S, (T * dx, const T *dy, const T *x, const float *stats, const T *gamma, const T *residual, i64 cols)) { \
        const i64 at = blockIdx.x * cols;                                                                 \
        const float mean = stats[2 * (i64)blockIdx.x], rstd = stats[2 * (i64)blockIdx.x + 1];             \
        norm_grad<true>(dx + at, dy + at, x + at, mean, rstd, gamma, residual ? residual + at : 0, cols); \
    }                                                                                                     \
    KERNEL(rmsnorm_##S, (T * y, float *stats, const T *x, const T *gamma, i64 cols, double eps)) {        \
        rmsnorm(y + blockIdx.x * cols, stats + blockIdx.x, x + blockIdx.x * cols, gamma, cols, (float)eps); \
    }                                                                                                     \
    KERNEL(rmsnorm_grad_##S, (T * dx, const T *dy, const T *x, const float *stats, const T *gamma, const T *residual, i64 cols)) { \
        const i64 at = blockIdx.x * cols;                                                                 \
        norm_grad<false>(dx + at, dy + at, x + at, 0.0f, stats[blockIdx.x], gamma, residual ? residual + at : 0, cols); \
    }

template <class T>
DEV void layernorm(T *y, float *stats, const T *x, const T *gamma, const T *beta, i64 cols, float eps) {
    float v[8], g[8], b[8], sum = 0, squares = 0;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        UNROLL for (int j = 0; j < 8; j++) sum += v[j];
    }
    const float mean = block_sum(sum) / (float)cols;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        UNROLL for (int j = 0; j < 8; j++)
            if (c + j < cols) squares += (v[j] - mean) * (v[j] - mean);
    }
    const float rstd = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(gamma + c, g, cols - c);
        load_some(beta + c, b, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * rstd * g[j] + b[j];
        store_some(y + c, v, cols - c);
    }
    if (threadIdx.x == 0) stats[0] = mean, stats[1] = rstd;
}

template <class T> DEV void rmsnorm(T *y, float *stats, const T *x, const T *gamma, i64 cols, float eps) {
    float v[8], g[8], squares = 0;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        UNROLL for (int j = 0; j < 8; j++) squares += v[j] * v[j];
    }
    const float rstd = 1.0f / sqrtf(block_sum(squares) / (float)cols + eps);
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = v[j] * rstd * g[j];
        store_some(y + c, v, cols - c);
    }
    if (threadIdx.x == 0) stats[0] = rstd;
}

// With n = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - average(g) - n * average(g n)) + residual. The first
// average is there where the mean was subtracted.
template <bool CENTERED, class T>
DEV void norm_grad(T *dx, const T *dy, const T *x, float mean, float rstd, const T *gamma, const T *residual, i64 cols) {
    float v[8], d[8], g[8], sum = 0, along = 0;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(dy + c, d, cols - c);
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) sum += d[j] * g[j], along += d[j] * g[j] * (v[j] - mean) * rstd;
    }
    sum = CENTERED ? block_sum(sum) / (float)cols : 0.0f;
    along = block_sum(along) / (float)cols;
    ROW8(c, cols) {
        load_some(x + c, v, cols - c);
        load_some(dy + c, d, cols - c);
        load_some(gamma + c, g, cols - c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = rstd * (d[j] * g[j] - sum - (v[j] - mean) * rstd * along);
        if (residual) {
            load_some(residual + c, d, cols - c);
            UNROLL for (int j = 0; j < 8; j++) v[j] += d[j];
        }
        store_some(dx + c, v, cols - c);
    }
}
FOR_TYPES(LAYERNORM)
