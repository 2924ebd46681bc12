// rope. A block has a token: its angles are computed once, in f64, for all heads and all sequences of the batch.
#include "common.cuh"

#define MAX_PAIRS 512

template <class Y, class X>
DEV void rope(Y *y, const X *x, i64 heads, i64 head_dim, i64 batch, i64 position, double theta, i64 inverse) {
    SHARED(float, cosines, MAX_PAIRS);
    SHARED(float, sines, MAX_PAIRS);
    const i64 half = head_dim / 2, token = blockIdx.x;
    for (i64 i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;
        sincos((double)(position + token) * pow(theta, -2.0 * (double)i / (double)head_dim), &s, &c);
        cosines[i] = (float)c;
        sines[i] = inverse ? -(float)s : (float)s;
    }
    __syncthreads();
    for (i64 p = threadIdx.x; p < batch * heads * half; p += blockDim.x) {
        const i64 i = p % half, at = (token * batch * heads + p / half) * head_dim + i;
        const float a = as_float(x[at]), b = as_float(x[at + half]), c = cosines[i], s = sines[i];
        store(y + at, a * c - b * s);
        store(y + at + half, b * c + a * s);
    }
}

#define ROPE(S, Y, X)                                                                                               \
    KERNEL(rope_##S, (Y * y, const X *x, i64 heads, i64 head_dim, i64 batch, i64 position, double theta, i64 inverse)) { \
        rope(y, x, heads, head_dim, batch, position, theta, inverse);                                               \
    }
ROPE(ff, float, float)
ROPE(fb, float, bf16)
ROPE(bf, bf16, float)
ROPE(bb, bf16, bf16)
