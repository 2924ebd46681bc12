// Opcodes that work element by element: add, cast, concat_heads, dropout, fill, position_embed. A thread reads all its inputs before it
// writes its outputs, so an output may overwrite an input in place.
#include "common.cuh"

// add_bias adds the bias, a row of any element type, to eight elements of a matrix, starting at element i.
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
        EACH8(i, n) {                                                                           \
            float v[8];                                                                         \
            load_some(x + i, v, n - i);                                                         \
            store_some(y + i, v, n - i);                                                        \
        }                                                                                       \
    }
CAST(ff, float, float)
CAST(fb, float, bf16)
CAST(bf, bf16, float)
CAST(bb, bf16, bf16)

// fill repeats an 8-byte pattern over n bytes; the pattern holds one element, repeated.
KERNEL(fill, (unsigned char *y, i64 n, i64 pattern)) {
    const i64 step = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 words = aligned(y) ? n / 16 : 0;
    Quad q;
    q.x = q.z = (u32)pattern, q.y = q.w = (u32)((u64)pattern >> 32);
    for (i64 i = first; i < words; i += step) ((Quad *)y)[i] = q;
    for (i64 i = words * 16 + first; i < n; i += step) y[i] = (unsigned char)((u64)pattern >> (i % 8 * 8));
}

// position_embed adds the table's row for a token to that token's row in every sequence of the batch.
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

// concat_heads puts in each head of a row the row of shared, then the head's columns of x. A block handles one row.
template <class T> DEV void concat_heads(T *y, const T *shared, const T *x, i64 heads, i64 first, i64 rest) {
    const i64 row = blockIdx.x, dim = first + rest, cols = heads * dim;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        const i64 h = c / dim, i = c % dim;
        y[row * cols + c] = i < first ? shared[row * first + i] : x[(row * heads + h) * rest + i - first];
    }
}
// The gradient of shared is the sum over heads.
template <class T, class G> DEV void concat_heads_grad(T *dshared, T *dx, const G *dy, i64 heads, i64 first, i64 rest) {
    const i64 row = blockIdx.x, dim = first + rest, own = heads * rest;
    for (i64 i = threadIdx.x; i < first; i += blockDim.x) {
        float sum = 0;
        for (i64 h = 0; h < heads; h++) sum += as_float(dy[(row * heads + h) * dim + i]);
        store(dshared + row * first + i, sum);
    }
    for (i64 c = threadIdx.x; c < own; c += blockDim.x)
        store(dx + row * own + c, as_float(dy[(row * heads + c / rest) * dim + first + c % rest]));
}
#define CONCAT(S, T)                                                                                                           \
    KERNEL(concat_heads_##S, (T * y, const T *shared, const T *x, i64 heads, i64 first, i64 rest)) {                           \
        concat_heads(y, shared, x, heads, first, rest);                                                                        \
    }                                                                                           \
    KERNEL(concat_heads_grad_##S##f, (T * dshared, T *dx, const float *dy, i64 heads, i64 first, i64 rest)) {                  \
        concat_heads_grad(dshared, dx, dy, heads, first, rest);                                                                \
    }                                                                                           \
    KERNEL(concat_heads_grad_##S##b, (T * dshared, T *dx, const bf16 *dy, i64 heads, i64 first, i64 rest)) {                   \
        concat_heads_grad(dshared, dx, dy, heads, first, rest);                                                                \
    }
FOR_TYPES(CONCAT)

// dropout. A block handles one row. Columns 2j and 2j+1 use the lower and the upper half of value j of the
// token's random stream, so eight columns use four values, or five if the first column is odd.
template <class T>
DEV void dropout(T *y, const T *x, const u32 *key, u64 tensor, u32 threshold, float scale, i64 cols, i64 col, i64 sequence, i64 position,
                 i64 batch, i64 chunks, i64 member) {
    const i64 row = blockIdx.x, token = row / batch, tokens = gridDim.x / batch, half = tokens / 2;
    const i64 shift = !chunks ? member * tokens : token < half ? member * half : (chunks - 2 - member) * half;
    const u64 step = (u64)key[0] | (u64)key[1] << 32;
    const u64 stream = draw(draw(step ^ tensor, (u64)(sequence + row % batch)), (u64)(position + shift + token));
    ROW8(c, cols) {
        float v[8];
        load_some(x + row * cols + c, v, cols - c);
        const u64 first = (u64)(col + c);
        const bool odd = first & 1;
        u64 value = draw(stream, first / 2);
        UNROLL for (int j = 0; j < 8; j += 2) {
            const u64 next = odd || j < 6 ? draw(stream, first / 2 + j / 2 + 1) : 0;
            const u32 low = (u32)value, high = (u32)(value >> 32);
            v[j] = (odd ? high : low) >= threshold ? v[j] * scale : 0.0f;
            v[j + 1] = (odd ? (u32)next : high) >= threshold ? v[j + 1] * scale : 0.0f;
            value = next;
        }
        store_some(y + row * cols + c, v, cols - c);
    }
}

#define DROPOUT(S, T)                                                                                                             \
    KERNEL(dropout_##S, (T * y, const T *x, const u32 *key, i64 tensor, i64 threshold, double scale, i64 cols, i64 col, i64 sequence, \
                         i64 position, i64 batch, i64 chunks, i64 member)) {                                                      \
        dropout(y, x, key, (u64)tensor, (u32)threshold, (float)scale, cols, col, sequence, position, batch, chunks, member);      \
    }
FOR_TYPES(DROPOUT)
