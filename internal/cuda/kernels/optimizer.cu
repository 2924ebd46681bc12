// sumsq, grad_norm, adamw, sgd, and the parts of muon: nesterov, axpby, normalize.
#include "common.cuh"

// A launch processes many tensors. A table has a row of words for each tensor; the first word is the number of
// the tensor's first block or tile.
typedef const u64 *Row;
DEV double as_double(u64 bits) { return __longlong_as_double((i64)bits); }
// row_of finds the row that a block or tile belongs to.
DEV Row row_of(const u64 *table, i64 tensors, i64 words, i64 at) {
    i64 low = 0, high = tensors;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if ((i64)table[middle * words] <= at) low = middle;
        else high = middle;
    }
    return table + low * words;
}

// Words: first block, blocks, n, x, partial sums, y, weight. Every block sums its elements in f64. sumsq_join adds
// the sums of the blocks, with one block per tensor.
#define SUMSQ_WORDS 7
#define SUMSQ(S, T)                                                \
    KERNEL(sumsq_##S, (const u64 *table, i64 tensors)) {           \
        const Row row = row_of(table, tensors, SUMSQ_WORDS, blockIdx.x); \
        const i64 block = blockIdx.x - (i64)row[0], step = (i64)row[1] * blockDim.x * 8, n = (i64)row[2]; \
        const T *const x = (const T *)row[3];                      \
        double sum = 0;                                            \
        for (i64 i = (block * blockDim.x + threadIdx.x) * 8; i < n; i += step) { \
            float v[8];                                            \
            load_some(x + i, v, n - i);                            \
            UNROLL for (int j = 0; j < 8; j++) sum += (double)v[j] * (double)v[j]; \
        }                                                          \
        sum = block_sum(sum);                                      \
        if (threadIdx.x == 0) ((double *)row[4])[block] = sum;     \
    }
FOR_TYPES(SUMSQ)

KERNEL(sumsq_join, (const u64 *table)) {
    const Row row = table + (i64)blockIdx.x * SUMSQ_WORDS;
    const double *const partial = (const double *)row[4];
    double sum = 0;
    for (i64 i = threadIdx.x; i < (i64)row[1]; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *(float *)row[5] = (float)(as_double(row[6]) * sum);
}

// Every thread adds all sums in index order; only the fetching is divided among the threads. If the norm is not
// finite or exceeds the limit, the factor is -1, so that updates change nothing.
KERNEL(grad_norm, (float *y, const float *sums, const float *limit, i64 n, double max_norm)) {
    SHARED(float, part, 256);
    double sum = 0;
    for (i64 base = 0; base < n; base += blockDim.x) {
        if (base + threadIdx.x < n) part[threadIdx.x] = sums[base + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < (int)blockDim.x && base + i < n; i++) sum += (double)part[i];
        __syncthreads();
    }
    const double norm = sqrt(sum);
    if (threadIdx.x == 0) {
        const float most = limit ? fminf(limit[0], 3.40282346638528859812e+38f) : 3.40282346638528859812e+38f;
        y[0] = (float)norm;
        y[1] = max_norm > 0 && norm > max_norm ? (float)(max_norm / norm) : 1.0f;
        if (!((float)norm <= most)) y[1] = -1.0f;
    }
}

// Every product is rounded separately, as on the cpu device, so that a run may move from one device to the other.
DEV float adamw_element(float w, float *m, float *v, float grad, const float *c) {
    const float g = __fmul_rn(grad, c[0]);
    *m = __fadd_rn(__fmul_rn(c[1], *m), __fmul_rn(c[2], g));
    *v = __fadd_rn(__fmul_rn(c[3], *v), __fmul_rn(__fmul_rn(c[4], g), g));
    const float root = __fsqrt_rn(__fmul_rn(*v, c[5]));
    return __fsub_rn(__fmul_rn(w, c[6]), __fdiv_rn(__fmul_rn(*m, c[7]), __fadd_rn(root, c[8])));
}

// Words: first tile, n, w, m, v, copy, grad, weight decay. A tile is eight elements for each thread.
#define ADAMW_WORDS 8
template <class T>
DEV void adamw_tiles(const u64 *table, i64 tensors, i64 tiles, const float *step, const float *norm, double beta1, double beta2, double eps) {
    const double lr = (double)step[0];
    float c[9] = {norm[1], (float)beta1, (float)(1 - beta1), (float)beta2, (float)(1 - beta2), step[2],
                  0, (float)(lr * (double)step[1]), (float)eps};
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Row row = row_of(table, tensors, ADAMW_WORDS, tile);
        const i64 n = (i64)row[1], i = ((tile - (i64)row[0]) * blockDim.x + threadIdx.x) * 8;
        if (i >= n) continue;
        float *const w = (float *)row[2] + i;
        T *const m = (T *)row[3] + i, *const v = (T *)row[4] + i;
        bf16 *const copy = (bf16 *)row[5];
        c[6] = (float)(1 - __dmul_rn(lr, as_double(row[7])));
        float ws[8], ms[8], vs[8], gs[8];
        load_some(w, ws, n - i);
        if (c[0] < 0) { // the step is skipped
            if (copy) store_some(copy + i, ws, n - i);
            continue;
        }
        load_some(m, ms, n - i);
        load_some(v, vs, n - i);
        load_some((const float *)row[6] + i, gs, n - i);
        UNROLL for (int j = 0; j < 8; j++) ws[j] = adamw_element(ws[j], &ms[j], &vs[j], gs[j], c);
        store_some(w, ws, n - i);
        store_some(m, ms, n - i);
        store_some(v, vs, n - i);
        if (copy) store_some(copy + i, ws, n - i);
    }
}
#define ADAMW(S, T)                                                                                            \
    KERNEL(adamw_##S, (const u64 *table, i64 tensors, i64 tiles, const float *step, const float *norm, double beta1, double beta2, double eps)) { \
        adamw_tiles<T>(table, tensors, tiles, step, norm, beta1, beta2, eps);                                  \
    }
FOR_TYPES(ADAMW)

// sgd: without m the step is the gradient; without norm the factor is 1. If the factor is negative, only the copy is
// written.
#define SGD(S, T, M)                                                                                           \
    KERNEL(sgd_##S, (float *w, M *m, bf16 *copy, const T *grad, const float *step, const float *norm,          \
                     double momentum, double decay, double scale, i64 scaled, i64 n)) {                        \
        const double lr = (double)step[0];                                                                     \
        const bool skipped = norm && norm[1] < 0;                                                              \
        const float factor = norm && !scaled ? norm[1] : 1.0f, rate = (float)__dmul_rn(lr, scale);                        \
        const float keep = (float)(1 - __dmul_rn(lr, decay));                                                  \
        EACH8(i, n) {                                                                                          \
            float ws[8], ms[8], gs[8];                                                                         \
            load_some(w + i, ws, n - i);                                                                       \
            if (skipped) {                                                                                     \
                if (copy) store_some(copy + i, ws, n - i);                                                     \
                continue;                                                                                      \
            }                                                                                                  \
            load_some(grad + i, gs, n - i);                                                                    \
            UNROLL for (int j = 0; j < 8; j++) gs[j] = __fmul_rn(gs[j], factor);                               \
            if (m) {                                                                                           \
                load_some(m + i, ms, n - i);                                                                   \
                UNROLL for (int j = 0; j < 8; j++) gs[j] = __fadd_rn(gs[j], __fmul_rn((float)momentum, ms[j])); \
                store_some(m + i, gs, n - i);                                                                  \
            }                                                                                                  \
            UNROLL for (int j = 0; j < 8; j++) ws[j] = __fsub_rn(__fmul_rn(ws[j], keep), __fmul_rn(gs[j], rate)); \
            store_some(w + i, ws, n - i);                                                                      \
            if (copy) store_some(copy + i, ws, n - i);                                                         \
        }                                                                                                      \
    }
SGD(ff, float, float)
SGD(fb, float, bf16)
SGD(bf, bf16, float)
SGD(bb, bf16, bf16)

#define NESTEROV(S, T, M)                                                                                      \
    KERNEL(nesterov_##S, (T * y, M *m, const float *grad, const float *norm, double momentum, i64 n)) {        \
        EACH8(i, n) {                                                                                          \
            float ms[8], gs[8];                                                                                \
            load_some(m + i, ms, n - i);                                                                       \
            load_some(grad + i, gs, n - i);                                                                    \
            if (norm[1] < 0) {                                                                                 \
                UNROLL for (int j = 0; j < 8; j++) gs[j] = 0;                                                  \
                store_some(y + i, gs, n - i);                                                                  \
                continue;                                                                                      \
            }                                                                                                  \
            UNROLL for (int j = 0; j < 8; j++) {                                                               \
                gs[j] = __fmul_rn(gs[j], norm[1]);                                                             \
                ms[j] = __fadd_rn(__fmul_rn((float)momentum, ms[j]), gs[j]);                                   \
                gs[j] = __fadd_rn(gs[j], __fmul_rn((float)momentum, ms[j]));                                   \
            }                                                                                                  \
            store_some(m + i, ms, n - i);                                                                      \
            store_some(y + i, gs, n - i);                                                                      \
        }                                                                                                      \
    }
NESTEROV(ff, float, float)
NESTEROV(fb, float, bf16)
NESTEROV(bf, bf16, float)
NESTEROV(bb, bf16, bf16)

#define AXPBY(S, Y, A)                                                                                         \
    KERNEL(axpby_##S, (Y * y, const A *a, const Y *b, double alpha, double beta, i64 n)) {                     \
        EACH8(i, n) {                                                                                          \
            float as[8], bs[8];                                                                                \
            load_some(a + i, as, n - i);                                                                       \
            UNROLL for (int j = 0; j < 8; j++) as[j] = __fmul_rn((float)alpha, as[j]);                         \
            if (b) {                                                                                           \
                load_some(b + i, bs, n - i);                                                                   \
                UNROLL for (int j = 0; j < 8; j++) as[j] = __fadd_rn(as[j], __fmul_rn((float)beta, bs[j]));    \
            }                                                                                                  \
            store_some(y + i, as, n - i);                                                                      \
        }                                                                                                      \
    }
AXPBY(ff, float, float)
AXPBY(fb, float, bf16)
AXPBY(bf, bf16, float)
AXPBY(bb, bf16, bf16)

#define NORMALIZE(S, T)                                                                                        \
    KERNEL(normalize_##S, (T * y, const T *x, const float *sum, double eps, i64 n)) {                          \
        const float factor = (float)(1 / (sqrt((double)sum[0]) + eps));                                        \
        EACH8(i, n) {                                                                                          \
            float v[8];                                                                                        \
            load_some(x + i, v, n - i);                                                                        \
            UNROLL for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], factor);                                 \
            store_some(y + i, v, n - i);                                                                       \
        }                                                                                                      \
    }
FOR_TYPES(NORMALIZE)
