// rope. A block handles one token and computes its angles once for all heads and all sequences of the batch. With
// positions in documents, a block handles one token of one sequence. The host passes the rate of each pair in turns
// per token. The fractional part of an angle in turns is then exact to 2^-52 times the position, so the sines do not
// need f64.
#include "common.cuh"

#define MAX_PAIRS 512

template <class Y, class X>
DEV void rope(Y *y, const X *x, const int *positions, i64 heads, i64 head_dim, i64 batch, i64 position, const double *rates, i64 inverse, i64 chunks, i64 member,
              i64 half, float scale, float rest, float beta, i64 period) {
    SHARED(float, cosines, MAX_PAIRS);
    SHARED(float, sines, MAX_PAIRS);
    const i64 token = blockIdx.x, chunk = gridDim.x / 2;
    const i64 shift = !chunks ? 0 : token < chunk ? member * chunk : (chunks - 2 - member) * chunk;
    const i64 place = positions ? (i64)positions[(shift + token) * batch + blockIdx.y] : position + shift + token;
    if (beta != 0) {
        const float growth = 1 + beta * logf(1 + (float)(place / period));
        scale *= growth;
        rest *= growth;
    }
    const i64 first = (token * batch + blockIdx.y) * heads, all = (positions ? 1 : batch) * heads; // rows of heads
    for (i64 i = threadIdx.x; i < half; i += blockDim.x) {
        const double turns = (double)place * rates[i];
        float s, c;
        sincospif(2.0f * (float)(turns - rint(turns)), &s, &c);
        cosines[i] = scale * c;
        sines[i] = scale * (inverse ? -s : s);
    }
    __syncthreads();
    const i64 eights = (half + 7) / 8;
    for (i64 p = threadIdx.x; p < all * eights; p += blockDim.x) {
        const i64 i = p % eights * 8, at = (first + p / eights) * head_dim + i, left = half - i;
        float a[8], b[8], turned[8];
        load_some(x + at, a, left);
        load_some(x + at + half, b, left);
        UNROLL for (int j = 0; j < 8; j++)
            if (j < left) {
                const float c = cosines[i + j], s = sines[i + j];
                turned[j] = a[j] * c - b[j] * s;
                b[j] = b[j] * c + a[j] * s;
            }
        store_some(y + at, turned, left);
        store_some(y + at + half, b, left);
    }
    const i64 others = head_dim - 2 * half; // not rotated
    for (i64 p = threadIdx.x; p < all * others; p += blockDim.x) {
        const i64 at = (first + p / others) * head_dim + 2 * half + p % others;
        store(y + at, rest * as_float(x[at]));
    }
}

#define ROPE(S, Y, X)                                                                                               \
    KERNEL(rope_##S, (Y * y, const X *x, const int *positions, i64 heads, i64 head_dim, i64 batch, i64 position, \
                      const double *rates, i64 inverse, i64 chunks, i64 member, i64 pairs, double scale, double rest, double beta, i64 period)) { \
        rope(y, x, positions, heads, head_dim, batch, position, rates, inverse, chunks, member, pairs, (float)scale, (float)rest, (float)beta, period); \
    }
ROPE(ff, float, float)
ROPE(fb, float, bf16)
ROPE(bf, bf16, float)
ROPE(bb, bf16, bf16)
