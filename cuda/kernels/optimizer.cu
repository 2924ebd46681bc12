// sumsq, grad_norm and adamw.
#include "common.cuh"

// Every block sums its elements in f64; sumsq_join adds the blocks' sums.
#define SUMSQ(S, T)                                                \
    KERNEL(sumsq_##S, (double *partial, const T *x, i64 n)) {      \
        double sum = 0;                                            \
        EACH8(i, n) {                                              \
            float v[8];                                            \
            load_some(x + i, v, n - i);                            \
            UNROLL for (int j = 0; j < 8; j++) sum += (double)v[j] * (double)v[j]; \
        }                                                          \
        sum = block_sum(sum);                                      \
        if (threadIdx.x == 0) partial[blockIdx.x] = sum;           \
    }
FOR_TYPES(SUMSQ)

KERNEL(sumsq_join, (float *y, const double *partial, i64 n, double weight)) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *y = (float)(weight * sum);
}

// In index order: the threads only fetch.
KERNEL(grad_norm, (float *y, const float *sums, i64 n, double max_norm)) {
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
        y[0] = (float)norm;
        y[1] = max_norm > 0 && norm > max_norm ? (float)(max_norm / norm) : 1.0f;
    }
}

// Every product is rounded on its own, as the cpu device does it: one run may go on where the other stopped.
DEV float adamw_element(float w, float *m, float *v, float grad, const float *c) {
    const float g = __fmul_rn(grad, c[0]);
    *m = __fadd_rn(__fmul_rn(c[1], *m), __fmul_rn(c[2], g));
    *v = __fadd_rn(__fmul_rn(c[3], *v), __fmul_rn(__fmul_rn(c[4], g), g));
    const float root = __fsqrt_rn(__fmul_rn(*v, c[5]));
    return __fsub_rn(__fmul_rn(w, c[6]), __fdiv_rn(__fmul_rn(*m, c[7]), __fadd_rn(root, c[8])));
}

KERNEL(adamw, (float *w, float *m, float *v, bf16 *copy, const float *grad, const float *step, const float *norm, i64 n,
               double beta1, double beta2, double eps, double weight_decay)) {
    const double lr = (double)step[0];
    const float c[9] = {norm[1], (float)beta1, (float)(1 - beta1), (float)beta2, (float)(1 - beta2), step[2],
                        (float)(1 - __dmul_rn(lr, weight_decay)), (float)(lr * (double)step[1]), (float)eps};
    EACH8(i, n) {
        float ws[8], ms[8], vs[8], gs[8];
        load_some(w + i, ws, n - i);
        load_some(m + i, ms, n - i);
        load_some(v + i, vs, n - i);
        load_some(grad + i, gs, n - i);
        UNROLL for (int j = 0; j < 8; j++) ws[j] = adamw_element(ws[j], &ms[j], &vs[j], gs[j], c);
        store_some(w + i, ws, n - i);
        store_some(m + i, ms, n - i);
        store_some(v + i, vs, n - i);
        if (copy) store_some(copy + i, ws, n - i);
    }
}
