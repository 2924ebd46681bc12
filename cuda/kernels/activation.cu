// activation, glu and their gradients, for each function. All of a thread's inputs are read before its outputs are written, so that an
// output may lie in the place of an input.
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

// A function f and its slope f' at x. The type of the pointer is that of results.
struct Value {
    float f, slope;
};
template <class T> DEV Value gelu_tanh(const T *p, float x) {
    float slope;
    const float s = gelu_gate(p, x, &slope);
    return {x * s, s + 2.0f * x * s * (1.0f - s) * slope};
}
template <class T> DEV Value gelu(const T *, float x) {
    const float p = 0.5f * erfcf(x * -0.7071067811865476f), density = 0.3989422804014327f * expf(-0.5f * x * x);
    return {x * p, p + x * density};
}
template <class T> DEV Value silu(const T *p, float x) {
    const float s = sigmoid(p, x), y = x * s;
    return {y, s + y * (1.0f - s)};
}
template <class T> DEV Value relu2(const T *, float x) {
    const float r = fmaxf(x, 0.0f);
    return {r * r, 2.0f * r};
}

#define ACTIVATION(F, S, T)                                                             \
    KERNEL(activation_##F##_##S, (T * y, const T *x, i64 n)) {                          \
        EACH8(i, n) {                                                                   \
            float v[8];                                                                 \
            load_some(x + i, v, n - i);                                                 \
            UNROLL for (int j = 0; j < 8; j++) v[j] = F(x, v[j]).f;                     \
            store_some(y + i, v, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(activation_grad_##F##_##S, (T * dx, const T *dy, const T *x, i64 n)) {       \
        EACH8(i, n) {                                                                   \
            float v[8], d[8];                                                           \
            load_some(x + i, v, n - i);                                                 \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) v[j] = d[j] * F(x, v[j]).slope;          \
            store_some(dx + i, v, n - i);                                               \
        }                                                                               \
    }                                                                                   \
    KERNEL(glu_##F##_##S, (T * y, const T *gate, const T *up, i64 n)) {                 \
        EACH8(i, n) {                                                                   \
            float g[8], u[8];                                                           \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) g[j] = F(y, g[j]).f * u[j];              \
            store_some(y + i, g, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(glu_grad_##F##_##S, (T * dgate, T * dup, const T *dy, const T *gate, const T *up, i64 n)) { \
        EACH8(i, n) {                                                                   \
            float g[8], u[8], d[8];                                                     \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) {                                        \
                const Value v = F(dy, g[j]);                                            \
                g[j] = d[j] * u[j] * v.slope;                                           \
                u[j] = d[j] * v.f;                                                      \
            }                                                                           \
            store_some(dgate + i, g, n - i);                                            \
            store_some(dup + i, u, n - i);                                              \
        }                                                                               \
    }
#define ACTIVATIONS(S, T)        \
    ACTIVATION(gelu_tanh, S, T)  \
    ACTIVATION(gelu, S, T)       \
    ACTIVATION(silu, S, T)       \
    ACTIVATION(relu2, S, T)
FOR_TYPES(ACTIVATIONS)
