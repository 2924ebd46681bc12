// Attention in bf16 by Hopper's matrix units, for heads of 128. Arguments, masks and layout are those of attention.cu. A
// block has two warpgroups, each 64 queries; tiles of 128 tokens lie in dynamic shared memory, two of keys and two of
// values, so that copies of the next run while products of this one do. While a warpgroup takes the softmax of a tile of
// keys, the product of the probabilities before with their values is under way.
#include "common.cuh"
#include "attention.cuh"
#include "hopper.cuh"

// Softmax is the state of the rows of a lane: two of them, eight apart.
struct Softmax {
    float largest[2], total[2];
};

// hide takes away the scores of a row behind the last key that it sees.
DEV void hide(float (*p)[4], int half, int last) {
    UNROLL for (int c = 0; c < 16; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++)
        if (8 * c + e % 2 > last) p[c][e] = MINUS_INFINITY;
}

// take makes scores of a tile probabilities, and says by what to scale what was summed before.
DEV void take(Softmax *x, float (*p)[4], float *old, float scale) {
    UNROLL for (int half = 0; half < 2; half++) {
        float m = x->largest[half];
        UNROLL for (int c = 0; c < 16; c++) m = fmaxf(m, fmaxf(p[c][2 * half], p[c][2 * half + 1]));
        m = row_max(m);
        old[half] = power2((x->largest[half] - m) * scale);
        float part = 0;
        UNROLL for (int c = 0; c < 16; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) {
            p[c][e] = power2(p[c][e] * scale - m * scale);
            part += p[c][e];
        }
        x->total[half] = x->total[half] * old[half] + part; // of this lane; the row's lanes are added at the end
        x->largest[half] = m;
    }
}

// scores begins the product of a warpgroup's queries with a tile of keys.
DEV void scores(float (*p)[4], const unsigned char *queries, const unsigned char *keys) {
    UNROLL for (int s = 0; s < 8; s++) wgmma_rows128(p, by_rows<128>(queries, 0, 16 * s), by_rows<128>(keys, 0, 16 * s), s > 0);
    products_commit();
}
// weigh begins to add the product of probabilities with a tile of values.
DEV void weigh(float (*sum)[4], const u32 (*p)[4], const unsigned char *values) {
    UNROLL for (int s = 0; s < 8; s++) wgmma_gather(sum, p[s], by_columns<128>(values, 16 * s));
    products_commit();
}

template <class O>
DEV void attention(O *o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    unsigned char *const queries = tile_start(memory);
    unsigned char *const keys = queries + TILE_BYTES(128), *const values = keys + 2 * TILE_BYTES(128);
    const unsigned char *const mine = queries + threadIdx.x / 128 * 64 * 128; // of this warpgroup
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * 128; // the longest rows first
    const i64 h = blockIdx.y, b = blockIdx.z, kvh = h / (s.heads / s.kv_heads);
    const i64 end = min(s.keys, s.prefix + min(first + 128, s.n)), row = first + warp * 16 + g; // of the lane, and row+8
    const i64 all = min(s.keys, s.prefix + first + 1); // keys that every row sees
    const int tiles = (int)((end + 127) / 128);
    const float scale = LOG2E / sqrtf(128.0f);
    Softmax soft = {{MINUS_INFINITY, MINUS_INFINITY}, {0, 0}};
    float sum[16][4], p[16][4], old[2];
    u32 weights[8][4];
    clear<16>(sum);
    if (accumulate) UNROLL for (int half = 0; half < 2; half++) { // other keys are one more, whose score is lse and whose value is o
        const i64 at = (min(row + 8 * half, s.n - 1) * s.batch + b) * s.heads + h;
        soft.largest[half] = lse[at] * (LOG2E / scale), soft.total[half] = t == 0;
        UNROLL for (int c = 0; c < 16; c++) UNROLL for (int e = 0; e < 2; e++)
            sum[c][2 * half + e] = as_float(o[at * 128 + 8 * c + 2 * t + e]);
    }
    fetch<128, 256>(queries, q, first, s.n, b, s.batch, h, s.heads);
    fetch<128, 256>(keys, k, 0, end, b, s.batch, kvh, s.kv_heads);
    // The next tile of keys and this one of values are on their way while the products of this one are made.
    const auto turn = [&](int tile) {
        copies_done();
        __syncthreads(); // and nobody reads any more what is overwritten next
        if (tile + 1 < tiles) fetch<128, 256>(keys + (tile + 1) % 2 * TILE_BYTES(128), k, (tile + 1) * (i64)128, end, b, s.batch, kvh, s.kv_heads);
        if (tile < tiles) fetch<128, 256>(values + tile % 2 * TILE_BYTES(128), v, tile * (i64)128, end, b, s.batch, kvh, s.kv_heads);
    };
    const auto soften = [&](int tile) {
        const i64 key = tile * (i64)128;
        if (key + 128 > all) UNROLL for (int half = 0; half < 2; half++) hide(p, half, visible(s, row + 8 * half, key, 128, 2 * t));
        take(&soft, p, old, scale);
    };
    const auto pass_on = [&]() {
        UNROLL for (int c = 0; c < 16; c++) UNROLL for (int e = 0; e < 4; e++) sum[c][e] *= old[e / 2];
        UNROLL for (int c = 0; c < 8; c++) as_operand(weights[c], p[2 * c], p[2 * c + 1]);
    };
    turn(0);
    products_begin();
    scores(p, mine, keys);
    products_wait<0>();
    settle<16>(p);
    soften(0);
    pass_on();
    for (int tile = 1; tile < tiles; tile++) {
        turn(tile);
        settle<16>(p), settle<16>(sum);
        products_begin();
        scores(p, mine, keys + tile % 2 * TILE_BYTES(128));
        weigh(sum, weights, values + (tile + 1) % 2 * TILE_BYTES(128));
        products_wait<1>();
        settle<16>(p);
        soften(tile);
        products_wait<0>();
        settle<16>(sum);
        pass_on();
    }
    turn(tiles);
    settle<16>(sum);
    products_begin();
    weigh(sum, weights, values + (tiles + 1) % 2 * TILE_BYTES(128));
    products_wait<0>();
    settle<16>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const float total = row_sum(soft.total[half]);
        const i64 r = row + 8 * half, at = (r * s.batch + b) * s.heads + h;
        if (r >= s.n) continue;
        const float factor = 1.0f / total;
        UNROLL for (int c = 0; c < 16; c++)
            store_pair(o + at * 128 + 8 * c + 2 * t, sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor);
        if (t == 0) lse[at] = (soft.largest[half] * scale + log2f(total)) * LN2;
    }
}

#define FORWARD(S, O)                                                                                                         \
    KERNEL(attention_hopper_##S, (O * o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, i64 n, i64 keys, i64 heads, \
                                  i64 kv_heads, i64 batch, i64 prefix, i64 accumulate)) {                                     \
        attention(o, lse, q, k, v, Heads{n, keys, heads, kv_heads, batch, prefix}, accumulate);                               \
    }
FOR_TYPES(FORWARD)
