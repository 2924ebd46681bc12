// Sums over ranks that share a GPU or can access each other's memory: y[row,col] is the sum of x[row,col] over n
// ranks, in rank order and in f32, rounded once. y may be part of one x, because an element is read from all ranks
// before it is written.

#include "common.cuh"

template <class T> DEV void sum_ranks(T *y, i64 n, i64 rows, i64 cols, i64 y_stride, i64 x_stride, const T *const *x) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (i64)gridDim.x * blockDim.x) {
        const i64 row = i / cols, col = i % cols;
        float sum = as_float(x[0][row * x_stride + col]);
        UNROLL for (int r = 1; r < 16; r++)
            if (r < n) sum += as_float(x[r][row * x_stride + col]);
        store(y + row * y_stride + col, sum);
    }
}

#define SUM_RANKS(name, T) \
    KERNEL(name, (T * y, i64 n, i64 rows, i64 cols, i64 y_stride, i64 x_stride, const T *x0, const T *x1, const T *x2, \
                  const T *x3, const T *x4, const T *x5, const T *x6, const T *x7, const T *x8, const T *x9, const T *x10, \
                  const T *x11, const T *x12, const T *x13, const T *x14, const T *x15)) { \
        const T *const x[16] = {x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15}; \
        sum_ranks(y, n, rows, cols, y_stride, x_stride, x); \
    }
SUM_RANKS(sum_ranks_f32, float)
SUM_RANKS(sum_ranks_bf16, bf16)
