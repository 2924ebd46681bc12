// The gradient of attention in bf16 by Hopper's matrix units, for heads of 64 and of 128. Arguments, masks and layout are those of
// attention.cu. A block has two warpgroups. It keeps two tiles of 128 tokens, 64 of each for each warpgroup, and walks over
// pairs of tiles of 64: keys and values past queries and their gradient for dq, the other way round for dk and dv. There are
// places for three pairs: one is on its way, one in the products with what is kept, one in the sums.
#include "common.cuh"
#include "attention.cuh"
#include "hopper.cuh"

#define PAIR (2 * TILE_BYTES(64))

// compare begins the products of a warpgroup's rows of what is kept with a pair: d and e [64,64].
template <int DIM> DEV void compare(float (*d)[4], float (*e)[4], const unsigned char *kept, const unsigned char *pair) {
    UNROLL for (int s = 0; s < DIM / 16; s++) wgmma_rows64(d, by_rows<128>(kept, 0, 16 * s), by_rows<64>(pair, 0, 16 * s), s > 0);
    products_commit();
    const unsigned char *const other = kept + TILE_BYTES(128), *const beside = pair + TILE_BYTES(64);
    UNROLL for (int s = 0; s < DIM / 16; s++) wgmma_rows64(e, by_rows<128>(other, 0, 16 * s), by_rows<64>(beside, 0, 16 * s), s > 0);
    products_commit();
}
// add begins to add the product of weights [64,64] with a tile of 64.
template <int DIM> DEV void add(float (*sum)[4], const u32 (*weights)[4], const unsigned char *tile) {
    UNROLL for (int s = 0; s < 4; s++) gather<DIM>(sum, weights[s], by_columns<64>(tile, 16 * s));
}
DEV void as_weights(u32 (*weights)[4], const float (*p)[4]) {
    UNROLL for (int c = 0; c < 4; c++) as_operand(weights[c], p[2 * c], p[2 * c + 1]);
}

// A block has 128 queries.
template <int DIM, class O>
DEV void attention_dq(O *dq, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, const float *delta,
                      const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    unsigned char *const kept = tile_start(memory), *const pairs = kept + 2 * TILE_BYTES(128);
    const unsigned char *const mine = kept + threadIdx.x / 128 * 64 * 128; // of this warpgroup
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 128; // the longest rows first
    const i64 h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 128, s.n)), row = first + warp * 16 + g; // of the lane, and row+8
    const i64 all = min(s.keys, s.prefix + first + 1); // keys that every row sees
    const int tiles = (int)((end + 63) / 64);
    const float factor = 1.0f / sqrtf((float)DIM), scale = factor * LOG2E;
    float sum[DIM / 8][4], p[8][4], dp[8][4], log_sum[2], del[2];
    u32 changes[4][4];
    clear<DIM / 8>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 at = (min(row + 8 * half, s.n - 1) * s.batch + b) * s.heads + h;
        log_sum[half] = lse[at] * LOG2E, del[half] = delta[at];
    }
    const auto bring = [&](int tile) {
        unsigned char *const to = pairs + tile % 3 * PAIR;
        fetch<DIM, 64, 256>(to, k, tile * (i64)64, end, b, s.batch, kvh, s.kv_heads);
        fetch<DIM, 64, 256>(to + TILE_BYTES(64), v, tile * (i64)64, end, b, s.batch, kvh, s.kv_heads);
    };
    const auto turn = [&](int tile) {
        copies_done();
        __syncthreads(); // and nobody reads any more what is overwritten next
        if (tile + 1 < tiles) bring(tile + 1);
        settle<8>(p), settle<8>(dp), settle<DIM / 8>(sum), settle<4>(changes);
        products_begin();
        compare<DIM>(p, dp, mine, pairs + tile % 3 * PAIR);
    };
    const auto weigh = [&](int tile) {
        const i64 key = tile * (i64)64;
        if (key + 64 > all) UNROLL for (int half = 0; half < 2; half++) {
            const int last = visible(s, row + 8 * half, key, 64, 2 * t);
            UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++)
                if (8 * c + e % 2 > last) p[c][e] = MINUS_INFINITY;
        }
        UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) p[c][e] = power2(p[c][e] * scale - log_sum[e / 2]);
    };
    const auto change = [&]() {
        UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) p[c][e] *= dp[c][e] - del[e / 2];
    };
    fetch<DIM, 128, 256>(kept, q, first, s.n, b, s.batch, h, s.heads);
    fetch<DIM, 128, 256>(kept + TILE_BYTES(128), dout, first, s.n, b, s.batch, h, s.heads);
    bring(0);
    turn(0);
    products_wait<0>();
    settle<8>(p), settle<8>(dp);
    weigh(0);
    change();
    as_weights(changes, p);
    for (int tile = 1; tile < tiles; tile++) {
        turn(tile);
        add<DIM>(sum, changes, pairs + (tile - 1) % 3 * PAIR);
        products_commit();
        products_wait<2>();
        settle<8>(p);
        weigh(tile);
        products_wait<1>();
        settle<8>(dp);
        change();
        products_wait<0>();
        settle<DIM / 8>(sum), settle<4>(changes);
        as_weights(changes, p);
    }
    settle<DIM / 8>(sum), settle<4>(changes);
    products_begin();
    add<DIM>(sum, changes, pairs + (tiles - 1) % 3 * PAIR);
    products_commit();
    products_wait<0>();
    settle<DIM / 8>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = (r * s.batch + b) * s.heads + h;
        if (r >= s.n) continue;
        UNROLL for (int c = 0; c < DIM / 8; c++)
            add_pair(dq + at * DIM + 8 * c + 2 * t, sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor, accumulate);
    }
}

// A block has 128 keys and walks over all queries that see them, of all heads of the group. Products are transposed: rows are
// keys, columns are queries.
template <int DIM>
DEV void attention_dkv(float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse,
                       const float *delta, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    unsigned char *const kept = tile_start(memory), *const pairs = kept + 2 * TILE_BYTES(128);
    float *const stats = (float *)(pairs + 3 * PAIR); // of the queries of each pair: lse, delta
    const unsigned char *const mine = kept + threadIdx.x / 128 * 64 * 128; // of this warpgroup
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = (i64)blockIdx.x * 128, row = first + warp * 16 + g; // of the lane, and row+8
    const i64 kvh = blockIdx.y, b = blockIdx.z, group = s.heads / s.kv_heads;
    const i64 start = max(first - s.prefix, (i64)0) / 64 * 64;
    const int each = (int)((s.n - min(start, s.n) + 63) / 64), tiles = each * (int)group;
    const float factor = 1.0f / sqrtf((float)DIM);
    float sum_k[DIM / 8][4], sum_v[DIM / 8][4], p[8][4], dp[8][4];
    u32 weights[4][4], changes[4][4];
    clear<DIM / 8>(sum_k), clear<DIM / 8>(sum_v);
    const auto bring = [&](int tile) {
        unsigned char *const to = pairs + tile % 3 * PAIR;
        const i64 h = kvh * group + tile / each, base = start + tile % each * (i64)64;
        fetch<DIM, 64, 256>(to, q, base, s.n, b, s.batch, h, s.heads);
        fetch<DIM, 64, 256>(to + TILE_BYTES(64), dout, base, s.n, b, s.batch, h, s.heads);
        if (threadIdx.x < 128) {
            const i64 query = base + threadIdx.x % 64, at = (min(query, s.n - 1) * s.batch + b) * s.heads + h;
            copy_word(stats + tile % 3 * 128 + threadIdx.x, (threadIdx.x < 64 ? lse : delta) + at, query < s.n);
        }
    };
    const auto turn = [&](int tile) {
        copies_done();
        __syncthreads(); // and nobody reads any more what is overwritten next
        if (tile + 1 < tiles) bring(tile + 1);
        settle<8>(p), settle<8>(dp), settle<DIM / 8>(sum_k), settle<DIM / 8>(sum_v), settle<4>(weights), settle<4>(changes);
        products_begin();
        compare<DIM>(p, dp, mine, pairs + tile % 3 * PAIR);
    };
    const auto weigh = [&](int tile) {
        const float *const log_sum = stats + tile % 3 * 128 + 2 * t;
        const i64 base = start + tile % each * (i64)64;
        if (base + 64 > s.n || base + s.prefix < first + 127) {
            const int see = (int)max(row - s.prefix - base, (i64)-8), queries = (int)min(s.n - base, (i64)64);
            UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) {
                const int column = 8 * c + 2 * t + e % 2;
                if (column >= queries || column < see + 8 * (e / 2)) p[c][e] = MINUS_INFINITY;
            }
        }
        UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++)
            p[c][e] = power2((p[c][e] * factor - log_sum[8 * c + e % 2]) * LOG2E);
    };
    const auto change = [&](int tile) {
        const float *const del = stats + tile % 3 * 128 + 64 + 2 * t;
        UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) dp[c][e] = p[c][e] * (dp[c][e] - del[8 * c + e % 2]);
    };
    const auto sums = [&](int tile) {
        add<DIM>(sum_v, weights, pairs + tile % 3 * PAIR + TILE_BYTES(64));
        add<DIM>(sum_k, changes, pairs + tile % 3 * PAIR);
        products_commit();
    };
    if (tiles > 0) {
        fetch<DIM, 128, 256>(kept, k, first, s.keys, b, s.batch, kvh, s.kv_heads);
        fetch<DIM, 128, 256>(kept + TILE_BYTES(128), v, first, s.keys, b, s.batch, kvh, s.kv_heads);
        bring(0);
        turn(0);
        products_wait<0>();
        settle<8>(p), settle<8>(dp);
        weigh(0);
        change(0);
        as_weights(weights, p), as_weights(changes, dp);
        for (int tile = 1; tile < tiles; tile++) {
            turn(tile);
            sums(tile - 1);
            products_wait<2>();
            settle<8>(p);
            weigh(tile);
            products_wait<1>();
            settle<8>(dp);
            change(tile);
            products_wait<0>();
            settle<DIM / 8>(sum_k), settle<DIM / 8>(sum_v), settle<4>(weights), settle<4>(changes);
            as_weights(weights, p), as_weights(changes, dp);
        }
        settle<DIM / 8>(sum_k), settle<DIM / 8>(sum_v), settle<4>(weights), settle<4>(changes);
        products_begin();
        sums(tiles - 1);
        products_wait<0>();
        settle<DIM / 8>(sum_k), settle<DIM / 8>(sum_v);
    }
    UNROLL for (int c = 0; c < DIM / 8; c++) UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = ((r * s.batch + b) * s.kv_heads + kvh) * DIM + 8 * c + 2 * t;
        if (r >= s.keys) continue;
        add_pair(dk + at, sum_k[c][2 * half] * factor, sum_k[c][2 * half + 1] * factor, accumulate);
        add_pair(dv + at, sum_v[c][2 * half], sum_v[c][2 * half + 1], accumulate);
    }
}

#define RESULTS(DIM, S, O)                                                                                                    \
    KERNEL(attention_hopper_dq_##DIM##_##S, (O * dq, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v,           \
                                             const float *lse, const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads,  \
                                             i64 batch, i64 prefix, i64 accumulate)) {                                        \
        attention_dq<DIM>(dq, dout, q, k, v, lse, delta, Heads{n, keys, heads, kv_heads, batch, prefix}, accumulate);         \
    }
#define GRADIENTS(DIM)                                                                                                        \
    RESULTS(DIM, f, float)                                                                                                    \
    RESULTS(DIM, b, bf16)                                                                                                     \
    KERNEL(attention_hopper_dkv_##DIM, (float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v,  \
                                        const float *lse, const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads,       \
                                        i64 batch, i64 prefix, i64 accumulate)) {                                             \
        attention_dkv<DIM>(dk, dv, dout, q, k, v, lse, delta, Heads{n, keys, heads, kv_heads, batch, prefix}, accumulate);    \
    }
GRADIENTS(64)
GRADIENTS(128)
