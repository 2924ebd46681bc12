// Sums over rows: bias_grad, and the gradients of gamma and beta of the norms. A block handles 256 columns of a chunk
// of rows and leaves partial sums in the workspace. join_columns adds them in the order of the chunks.
#include "common.cuh"

// Partial sums are stored as [chunk][cols], all those of gamma before those of beta.
template <bool BETA, class T, class Term>
DEV void column_sums(float *partial, i64 rows, i64 cols, i64 chunk, Term term) {
    SHARED(float, sums, 8 * 256);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 c = (i64)blockIdx.x * 256 + lane * 8, first = blockIdx.y * chunk, end = min(first + chunk, rows);
    float a[8] = {0, 0, 0, 0, 0, 0, 0, 0}, b[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (c < cols)
        for (i64 r = first + warp; r < end; r += 8) term(r, c, a, b);
    UNROLL for (int half = 0; half <= (int)BETA; half++) {
        UNROLL for (int j = 0; j < 8; j++) sums[warp * 256 + lane * 8 + j] = half ? b[j] : a[j];
        __syncthreads();
        float sum = 0;
        for (int w = 0; w < 8; w++) sum += sums[w * 256 + threadIdx.x];
        const i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
        if (column < cols) partial[((i64)half * gridDim.y + blockIdx.y) * cols + column] = sum;
        __syncthreads();
    }
}

template <class T> struct BiasTerm {
    const T *dy;
    i64 cols;
    METHOD void operator()(i64 r, i64 c, float *a, float *) const {
        float d[8];
        load_some(dy + r * cols + c, d, cols - c);
        UNROLL for (int j = 0; j < 8; j++) a[j] += d[j];
    }
};
template <class T> struct NormTerm {
    const T *dy, *x;
    const float *stats;
    i64 cols, centered;
    METHOD void operator()(i64 r, i64 c, float *a, float *b) const {
        const float mean = centered ? stats[2 * r] : 0.0f, rstd = centered ? stats[2 * r + 1] : stats[r];
        float d[8], v[8];
        load_some(dy + r * cols + c, d, cols - c);
        load_some(x + r * cols + c, v, cols - c);
        UNROLL for (int j = 0; j < 8; j++) a[j] += d[j] * (v[j] - mean) * rstd, b[j] += d[j];
    }
};

#define COLUMNS(S, T)                                                                                    \
    KERNEL(bias_grad_##S, (float *partial, const T *dy, i64 rows, i64 cols, i64 chunk)) {                \
        column_sums<false, T>(partial, rows, cols, chunk, BiasTerm<T>{dy, cols});                        \
    }                                                                                                    \
    KERNEL(layernorm_columns_##S, (float *partial, const T *dy, const T *x, const float *stats, i64 rows, i64 cols, i64 chunk)) { \
        column_sums<true, T>(partial, rows, cols, chunk, NormTerm<T>{dy, x, stats, cols, 1});            \
    }                                                                                                    \
    KERNEL(rmsnorm_columns_##S, (float *partial, const T *dy, const T *x, const float *stats, i64 rows, i64 cols, i64 chunk)) { \
        column_sums<false, T>(partial, rows, cols, chunk, NormTerm<T>{dy, x, stats, cols, 0});           \
    }
FOR_TYPES(COLUMNS)

KERNEL(join_columns, (float *out, const float *partial, i64 chunks, i64 cols, i64 accumulate)) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float sum = accumulate ? out[c] : 0.0f;
    for (i64 i = 0; i < chunks; i++) sum += partial[i * cols + c];
    out[c] = sum;
}
