// Opcodes that work element by element: gelu, swiglu, their gradients, add, cast, fill, position_embed. All of a thread's
// inputs are read before its outputs are written, so that an output may lie in the place of an input.
#include "common.cuh"

// sigmoid is 1 / (1 + exp(-x)): to the last bits for results in f32; for bf16 by the unit for special functions, where the relative
// error is at most (|x| + 4) * 2^-23 for x above -80: for |x| < 100 a hundredth of bf16's own rounding of 2^-9.
DEV float sigmoid(const float *, float x) { return 1.0f / (1.0f + expf(-x)); }
DEV float sigmoid(const bf16 *, float x) { return __fdividef(1.0f, 1.0f + quick_exp(-x)); }

// gelu is x * sigmoid(2u), and the slope du/dx, of u = sqrt(2/pi) * (x + 0.044715 x^3): 0.5 * x * (1 + tanh(u)), without the cancellation.
template <class T> DEV float gelu_gate(const T *p, float x, float *slope) {
    const float a = 0.7978845608028654f, b = 0.044715f;
    *slope = a * (1.0f + 3.0f * b * x * x);
    return sigmoid(p, 2.0f * a * x * (1.0f + b * x * x));
}

#define GELU(S, T)                                                                      \
    KERNEL(gelu_##S, (T * y, const T *x, i64 n)) {                                      \
        EACH8(i, n) {                                                                   \
            float v[8], slope;                                                          \
            load_some(x + i, v, n - i);                                                 \
            UNROLL for (int j = 0; j < 8; j++) v[j] *= gelu_gate(x, v[j], &slope);     \
            store_some(y + i, v, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(gelu_grad_##S, (T * dx, const T *dy, const T *x, i64 n)) {                   \
        EACH8(i, n) {                                                                   \
            float v[8], d[8], slope;                                                    \
            load_some(x + i, v, n - i);                                                 \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) {                                        \
                const float s = gelu_gate(x, v[j], &slope);                             \
                v[j] = d[j] * (s + 2.0f * v[j] * s * (1.0f - s) * slope);               \
            }                                                                           \
            store_some(dx + i, v, n - i);                                               \
        }                                                                               \
    }
FOR_TYPES(GELU)

#define SWIGLU(S, T)                                                                    \
    KERNEL(swiglu_##S, (T * y, const T *gate, const T *up, i64 n)) {                    \
        EACH8(i, n) {                                                                   \
            float g[8], u[8];                                                           \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) g[j] = g[j] * sigmoid(y, g[j]) * u[j];   \
            store_some(y + i, g, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(swiglu_grad_##S, (T * dgate, T * dup, const T *dy, const T *gate, const T *up, i64 n)) { \
        EACH8(i, n) {                                                                   \
            float g[8], u[8], d[8];                                                     \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) {                                        \
                const float s = sigmoid(dy, g[j]), silu = g[j] * s;                     \
                g[j] = d[j] * u[j] * (s + silu * (1.0f - s));                           \
                u[j] = d[j] * silu;                                                     \
            }                                                                           \
            store_some(dgate + i, g, n - i);                                            \
            store_some(dup + i, u, n - i);                                              \
        }                                                                               \
    }
FOR_TYPES(SWIGLU)

// add_bias adds a row of any type to eight elements from element i of a matrix on.
template <class T> DEV void add_bias(float *v, const T *bias, i64 i, i64 cols) {
    i64 c = i % cols;
    UNROLL for (int j = 0; j < 8; j++) {
        v[j] += as_float(bias[c]);
        if (++c == cols) c = 0;
    }
}

template <class Y, class A, class B>
DEV void add(Y *y, const A *a, const B *b, const void *bias, i64 bias_bf16, i64 n, i64 cols) {
    EACH8(i, n) {
        float v[8], w[8];
        load_some(a + i, v, n - i);
        load_some(b + i, w, n - i);
        UNROLL for (int j = 0; j < 8; j++) v[j] += w[j];
        if (bias && bias_bf16) add_bias(v, (const bf16 *)bias, i, cols);
        if (bias && !bias_bf16) add_bias(v, (const float *)bias, i, cols);
        store_some(y + i, v, n - i);
    }
}
#define ADD(S, Y, A, B)                                                                                           \
    KERNEL(add_##S, (Y * y, const A *a, const B *b, const void *bias, i64 bias_bf16, i64 n, i64 cols)) {          \
        add(y, a, b, bias, bias_bf16, n, cols);                                                                   \
    }
ADD(fff, float, float, float)
ADD(ffb, float, float, bf16)
ADD(fbf, float, bf16, float)
ADD(fbb, float, bf16, bf16)
ADD(bff, bf16, float, float)
ADD(bfb, bf16, float, bf16)
ADD(bbf, bf16, bf16, float)
ADD(bbb, bf16, bf16, bf16)

#define CAST(S, Y, X)                                 \
    KERNEL(cast_##S, (Y * y, const X *x, i64 n)) {    \
        EACH8(i, n) {                                 \
            float v[8];                               \
            load_some(x + i, v, n - i);               \
            store_some(y + i, v, n - i);              \
        }                                             \
    }
CAST(ff, float, float)
CAST(fb, float, bf16)
CAST(bf, bf16, float)
CAST(bb, bf16, bf16)

// fill repeats 8 bytes over n: an element of any type, itself repeated to 8 bytes.
KERNEL(fill, (unsigned char *y, i64 n, i64 pattern)) {
    const i64 step = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 words = aligned(y) ? n / 16 : 0;
    Quad q;
    q.x = q.z = (u32)pattern, q.y = q.w = (u32)((u64)pattern >> 32);
    for (i64 i = first; i < words; i += step) ((Quad *)y)[i] = q;
    for (i64 i = words * 16 + first; i < n; i += step) y[i] = (unsigned char)((u64)pattern >> (i % 8 * 8));
}

// position_embed adds the table's row of a token to the batch rows of that token.
#define POSITION(S, T)                                                                          \
    KERNEL(position_embed_##S, (T * y, const T *x, const T *table, i64 n, i64 batch, i64 cols)) { \
        EACH8(i, n) {                                                                           \
            float v[8];                                                                         \
            load_some(x + i, v, n - i);                                                         \
            UNROLL for (int j = 0; j < 8; j++)                                                  \
                if (i + j < n) v[j] += as_float(table[(i + j) / cols / batch * cols + (i + j) % cols]); \
            store_some(y + i, v, n - i);                                                        \
        }                                                                                       \
    }                                                                                           \
    KERNEL(position_embed_grad_##S, (float *dtable, const T *dy, i64 n, i64 batch, i64 cols, i64 accumulate)) { \
        const i64 step = (i64)gridDim.x * blockDim.x;                                           \
        for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {            \
            float sum = accumulate ? dtable[i] : 0.0f;                                          \
            for (i64 b = 0; b < batch; b++) sum += as_float(dy[(i / cols * batch + b) * cols + i % cols]); \
            dtable[i] = sum;                                                                    \
        }                                                                                       \
    }
FOR_TYPES(POSITION)
