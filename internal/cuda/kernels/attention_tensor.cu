// Attention and its gradient in bf16 on tensor cores, for the head dimensions at the end of this file. Arguments, masks
// and layout are those of attention.cu. A block has 4 warps, each with 16 rows of a product. Tiles are in dynamic shared
// memory, with D + 8 elements per row. The block loops over tiles in two slots: one is filled while the other is used.
// Scores stay in registers, because the accumulator of one product has the layout of an operand of the next. Scores, sums
// of probabilities and all results accumulate in f32; probabilities are rounded to bf16 for the product with v.
//
// D is the dimension of heads of queries and keys, V that of heads of values and o.
//
// Wide heads fill the registers with sums. Their tiles are smaller, so that a block needs at most 99 KiB of shared memory,
// the limit of most GPUs. Beyond 192 elements, queries stay in shared memory. Beyond 128, the sums for dk and for dv do
// not fit side by side, so that different blocks compute them; both compute the scores.
#include "common.cuh"
#include "attention.cuh"

// Tokens per tile, by head dimension; tensorSharedBytes in table_attention.go computes the same.
#define TILE(D) ((D) <= 128 ? 64 : 32)
#define GRAD_TILE(D) ((D) <= 128 ? 32 : 16)

// load_tile begins to load ROWS tokens of a head into shared memory, with zeros past the last token.
template <int ROWS, int D>
DEV void load_tile(bf16 *tile, const bf16 *p, i64 token, i64 tokens, i64 sequence, i64 batch, i64 head, i64 heads) {
    const bool whole = aligned(p);
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += 128) {
        const int r = i / (D / 8), d = i % (D / 8) * 8;
        const bf16 *from = p + (((token + r) * batch + sequence) * heads + head) * D + d;
        const bool there = token + r < tokens;
        if (whole) {
            copy_chunk(tile + r * (D + 8) + d, there ? from : p, there);
            continue;
        }
        Quad q;
        q.x = q.y = q.z = q.w = 0;
        if (there) {
            q.x = (u32)from[0].bits | (u32)from[1].bits << 16, q.y = (u32)from[2].bits | (u32)from[3].bits << 16;
            q.z = (u32)from[4].bits | (u32)from[5].bits << 16, q.w = (u32)from[6].bits | (u32)from[7].bits << 16;
        }
        *(Quad *)(tile + r * (D + 8) + d) = q;
    }
}
// tiles_here waits until the tiles are complete and no thread still reads the slot that is overwritten next.
DEV void tiles_here() {
    copies_here();
    __syncthreads();
}

// own_rows loads 64 tokens and gives each warp the fragments of its 16 rows.
template <int D>
DEV void own_rows(u32 (*frags)[4], bf16 *tile, const bf16 *p, i64 token, i64 tokens, i64 sequence, i64 batch, i64 head, i64 heads) {
    load_tile<64, D>(tile, p, token, tokens, sequence, batch, head, heads);
    tiles_here();
    UNROLL for (int s = 0; s < D / 16; s++) frag_a(frags[s], tile, D + 8, (threadIdx.x >> 5) * 16, 16 * s);
    __syncthreads();
}

// multiply adds a row of fragments times the transpose of a tile: sum[16, COLUMNS] += a[16, D] tile[COLUMNS, D]^T.
template <int COLUMNS, int D> DEV void multiply(float (*sum)[4], const u32 (*a)[4], const bf16 *tile) {
    UNROLL for (int s = 0; s < D / 16; s++) UNROLL for (int c = 0; c < COLUMNS / 16; c++) {
        u32 b[4];
        frag_b(b, tile, D + 8, 16 * c, 16 * s);
        mma16816(sum[2 * c], a[s], b);
        mma16816(sum[2 * c + 1], a[s], b + 2);
    }
}
// multiply_tile does the same with 16 rows of another tile: sum[16, COLUMNS] += rows[16, D] tile[COLUMNS, D]^T.
template <int COLUMNS, int D> DEV void multiply_tile(float (*sum)[4], const bf16 *rows, const bf16 *tile) {
    UNROLL_BY(D <= 128 && !PACKED ? D / 16 : D == 80 ? 1 : 4) for (int s = 0; s < D / 16; s++) {
        u32 a[4], b[4];
        frag_a(a, rows, D + 8, (threadIdx.x >> 5) * 16, 16 * s);
        UNROLL for (int c = 0; c < COLUMNS / 16; c++) {
            frag_b(b, tile, D + 8, 16 * c, 16 * s);
            mma16816(sum[2 * c], a, b);
            mma16816(sum[2 * c + 1], a, b + 2);
        }
    }
}
// gather adds weights times a tile: sum[16, D] += weights[16, ROWS] tile[ROWS, D].
template <int ROWS, int D> DEV void gather(float (*sum)[4], const float (*weights)[4], const bf16 *tile) {
    UNROLL for (int s = 0; s < ROWS / 16; s++) {
        u32 a[4], b[4];
        as_operand(a, weights[2 * s], weights[2 * s + 1]);
        UNROLL for (int c = 0; c < D / 16; c++) {
            frag_b_trans(b, tile, D + 8, 16 * c, 16 * s);
            mma16816(sum[2 * c], a, b);
            mma16816(sum[2 * c + 1], a, b + 2);
        }
    }
}
template <int D, int V, class O>
DEV void attention(O *o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    constexpr int T = TILE(D);
    constexpr bool registers = D <= 192;
    bf16 *const own = (bf16 *)memory, *const places = registers ? own : own + 64 * (D + 8); // keys, then values
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 64; // longest rows first
    const i64 h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 64, s.n)), row = first + warp * 16 + g; // the lane's rows: row, row+8
    const float factor = 1.0f / sqrtf((float)D), scale = SOFTCAP ? LOG2E : LOG2E / sqrtf((float)D);
    u32 query[D / 16][4];
    if constexpr (registers) own_rows<D>(query, own, q, first, s.n, b, s.batch, h, s.heads);
    else load_tile<64, D>(own, q, first, s.n, b, s.batch, h, s.heads);
    const auto place = [&](i64 key) { return places + key / T % 2 * (T * (D + V + 16)); };
    const auto bring = [&](i64 key) {
        load_tile<T, D>(place(key), k, key, end, b, s.batch, kvh, s.kv_heads);
        load_tile<T, V>(place(key) + T * (D + 8), v, key, end, b, s.batch, kvh, s.kv_heads);
    };
    const i64 begin = s.first_tile(first, T);
    bring(begin);
    float sum[V / 8][4], largest[2] = {LEAST, LEAST}, total[2] = {0, 0};
    clear<V / 8>(sum);
    if (accumulate) UNROLL for (int half = 0; half < 2; half++) { // keys handled earlier count as one key with score lse and value o
        const i64 at = (min(row + 8 * half, s.n - 1) * s.batch + b) * s.heads + h;
        largest[half] = fmaxf(lse[at] * (LOG2E / scale), LEAST), total[half] = 1; // lse is minus infinity if there were none
        UNROLL for (int c = 0; c < V / 8; c++) UNROLL for (int e = 0; e < 2; e++)
            sum[c][2 * half + e] = as_float(o[at * V + 8 * c + 2 * t + e]);
    }
    for (i64 key = begin; key < end; key += T) {
        tiles_here();
        if (key + T < end) bring(key + T);
        const bf16 *const ks = place(key), *const vs = ks + T * (D + 8);
        float p[T / 8][4];
        clear<T / 8>(p);
        if constexpr (registers) multiply<T, D>(p, query, ks);
        else multiply_tile<T, D>(p, own, ks);
        if (SOFTCAP) bound<T / 8>(p, s, factor);
        UNROLL for (int half = 0; half < 2; half++) {
            const int first_seen = hidden(s, row + 8 * half, key, T, 2 * t), last = visible(s, row + 8 * half, key, T, 2 * t);
            float m = largest[half];
            UNROLL for (int c = 0; c < T / 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) {
                if (8 * c + e % 2 > last || 8 * c + e % 2 < first_seen) p[c][e] = MINUS_INFINITY;
                m = fmaxf(m, p[c][e]);
            }
            m = row_max(m);
            const float old = exp2f((largest[half] - m) * scale);
            float part = 0;
            UNROLL for (int c = 0; c < T / 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) {
                p[c][e] = exp2f(p[c][e] * scale - m * scale);
                part += p[c][e];
            }
            total[half] = total[half] * old + row_sum(part);
            largest[half] = m;
            UNROLL for (int c = 0; c < V / 8; c++) sum[c][2 * half] *= old, sum[c][2 * half + 1] *= old;
        }
        gather<T, V>(sum, p, vs);
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = (r * s.batch + b) * s.heads + h;
        if (r >= s.n) continue;
        const float inverse = share(total[half]);
        UNROLL for (int c = 0; c < V / 8; c++)
            store_pair(o + at * V + 8 * c + 2 * t, sum[c][2 * half] * inverse, sum[c][2 * half + 1] * inverse);
        if (t == 0) lse[at] = (largest[half] * scale + log2f(total[half])) * LN2;
    }
}

template <int D, int V, class O>
DEV void attention_dq(O *dq, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, const float *delta,
                      const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    constexpr int T = GRAD_TILE(D);
    constexpr bool registers = D <= 128;
    bf16 *const ds = (bf16 *)memory, *const own = ds + (registers ? 64 * (D + 8) : 64 * (V + 8)), *const places = registers ? own : own + 64 * (D + 8); // keys, then values
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 64;
    const i64 h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 64, s.n)), row = first + warp * 16 + g;
    const float factor = 1.0f / sqrtf((float)D), left = SOFTCAP ? 1.0f : factor, inverse = 1.0f / (float)s.softcap;
    u32 query[D / 16][4]; // dout stays in shared memory: registers do not suffice for both
    if constexpr (registers) own_rows<D>(query, ds, q, first, s.n, b, s.batch, h, s.heads);
    else load_tile<64, D>(own, q, first, s.n, b, s.batch, h, s.heads);
    load_tile<64, V>(ds, dout, first, s.n, b, s.batch, h, s.heads);
    const auto place = [&](i64 key) { return places + key / T % 2 * (T * (D + V + 16)); };
    const auto bring = [&](i64 key) {
        load_tile<T, D>(place(key), k, key, end, b, s.batch, kvh, s.kv_heads);
        load_tile<T, V>(place(key) + T * (D + 8), v, key, end, b, s.batch, kvh, s.kv_heads);
    };
    const i64 begin = s.first_tile(first, T);
    bring(begin);
    float sum[D / 8][4], log_sum[2], del[2];
    clear<D / 8>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 at = (min(row + 8 * half, s.n - 1) * s.batch + b) * s.heads + h;
        log_sum[half] = lse[at] * LOG2E, del[half] = delta[at];
    }
    for (i64 key = begin; key < end; key += T) {
        tiles_here();
        if (key + T < end) bring(key + T);
        const bf16 *const ks = place(key), *const vs = ks + T * (D + 8);
        float p[T / 8][4], dp[T / 8][4];
        clear<T / 8>(p), clear<T / 8>(dp);
        if constexpr (registers) multiply<T, D>(p, query, ks);
        else multiply_tile<T, D>(p, own, ks);
        multiply_tile<T, V>(dp, ds, vs);
        if (SOFTCAP) bound<T / 8>(p, s, factor);
        int first_seen[2], last[2]; // visible columns of each row, relative to the lane's first
        UNROLL for (int half = 0; half < 2; half++) {
            first_seen[half] = hidden(s, row + 8 * half, key, T, 2 * t);
            last[half] = row + 8 * half < s.n ? visible(s, row + 8 * half, key, T, 2 * t) : -1;
        }
        UNROLL for (int c = 0; c < T / 8; c++) UNROLL for (int e = 0; e < 4; e++) {
            const bool seen = 8 * c + e % 2 <= last[e / 2] && 8 * c + e % 2 >= first_seen[e / 2];
            const float change = SOFTCAP ? (dp[c][e] - del[e / 2]) * slope(p[c][e], inverse) : dp[c][e] - del[e / 2];
            p[c][e] = seen ? exp2f(p[c][e] * (left * LOG2E) - log_sum[e / 2]) * change : 0.0f;
        }
        gather<T, D>(sum, p, ks);
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = (r * s.batch + b) * s.heads + h;
        if (r >= s.n) continue;
        UNROLL for (int c = 0; c < D / 8; c++)
            add_pair(dq + at * D + 8 * c + 2 * t, sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor, accumulate);
    }
}

// A block handles 64 keys and loops over all queries that see them, over all heads of the group. Products are
// transposed: rows are the warp's 16 keys, columns are queries. OF_K and OF_V say which results the block computes. The
// free elements at the end of a row hold the query's lse, or its delta in rows of dout.
template <int D, int V, bool OF_K, bool OF_V>
DEV void change_keys(float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse,
                     const float *delta, const Heads &s, i64 accumulate, i64 block) {
    DYNAMIC_SHARED(memory);
    constexpr int T = GRAD_TILE(D);
    bf16 *const ks = (bf16 *)memory, *const vs = ks + 64 * (D + 8), *const places = vs + 64 * (V + 8); // queries, then dout
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = block * 64, row = first + warp * 16 + g;
    const i64 kvh = blockIdx.y, b = blockIdx.z, group = s.heads / s.kv_heads;
    const i64 start = max(first - s.prefix, (i64)0) / T * T;
    const i64 stop = max(s.end_of_queries(first + 64), start);
    const int each = (int)((stop - start + T - 1) / T), tiles = each * (int)group;
    if (accumulate && tiles == 0) return;
    const float factor = 1.0f / sqrtf((float)D), left = SOFTCAP ? 1.0f : factor, inverse = 1.0f / (float)s.softcap;
    const auto bring = [&](int tile) {
        const i64 h = kvh * group + tile / each, base = start + tile % each * (i64)T;
        bf16 *const to = places + tile % 2 * (T * (D + V + 16));
        load_tile<T, D>(to, q, base, s.n, b, s.batch, h, s.heads);
        load_tile<T, V>(to + T * (D + 8), dout, base, s.n, b, s.batch, h, s.heads);
        if (threadIdx.x < 2 * T) {
            const i64 query = base + threadIdx.x % T, at = (min(query, s.n - 1) * s.batch + b) * s.heads + h;
            bf16 *row = to + threadIdx.x * (D + 8) + D; // its end
            if constexpr (V != D) row = threadIdx.x < T ? row : to + T * (D + 8) + (threadIdx.x - T) * (V + 8) + V;
            copy_word(row, (threadIdx.x < T ? lse : delta) + at, query < s.n);
        }
    };
    if (tiles > 0) {
        load_tile<64, D>(ks, k, first, s.keys, b, s.batch, kvh, s.kv_heads);
        if (OF_K) load_tile<64, V>(vs, v, first, s.keys, b, s.batch, kvh, s.kv_heads);
        bring(0);
    }
    float sum_k[D / 8][4], sum_v[V / 8][4];
    clear<D / 8>(sum_k), clear<V / 8>(sum_v);
    const i64 ends[2] = {PACKED ? s.end_of_queries(row + 1) : 0, PACKED ? s.end_of_queries(row + 9) : 0}; // by row
    for (int tile = 0; tile < tiles; tile++) {
        tiles_here();
        if (tile + 1 < tiles) bring(tile + 1);
        const bf16 *const qs = places + tile % 2 * (T * (D + V + 16)), *const ds = qs + T * (D + 8);
        const i64 base = start + tile % each * (i64)T;
        float p[T / 8][4], dp[T / 8][4];
        clear<T / 8>(p), clear<T / 8>(dp);
        multiply_tile<T, D>(p, ks, qs);
        if (OF_K) multiply_tile<T, V>(dp, vs, ds);
        if (SOFTCAP) bound<T / 8>(p, s, factor);
        const int see = (int)max(row - s.prefix - base, (i64)-8), queries = (int)min(s.n - base, (i64)T);
        const int until = (int)min(row - s.prefix - base + s.window, (i64)T); // end of the queries that see the row
        UNROLL for (int c = 0; c < T / 8; c++) UNROLL for (int e = 0; e < 4; e++) {
            const int column = 8 * c + 2 * t + e % 2;
            const bool visible = column < queries && column >= see + 8 * (e / 2) && (PACKED ? base + column < ends[e / 2] : column < until + 8 * (e / 2));
            const float of_score = SOFTCAP ? slope(p[c][e], inverse) : 1.0f;
            p[c][e] = visible ? exp2f((p[c][e] * left - *(const float *)(qs + column * (D + 8) + D)) * LOG2E) : 0.0f;
            if (!OF_K) continue;
            dp[c][e] = p[c][e] * (dp[c][e] - *(const float *)(ds + column * (V + 8) + V));
            if (SOFTCAP) dp[c][e] *= of_score;
        }
        if (OF_V) gather<T, V>(sum_v, p, ds);
        if (OF_K) gather<T, D>(sum_k, dp, qs);
    }
    UNROLL for (int c = 0; c < (OF_K ? D : V) / 8; c++) UNROLL for (int e = 0; e < 4; e++) { // both only if they are as wide
        const i64 r = row + 8 * (e / 2), at = ((r * s.batch + b) * s.kv_heads + kvh) * (OF_K ? D : V) + 8 * c + 2 * t + e % 2;
        if (r >= s.keys) continue;
        if (OF_K) dk[at] = accumulate ? dk[at] + sum_k[c][e] * factor : sum_k[c][e] * factor;
        if (OF_V) dv[at] = accumulate ? dv[at] + sum_v[c][e] : sum_v[c][e];
    }
}
template <int D, int V>
DEV void attention_dkv(float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse,
                       const float *delta, const Heads &s, i64 accumulate) {
    if constexpr (D <= 128) change_keys<D, V, true, true>(dk, dv, dout, q, k, v, lse, delta, s, accumulate, blockIdx.x);
    else if (blockIdx.x % 2 == 0) change_keys<D, V, true, false>(dk, dv, dout, q, k, v, lse, delta, s, accumulate, blockIdx.x / 2);
    else change_keys<D, V, false, true>(dk, dv, dout, q, k, v, lse, delta, s, accumulate, blockIdx.x / 2);
}

#define RESULTS(S, N, D, V, O)                                                                                                 \
    KERNEL_HALF(VARIANT(attention_tensor_##N##_##S), (O * o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, i64 n,   \
                                                      i64 keys, i64 heads, i64 kv_heads, i64 batch, i64 prefix, i64 window,    \
                                                      double softcap, i64 accumulate POSITIONS)) {                             \
        attention<D, V>(o, lse, q, k, v, HEADS, accumulate);                                                                   \
    }                                                                                                                          \
    KERNEL_HALF(VARIANT(attention_tensor_dq_##N##_##S), (O * dq, const bf16 *dout, const bf16 *q, const bf16 *k,               \
                                                         const bf16 *v, const float *lse, const float *delta, i64 n,           \
                                                         i64 keys, i64 heads, i64 kv_heads, i64 batch, i64 prefix,             \
                                                         i64 window, double softcap, i64 accumulate POSITIONS)) {              \
        attention_dq<D, V>(dq, dout, q, k, v, lse, delta, HEADS, accumulate);                                                  \
    }
#define ATTENTION(N, D, V)                                                                                                     \
    RESULTS(f, N, D, V, float)                                                                                                 \
    RESULTS(b, N, D, V, bf16)                                                                                                  \
    KERNEL_HALF(VARIANT(attention_tensor_dkv_##N), (float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k,      \
                                                    const bf16 *v, const float *lse, const float *delta, i64 n, i64 keys,      \
                                                    i64 heads, i64 kv_heads, i64 batch, i64 prefix, i64 window,                \
                                                    double softcap, i64 accumulate POSITIONS)) {                               \
        attention_dkv<D, V>(dk, dv, dout, q, k, v, lse, delta, HEADS, accumulate);                                             \
    }
ATTENTION(64, 64, 64)
ATTENTION(80, 80, 80)
ATTENTION(96, 96, 96)
ATTENTION(128, 128, 128)
ATTENTION(192x128, 192, 128)
ATTENTION(192, 192, 192)
ATTENTION(256, 256, 256)
