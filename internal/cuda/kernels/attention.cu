// Attention and its gradient in plain arithmetic, for any element type and any head dimension up to 256. It works
// everywhere; attention_tensor.cu is faster where it applies.
//
// Query i of n is at position prefix+i among the keys and sees those of the keys prefix+i-window+1 .. prefix+i
// that exist. Every query sees at least one key, unless its document begins after the keys. Tiles that no query
// of a block sees are skipped. Row t*batch+b of an operand holds token t of sequence b, with all heads side by
// side. Each warp handles one query (or one key, for dk and dv). Keys (or queries) are loaded in tiles of 32;
// each lane computes the score of one of them. There are no atomic additions, so every run gives the same bits.
#include "common.cuh"

#define MAX_DIM 256
#define LD (MAX_DIM + 1)

struct Shape {
    i64 n, keys, heads, kv_heads, dim, wide, batch, prefix, window; // dim: width of a head of q and k; wide: of v and o
    double softcap;
#if PACKED
    const int *positions; // of each query within its document: 0, or one more than the preceding token's
    // before returns the maximum number of keys that a query sees before its own.
    METHOD i64 before(i64 query) const { return min(window - 1, (i64)positions[min(query, n - 1) * batch + blockIdx.z]); }
#else
    METHOD i64 before(i64) const { return window - 1; }
#endif
    // first_key returns the first key that a query sees. It never decreases from one query to the next.
    METHOD i64 first_key(i64 query) const { return prefix + query - before(query); }
    // end_of_queries returns the first query that sees only keys at or after end, or n if there is none.
    METHOD i64 end_of_queries(i64 end) const {
        i64 low = 0, high = min(n, min(end, keys) - 1 + window - prefix);
        while (PACKED && low < high) {
            const i64 middle = (low + high) / 2;
            if (first_key(middle) < min(end, keys)) low = middle + 1;
            else high = middle;
        }
        return high;
    }
    // first_tile returns the first key of the first tile that a query sees, or of the last tile if it sees no key.
    METHOD i64 first_tile(i64 query) const { return max(PACKED ? min(first_key(query), keys - 1) : first_key(query), (i64)0) / 32 * 32; }
    // capped applies the soft cap, if there is one, to a score; slope returns the factor by which the cap
    // scales the gradient.
    METHOD float capped(float x) const { return SOFTCAP ? (float)softcap * tanhf(x / (float)softcap) : x; }
    METHOD float slope(float x) const { return SOFTCAP ? 1.0f - x / (float)softcap * (x / (float)softcap) : 1.0f; }
};

// at returns the index of the first element of a token's head.
DEV i64 at(i64 token, i64 sequence, i64 batch, i64 head, i64 heads, i64 dim) {
    return ((token * batch + sequence) * heads + head) * dim;
}

// load_tile loads 32 tokens of a head into shared memory as f32, with zeros past the last token. Barriers
// before and after the load separate it from other uses of the tile.
template <class T>
DEV void load_tile(float *tile, const T *p, i64 token, i64 tokens, i64 sequence, i64 batch, i64 head, i64 heads, i64 dim) {
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * (int)dim; i += blockDim.x) {
        const int r = i / (int)dim, d = i % (int)dim;
        tile[r * LD + d] = token + r < tokens ? as_float(p[at(token + r, sequence, batch, head, heads, dim) + d]) : 0.0f;
    }
    __syncthreads();
}
DEV float dot(const float *a, const float *b, int dim) {
    float sum = 0;
    for (int d = 0; d < dim; d++) sum += a[d] * b[d];
    return sum;
}
// add_rows adds weighted rows of a tile. A lane holds every 32nd column of the sum and the weight of one row.
DEV void add_rows(float *sum, float weight, const float *tile, int dim) {
    for (int r = 0; r < 32; r++) {
        const float w = __shfl_sync(ALL, weight, r);
        UNROLL for (int j = 0; j < MAX_DIM / 32; j++) {
            const int d = (threadIdx.x & 31) + 32 * j;
            if (d < dim) sum[j] += w * tile[r * LD + d];
        }
    }
}

// own_row loads one row for each warp.
template <class T> DEV void own_row(float *row, const T *p, int dim) {
    for (int d = threadIdx.x & 31; d < dim; d += 32) row[d] = as_float(p[d]);
}

// O is the type of o, and of dq below: T, or f32 if attention runs over several blocks of keys in turn.
template <class T, class O>
DEV void attention(O *o, float *lse, const T *q, const T *k, const T *v, const Shape &s, i64 accumulate) {
    SHARED(float, tile, 32 * LD);
    SHARED(float, own, 8 * MAX_DIM);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, dim = (int)s.dim, wide = (int)s.wide;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 8; // longest rows first
    const i64 i = min(first + warp, s.n - 1), h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 8, s.n)), seen = min(s.keys, s.prefix + i + 1);
    const i64 begin = s.first_tile(first), hidden = s.first_key(i) - 1;
    const float scale = 1.0f / sqrtf((float)dim);
    float *query = own + warp * MAX_DIM;
    own_row(query, q + at(i, b, s.batch, h, s.heads, dim), dim);
    O *out = o + at(i, b, s.batch, h, s.heads, wide);
    float *const log_sum = lse + (i * s.batch + b) * s.heads + h;
    float sum[MAX_DIM / 32] = {}, largest = LOWEST, total = 0; // finite: a query may see no key of the first tile
    if (accumulate) { // keys handled earlier count as one key with score lse and value o
        largest = fmaxf(*log_sum, LOWEST), total = 1; // lse is minus infinity if there were none
        UNROLL for (int j = 0; j < MAX_DIM / 32; j++) sum[j] = lane + 32 * j < wide ? as_float(out[lane + 32 * j]) : 0.0f;
    }
    for (i64 key = begin; key < end; key += 32) {
        load_tile(tile, k, key, end, b, s.batch, kvh, s.kv_heads, dim);
        const float score = key + lane < seen && key + lane > hidden ? s.capped(dot(query, tile + lane * LD, dim) * scale) : MINUS_INFINITY;
        const float m = fmaxf(largest, warp_max(score)), p = expf(score - m), old = expf(largest - m);
        total = total * old + warp_sum(p);
        largest = m;
        UNROLL for (int j = 0; j < MAX_DIM / 32; j++) sum[j] *= old;
        load_tile(tile, v, key, end, b, s.batch, kvh, s.kv_heads, wide);
        add_rows(sum, p, tile, wide);
    }
    if (first + warp >= s.n) return;
    UNROLL for (int j = 0; j < MAX_DIM / 32; j++)
        if (lane + 32 * j < wide) store(out + lane + 32 * j, PACKED && total == 0.0f ? 0.0f : sum[j] / total);
    if (lane == 0) *log_sum = largest + logf(total);
}

// delta[row, head] = do . o; one warp per row.
template <class T> DEV void attention_delta(float *delta, const T *dout, const T *o, i64 rows, i64 dim) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    float sum = 0;
    for (i64 d = threadIdx.x & 31; d < dim && row < rows; d += 32) sum += as_float(dout[row * dim + d]) * as_float(o[row * dim + d]);
    sum = warp_sum(sum);
    if (row < rows && (threadIdx.x & 31) == 0) delta[row] = sum;
}

template <class T, class O>
DEV void attention_dq(O *dq, const T *dout, const T *q, const T *k, const T *v, const float *lse, const float *delta, const Shape &s,
                      i64 accumulate) {
    SHARED(float, tile, 32 * LD);
    SHARED(float, own, 8 * MAX_DIM);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, dim = (int)s.dim, wide = (int)s.wide;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 8;
    const i64 i = min(first + warp, s.n - 1), h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 8, s.n)), seen = min(s.keys, s.prefix + i + 1), row = (i * s.batch + b) * s.heads + h;
    const i64 begin = s.first_tile(first), hidden = s.first_key(i) - 1;
    const float scale = 1.0f / sqrtf((float)dim);
    float *mine = own + warp * MAX_DIM, sum[MAX_DIM / 32] = {};
    for (i64 key = begin; key < end; key += 32) {
        __syncwarp();
        own_row(mine, dout + row * wide, wide);
        load_tile(tile, v, key, end, b, s.batch, kvh, s.kv_heads, wide);
        const float dp = dot(mine, tile + lane * LD, wide);
        __syncwarp();
        own_row(mine, q + row * dim, dim);
        load_tile(tile, k, key, end, b, s.batch, kvh, s.kv_heads, dim);
        const float score = s.capped(dot(mine, tile + lane * LD, dim) * scale);
        const float p = key + lane < seen && key + lane > hidden ? expf(score - lse[row]) : 0.0f;
        add_rows(sum, p * (dp - delta[row]) * s.slope(score) * scale, tile, dim);
    }
    if (first + warp >= s.n) return;
    UNROLL for (int j = 0; j < MAX_DIM / 32; j++)
        if (lane + 32 * j < dim) {
            O *const to = dq + row * dim + lane + 32 * j;
            store(to, accumulate ? as_float(*to) + sum[j] : sum[j]);
        }
}

template <class T>
DEV void attention_dkv(float *dk, float *dv, const T *dout, const T *q, const T *k, const T *v, const float *lse, const float *delta,
                       const Shape &s, i64 accumulate) {
    SHARED(float, tile, 32 * LD);
    SHARED(float, own, 8 * MAX_DIM);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, dim = (int)s.dim, wide = (int)s.wide;
    const i64 first = (i64)blockIdx.x * 8, key = min(first + warp, s.keys - 1);
    const i64 kvh = blockIdx.y, b = blockIdx.z, group = s.heads / s.kv_heads, row = at(key, b, s.batch, kvh, s.kv_heads, 1);
    const float scale = 1.0f / sqrtf((float)dim);
    const i64 start = max(first - s.prefix, (i64)0) / 32 * 32; // queries that see one of the keys
    const i64 stop = s.end_of_queries(first + 8);
    if (accumulate && start >= stop) return;
    float *mine = own + warp * MAX_DIM, sum_k[MAX_DIM / 32] = {}, sum_v[MAX_DIM / 32] = {};
    for (i64 h = kvh * group; h < (kvh + 1) * group; h++)
        for (i64 base = start; base < stop; base += 32) {
            const i64 i = base + lane, at_i = (min(i, s.n - 1) * s.batch + b) * s.heads + h;
            __syncwarp();
            own_row(mine, k + row * dim, dim);
            load_tile(tile, q, base, s.n, b, s.batch, h, s.heads, dim);
            const float score = s.capped(dot(mine, tile + lane * LD, dim) * scale);
            const float p = i < stop && key <= s.prefix + i && key >= s.first_key(i) ? expf(score - lse[at_i]) : 0.0f;
            __syncwarp();
            own_row(mine, v + row * wide, wide);
            load_tile(tile, dout, base, s.n, b, s.batch, h, s.heads, wide);
            const float ds = p * (dot(mine, tile + lane * LD, wide) - delta[at_i]) * s.slope(score) * scale;
            add_rows(sum_v, p, tile, wide);
            load_tile(tile, q, base, s.n, b, s.batch, h, s.heads, dim);
            add_rows(sum_k, ds, tile, dim);
        }
    if (first + warp >= s.keys) return;
    UNROLL for (int j = 0; j < MAX_DIM / 32; j++) {
        const int d = lane + 32 * j;
        float *const to_k = dk + row * dim + d, *const to_v = dv + row * wide + d;
        if (d < dim) *to_k = accumulate ? *to_k + sum_k[j] : sum_k[j];
        if (d < wide) *to_v = accumulate ? *to_v + sum_v[j] : sum_v[j];
    }
}

// attention_merge adds the rows of p parts, weighted by exp(lses - lse); one warp per row of a head.
template <class O, class P>
DEV void attention_merge(O *o, float *lse, const P *parts, const float *lses, i64 p, i64 rows, i64 dim) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    if (row >= rows) return;
    float largest = LOWEST, total = 0; // finite: a query may see no key of a part
    for (i64 b = 0; b < p; b++) largest = fmaxf(largest, lses[b * rows + row]);
    for (i64 b = 0; b < p; b++) total += expf(lses[b * rows + row] - largest);
    const float joined = largest + logf(total);
    for (i64 d = lane; d < dim; d += 32) {
        float sum = 0;
        for (i64 b = 0; b < p; b++) sum += expf(lses[b * rows + row] - joined) * as_float(parts[(b * rows + row) * dim + d]);
        store(o + row * dim + d, sum);
    }
    if (lane == 0) lse[row] = joined;
}

// attention_sink adds to the softmax of each row of a head a key with the score of the head's sink and the value 0; one
// warp per row of a head.
template <class O, class T> DEV void attention_sink(O *o, float *lse, const T *sink, i64 rows, i64 heads, i64 dim) {
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    const float old = row < rows ? lse[row] : 0, s = as_float(sink[row % heads]), largest = fmaxf(old, s);
    const float joined = largest + logf(expf(old - largest) + expf(s - largest)), kept = expf(old - joined);
    __syncwarp(); // every lane has read lse
    for (i64 d = lane; d < dim && row < rows; d += 32) store(o + row * dim + d, as_float(o[row * dim + d]) * kept);
    if (lane == 0 && row < rows) lse[row] = joined;
}

// attention_sink_grad sums the gradient of a head's sink over a chunk of rows: a block for each chunk and head, in which
// a warp handles every eighth row. join_columns adds the chunks.
template <class T, class S>
DEV void attention_sink_grad(float *partial, const T *dout, const T *o, const float *lse, const S *sink, i64 rows, i64 heads, i64 dim,
                             i64 chunk) {
    SHARED(float, sums, 8);
    const i64 h = blockIdx.x, first = blockIdx.y * chunk, end = min(first + chunk, rows);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float s = as_float(sink[h]);
    float sum = 0;
    for (i64 r = first + warp; r < end; r += 8) {
        const i64 row = r * heads + h;
        float delta = 0;
        for (i64 d = lane; d < dim; d += 32) delta += as_float(dout[row * dim + d]) * as_float(o[row * dim + d]);
        sum -= expf(s - lse[row]) * warp_sum(delta);
    }
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < 8; w++) sum += sums[w];
    partial[blockIdx.y * heads + h] = sum;
}

#if !SOFTCAP && !PACKED
#define SINK(S, T, U)                                                                                                          \
    KERNEL(attention_sink_##S, (T * o, float *lse, const U *sink, i64 rows, i64 heads, i64 dim)) {                             \
        attention_sink(o, lse, sink, rows, heads, dim);                                                                        \
    }                                                                                                                          \
    KERNEL(attention_sink_grad_##S, (float *partial, const T *dout, const T *o, const float *lse, const U *sink, i64 rows,     \
                                     i64 heads, i64 dim, i64 chunk)) {                                                         \
        attention_sink_grad(partial, dout, o, lse, sink, rows, heads, dim, chunk);                                             \
    }
SINK(ff, float, float)
SINK(fb, float, bf16)
SINK(bf, bf16, float)
SINK(bb, bf16, bf16)
#define SHARED_KERNELS(S, T)                                                                                                   \
    KERNEL(attention_delta_##S, (float *delta, const T *dout, const T *o, i64 rows, i64 dim)) {                                \
        attention_delta(delta, dout, o, rows, dim);                                                                            \
    }
FOR_TYPES(SHARED_KERNELS)
#define MERGE(S, O, T)                                                                                                         \
    KERNEL(attention_merge_##S, (O * o, float *lse, const T *parts, const float *lses, i64 p, i64 rows, i64 dim)) {            \
        attention_merge(o, lse, parts, lses, p, rows, dim);                                                                    \
    }
MERGE(ff, float, float)
MERGE(fb, float, bf16)
MERGE(bf, bf16, float)
MERGE(bb, bf16, bf16)
#endif

#define SHAPE Shape{n, keys, heads, kv_heads, dim, wide, batch, prefix, window, softcap WITH_POSITIONS}
#define GRADIENTS(S, T)                                                                                                        \
    KERNEL(VARIANT(attention_dkv_##S), (float *dk, float *dv, const T *dout, const T *q, const T *k, const T *v,               \
                                        const float *lse, const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads,        \
                                        i64 dim, i64 wide, i64 batch, i64 prefix, i64 window, double softcap,                  \
                                        i64 accumulate POSITIONS)) {                                                           \
        attention_dkv(dk, dv, dout, q, k, v, lse, delta, SHAPE, accumulate);                                                   \
    }
FOR_TYPES(GRADIENTS)

#define RESULTS(S, O, T)                                                                                                       \
    KERNEL(VARIANT(attention_##S), (O * o, float *lse, const T *q, const T *k, const T *v, i64 n, i64 keys, i64 heads,         \
                                    i64 kv_heads, i64 dim, i64 wide, i64 batch, i64 prefix, i64 window, double softcap,        \
                                    i64 accumulate POSITIONS)) {                                                               \
        attention(o, lse, q, k, v, SHAPE, accumulate);                                                                         \
    }                                                                                                                          \
    KERNEL(VARIANT(attention_dq_##S), (O * dq, const T *dout, const T *q, const T *k, const T *v, const float *lse,            \
                                       const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads, i64 dim, i64 wide,        \
                                       i64 batch, i64 prefix, i64 window, double softcap, i64 accumulate POSITIONS)) {         \
        attention_dq(dq, dout, q, k, v, lse, delta, SHAPE, accumulate);                                                        \
    }
RESULTS(ff, float, float)
RESULTS(fb, float, bf16)
RESULTS(bf, bf16, float)
RESULTS(bb, bf16, bf16)
