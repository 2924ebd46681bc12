// activation, glu and their gradients, for each activation function. A thread reads all its inputs before it
// writes its outputs, so an output may overwrite an input in place.
#include "common.cuh"

// SORTED are the parameters of a kernel for rows in the order of experts: n elements, and, if ends is not null, rows of cols
// elements, of which those from the last of ends on are not there. up_to returns how many elements are. If the last of ends is not
// a number of rows, the first element of the result is NaN.
#define SORTED i64 n, const int *ends, i64 experts, i64 cols
template <class T> DEV i64 up_to(T *y, SORTED) {
    if (!ends) return n;
    const i64 last = (i64)ends[experts - 1] * cols;
    if (last >= 0 && last <= n) return last;
    if (blockIdx.x == 0 && threadIdx.x == 0) store(y, __int_as_float(0x7fffffff));
    return 0;
}

// logistic returns 1 / (1 + exp(-x)). For f32 results it is accurate except for the last few bits. For bf16 results
// it uses the special function unit; the relative error is at most (|x| + 4) * 2^-23 for x above -80. For |x| < 100
// this is less than a hundredth of bf16's rounding error of 2^-9.
DEV float logistic(const float *, float x) { return 1.0f / (1.0f + expf(-x)); }
DEV float logistic(const bf16 *, float x) { return reciprocal(1.0f + quick_exp(-x)); }

// gelu_gate returns sigmoid(2u) and sets slope to du/dx, for u = sqrt(2/pi) * (x + 0.044715 x^3). x * sigmoid(2u)
// equals 0.5 * x * (1 + tanh(u)), without the cancellation.
template <class T> DEV float gelu_gate(const T *p, float x, float *slope) {
    const float a = 0.7978845608028654f, b = 0.044715f;
    *slope = a * (1.0f + 3.0f * b * x * x);
    return logistic(p, 2.0f * a * x * (1.0f + b * x * x));
}

// Value is f(x) and its slope f'(x). The functions' pointer argument selects the type of their results.
struct Value {
    float f, slope;
};
template <class T> DEV Value gelu_tanh(const T *p, float x) {
    float slope;
    const float s = gelu_gate(p, x, &slope);
    return {x * s, s + 2.0f * x * s * (1.0f - s) * slope};
}
// scaled_tail returns exp(a^2 / 2) times the upper tail of the normal distribution at a >= 0, which is erfcx(a /
// sqrt(2)) / 2. It is t times a polynomial in t = 1 / (1 + c a), fitted for the smallest relative error: 2^-24 for
// f32 results, 2^-16 for bf16.
DEV float scaled_tail(const float *, float a) {
    const float t = reciprocal(1.0f + 0.35f * a);
    float p = -0.0291460734f * t + 0.143972397f;
    p = p * t - 0.255715668f, p = p * t + 0.159175768f, p = p * t - 0.0231109224f, p = p * t + 0.105508454f;
    p = p * t + 0.119832754f, p = p * t + 0.139861882f, p = p * t + 0.139621407f;
    return p * t;
}
DEV float scaled_tail(const bf16 *, float a) {
    const float t = reciprocal(1.0f + 0.3f * a);
    float p = -0.0770973712f * t + 0.216036931f;
    p = p * t - 0.0169479474f, p = p * t + 0.144196332f, p = p * t + 0.113741934f, p = p * t + 0.120074227f;
    return p * t;
}

// bell returns exp(-x^2 / 2). The f32 version corrects for the rounding of x^2. It limits |x| to 16, where the result
// is already zero, so that x^2 cannot overflow.
DEV float bell(const float *, float x) {
    x = fminf(fabsf(x), 16.0f);
    const float square = x * x, rest = fmaf(x, x, -square), e = expf(-0.5f * square);
    return fmaf(-0.5f * rest, e, e);
}
DEV float bell(const bf16 *, float x) { return power2(x * x * -0.7213475204444817f); }

template <class T> DEV Value gelu(const T *p, float x) {
    const float e = bell(p, x), tail = e * scaled_tail(p, fabsf(x)), below = x < 0.0f ? tail : 1.0f - tail;
    return {x * below, below + x * 0.3989422804014327f * e};
}
template <class T> DEV Value silu(const T *p, float x) {
    const float s = logistic(p, x), y = x * s;
    return {y, s + y * (1.0f - s)};
}
template <class T> DEV Value sigmoid(const T *p, float x) {
    const float s = logistic(p, x);
    return {s, s * (1.0f - s)};
}
template <class T> DEV Value relu2(const T *, float x) {
    const float r = fmaxf(x, 0.0f);
    return {r * r, 2.0f * r};
}

// clamped_silu is gpt-oss's. glu also bounds what it multiplies by, and adds 1.
template <class T> DEV Value clamped_silu(const T *p, float x) {
    const float v = fminf(x, 7.0f), s = logistic(p, 1.702f * v), y = v * s;
    return {y, x > 7.0f ? 0.0f : s + 1.702f * y * (1.0f - s)};
}
#define UP_gelu_tanh(u) Value{u, 1.0f}
#define UP_gelu(u) Value{u, 1.0f}
#define UP_silu(u) Value{u, 1.0f}
#define UP_relu2(u) Value{u, 1.0f}
#define UP_sigmoid(u) Value{u, 1.0f}
#define UP_clamped_silu(u) Value{fminf(fmaxf(u, -7.0f), 7.0f) + 1.0f, fabsf(u) > 7.0f ? 0.0f : 1.0f}

#define ACTIVATION(F, S, T)                                                             \
    KERNEL(activation_##F##_##S, (T * y, const T *x, SORTED)) {                         \
        n = up_to(y, n, ends, experts, cols);                                           \
        EACH8(i, n) {                                                                   \
            float v[8];                                                                 \
            load_some(x + i, v, n - i);                                                 \
            UNROLL for (int j = 0; j < 8; j++) v[j] = F(x, v[j]).f;                     \
            store_some(y + i, v, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(activation_grad_##F##_##S, (T * dx, const T *dy, const T *x, SORTED)) {      \
        n = up_to(dx, n, ends, experts, cols);                                          \
        EACH8(i, n) {                                                                   \
            float v[8], d[8];                                                           \
            load_some(x + i, v, n - i);                                                 \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) v[j] = d[j] * F(x, v[j]).slope;          \
            store_some(dx + i, v, n - i);                                               \
        }                                                                               \
    }                                                                                   \
    KERNEL(glu_##F##_##S, (T * y, const T *gate, const T *up, SORTED)) {                \
        n = up_to(y, n, ends, experts, cols);                                           \
        EACH8(i, n) {                                                                   \
            float g[8], u[8];                                                           \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) g[j] = F(y, g[j]).f * UP_##F(u[j]).f;    \
            store_some(y + i, g, n - i);                                                \
        }                                                                               \
    }                                                                                   \
    KERNEL(glu_grad_##F##_##S, (T * dgate, T * dup, const T *dy, const T *gate, const T *up, SORTED)) { \
        n = up_to(dgate, n, ends, experts, cols);                                       \
        EACH8(i, n) {                                                                   \
            float g[8], u[8], d[8];                                                     \
            load_some(gate + i, g, n - i);                                              \
            load_some(up + i, u, n - i);                                                \
            load_some(dy + i, d, n - i);                                                \
            UNROLL for (int j = 0; j < 8; j++) {                                        \
                const Value v = F(dy, g[j]), w = UP_##F(u[j]);                          \
                g[j] = d[j] * w.f * v.slope;                                            \
                u[j] = d[j] * v.f * w.slope;                                            \
            }                                                                           \
            store_some(dgate + i, g, n - i);                                            \
            store_some(dup + i, u, n - i);                                              \
        }                                                                               \
    }
#define ACTIVATIONS(S, T)        \
    ACTIVATION(gelu_tanh, S, T)  \
    ACTIVATION(gelu, S, T)       \
    ACTIVATION(silu, S, T)       \
    ACTIVATION(relu2, S, T)      \
    ACTIVATION(sigmoid, S, T) \
    ACTIVATION(clamped_silu, S, T)
FOR_TYPES(ACTIVATIONS)
