// Attention in bf16 on Hopper's matrix units. Arguments, masks and layout are those of attention.cu. Each of two
// warpgroups handles 64 queries. Dynamic shared memory holds two tiles of keys and two of values, KEYS tokens each, so
// that the next tiles are copied while products use the current ones. While a warpgroup computes the softmax of a tile
// of keys, the product of the preceding probabilities with their values is under way. With the copy engine, which leaves
// the warpgroups free, the two take turns beginning products, so that the softmax of one overlaps the products of the
// other.
//
// Tiles are loaded in one of two ways. Either the threads that multiply copy them, with a barrier at every tile. Or
// the copy engine copies them, directed by one warp of a third warpgroup that has given its registers away; then no
// block-wide barrier is needed, and mbarriers track which tiles have arrived and which have been used. Both ways give
// the same bits.
#include "common.cuh"
#include "attention.cuh"
#include "hopper.cuh"

#define KEYS (DIM <= 128 ? 128 : DIM == 192 ? 112 : 80) // as many as shared memory holds

// Softmax is the state of a lane's two rows, which are eight apart.
struct Softmax {
    float largest[2], total[2];
};

// hide masks the scores of a row before the first and after the last key that it sees.
template <int DIM> DEV void hide(float (*p)[4], int half, int first, int last) {
    UNROLL for (int c = 0; c < KEYS / 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++)
        if (8 * c + e % 2 > last || 8 * c + e % 2 < first) p[c][e] = MINUS_INFINITY;
}

// take converts the scores of a tile into probabilities and sets old to the factor that rescales earlier sums.
template <int DIM> DEV void take(Softmax *x, float (*p)[4], float *old, float scale) {
    UNROLL for (int half = 0; half < 2; half++) {
        float m = x->largest[half];
        UNROLL for (int c = 0; c < KEYS / 8; c++) m = fmaxf(m, fmaxf(p[c][2 * half], p[c][2 * half + 1]));
        m = row_max(m);
        old[half] = power2((x->largest[half] - m) * scale);
        float part = 0;
        UNROLL for (int c = 0; c < KEYS / 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++) {
            p[c][e] = power2(p[c][e] * scale - m * scale);
            part += p[c][e];
        }
        x->total[half] = x->total[half] * old[half] + part; // of this lane; the row's four lanes are combined at the end
        x->largest[half] = m;
    }
}

// scores begins the product of a warpgroup's queries with a tile of keys.
template <int DIM> DEV void scores(float (*p)[4], u32 queries, u32 keys) {
    UNROLL for (int s = 0; s < DIM / 16; s++) wgmma_rows<KEYS>(p, by_rows<DIM, 128>(queries, 16 * s), by_rows<DIM, KEYS>(keys, 16 * s), s > 0);
    products_commit();
}
// weigh begins to add the product of probabilities with a tile of values.
template <int DIM> DEV void weigh(float (*sum)[4], const u32 (*p)[4], u32 values) {
    UNROLL for (int s = 0; s < KEYS / 16; s++) wgmma_gather<DIM>(sum, p[s], by_columns<DIM, KEYS>(values, 16 * s));
    products_commit();
}

// Part describes a block's share of the work and the addresses of its tiles.
struct Part {
    i64 first, h, b, kvh;
    i64 begin, end; // keys that some row sees, starting at the first tile
    int tiles;
    unsigned char *queries, *keys, *values;
};
template <int DIM> DEV Part part_of(const Heads &s, unsigned char *memory) {
    Part x;
    x.first = (i64)(gridDim.x - 1 - blockIdx.x) * 128; // longest rows first
    x.h = blockIdx.y, x.b = blockIdx.z, x.kvh = x.h / (s.heads / s.kv_heads);
    x.end = min(s.keys, s.prefix + min(x.first + 128, s.n));
    x.begin = s.first_tile(x.first, KEYS);
    x.tiles = (int)((x.end - x.begin + KEYS - 1) / KEYS);
    x.queries = tile_start(memory), x.keys = x.queries + TILE_BYTES(128), x.values = x.keys + 2 * TILE_BYTES(KEYS);
    return x;
}

// attend does the work of warpgroup `group`, one of two. Way provides tiles. soon(t) returns when the keys of
// tile t have arrived; before(t) returns when the values of tile t-1 have arrived, too. keys_used and values_used
// report that a tile is no longer needed. turn(g) waits for the turn of warpgroup g; pass(g) grants it.
//
// soon(t) is called between a softmax and the wait for the concurrent product. Without it, ptxas would hoist
// that wait within its basic block, ahead of the whole softmax, and nothing would overlap. The loop in which
// soon(t) waits for a tile ends the basic block.
template <int DIM, class O, class Way>
DEV void attend(O *o, float *lse, const Heads &s, const Part &x, int group, i64 accumulate, Way way) {
    const unsigned char *const mine = x.queries + group * 64 * ROW_BYTES;
    const int warp = (threadIdx.x >> 5 & 3) + 4 * group, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 row = x.first + warp * 16 + g; // the lane's rows: row, row+8
    const i64 from = s.first_key(min(x.first + 127, s.n - 1)), all = min(s.keys, s.prefix + x.first + 1); // keys that every row sees
    const float scale = SOFTCAP ? LOG2E : LOG2E / sqrtf((float)DIM);
    Softmax soft = {{LEAST, LEAST}, {0, 0}};
    float sum[DIM / 8][4], p[KEYS / 8][4], old[2];
    u32 weights[KEYS / 16][4];
    const auto place = [&](int half) { return (min(row + 8 * half, s.n - 1) * s.batch + x.b) * s.heads + x.h; };
    if (accumulate) UNROLL for (int half = 0; half < 2; half++) { // keys handled earlier count as one key with score lse and value o
        soft.largest[half] = fmaxf(lse[place(half)] * (LOG2E / scale), LEAST), soft.total[half] = t == 0; // lse is minus infinity if there were none
    }
    const auto soften = [&](int tile) {
        const i64 key = x.begin + tile * (i64)KEYS;
        if (SOFTCAP) bound<KEYS / 8>(p, s, 1.0f / sqrtf((float)DIM));
        if (key + KEYS > all || key < from) UNROLL for (int half = 0; half < 2; half++)
            hide<DIM>(p, half, hidden(s, row + 8 * half, key, KEYS, 2 * t), visible(s, row + 8 * half, key, KEYS, 2 * t));
        take<DIM>(&soft, p, old, scale);
    };
    const auto pass_on = [&]() {
        UNROLL for (int c = 0; c < KEYS / 16; c++) as_operand(weights[c], p[2 * c], p[2 * c + 1]);
    };
    way.first();
    products_begin();
    scores<DIM>(p, start_of(mine), start_of(x.keys));
    products_wait<0>();
    settle<KEYS / 8>(p);
    way.keys_used(0);
    soften(0);
    way.soon(1);
    pass_on();
    clear<DIM / 8>(sum); // only now, because the registers of many scores and sums would not suffice
    if (accumulate) UNROLL for (int half = 0; half < 2; half++) UNROLL for (int c = 0; c < DIM / 8; c++) UNROLL for (int e = 0; e < 2; e++)
        sum[c][2 * half + e] = as_float(o[place(half) * DIM + 8 * c + 2 * t + e]) * old[half];
    if (group == 1) way.pass(0);
    for (int tile = 1; tile < x.tiles; tile++) {
        way.before(tile);
        settle<KEYS / 8>(p), settle<DIM / 8>(sum), settle<KEYS / 16>(weights);
        way.turn(group);
        products_begin();
        scores<DIM>(p, start_of(mine), start_of(x.keys + tile % 2 * TILE_BYTES(KEYS)));
        weigh<DIM>(sum, weights, start_of(x.values + (tile + 1) % 2 * TILE_BYTES(KEYS)));
        way.pass(group ^ 1);
        products_wait<1>();
        settle<KEYS / 8>(p);
        way.keys_used(tile);
        soften(tile);
        way.soon(tile + 1);
        products_wait<0>();
        settle<DIM / 8>(sum), settle<KEYS / 16>(weights);
        way.values_used(tile - 1);
        UNROLL for (int c = 0; c < DIM / 8; c++) UNROLL for (int e = 0; e < 4; e++) sum[c][e] *= old[e / 2];
        pass_on();
    }
    if (group == 0) way.turn(0); // the last turn that was passed
    way.before(x.tiles);
    settle<DIM / 8>(sum), settle<KEYS / 16>(weights);
    products_begin();
    weigh<DIM>(sum, weights, start_of(x.values + (x.tiles + 1) % 2 * TILE_BYTES(KEYS)));
    products_wait<0>();
    settle<DIM / 8>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const float total = row_sum(soft.total[half]);
        const i64 r = row + 8 * half, at = (r * s.batch + x.b) * s.heads + x.h;
        if (r >= s.n) continue;
        const float factor = share(total);
        UNROLL for (int c = 0; c < DIM / 8; c++)
            store_pair(o + at * DIM + 8 * c + 2 * t, sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor);
        if (t == 0) lse[at] = (soft.largest[half] * scale + log2f(total)) * LN2;
    }
}

// ByThreads copies the next tile of keys and the current tile of values while the products of the current tile run.
template <int DIM> struct ByThreads {
    const bf16 *k, *v;
    const Heads &s;
    const Part &x;
    METHOD void keys(int tile) const {
        if (tile < x.tiles) fetch<DIM, KEYS, 256>(x.keys + tile % 2 * TILE_BYTES(KEYS), k, x.begin + tile * (i64)KEYS, x.end, x.b, s.batch, x.kvh, s.kv_heads);
    }
    METHOD void values(int tile) const {
        if (tile < x.tiles) fetch<DIM, KEYS, 256>(x.values + tile % 2 * TILE_BYTES(KEYS), v, x.begin + tile * (i64)KEYS, x.end, x.b, s.batch, x.kvh, s.kv_heads);
    }
    METHOD void first() const {
        copies_done();
        __syncthreads();
        keys(1), values(0);
    }
    METHOD void soon(int tile) const {
        copies_done();
        __syncthreads(); // no thread reads the earlier keys any longer
        keys(tile + 1);
    }
    METHOD void before(int tile) const {
        __syncthreads(); // no thread reads the values of tile-2 any longer
        values(tile);
    }
    METHOD void keys_used(int) const {}
    METHOD void values_used(int) const {}
    METHOD void turn(int) const {} // the warpgroups meet at every tile
    METHOD void pass(int) const {}
};

template <int DIM, class O>
DEV void attention(O *o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = part_of<DIM>(s, memory);
    fetch<DIM, 128, 256>(x.queries, q, x.first, s.n, x.b, s.batch, x.h, s.heads);
    fetch<DIM, KEYS, 256>(x.keys, k, x.begin, x.end, x.b, s.batch, x.kvh, s.kv_heads);
    attend<DIM>(o, lse, s, x, threadIdx.x / 128, accumulate, ByThreads<DIM>{k, v, s, x});
}

// Barriers for the copy engine. For each of two tile slots they track whether keys and values have arrived and
// whether they have been used. The last barrier is for the queries.
enum { KEYS_HERE = 0, VALUES_HERE = 2, KEYS_USED = 4, VALUES_USED = 6, QUERIES_HERE = 8, BARRIERS = 9 };
#define MULTIPLYING 8 // warps

struct ByEngine {
    u64 *barriers;
    int tiles;
    METHOD void first() const {
        barrier_wait(barriers + QUERIES_HERE, 0);
        soon(0);
    }
    METHOD void soon(int tile) const {
        if (tile < tiles) barrier_wait(barriers + KEYS_HERE + tile % 2, tile / 2 & 1);
    }
    METHOD void before(int tile) const { barrier_wait(barriers + VALUES_HERE + (tile - 1) % 2, (tile - 1) / 2 & 1); }
    METHOD void keys_used(int tile) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barriers + KEYS_USED + tile % 2);
    }
    METHOD void values_used(int tile) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barriers + VALUES_USED + tile % 2);
    }
    METHOD void turn(int group) const { turn_wait(group); }
    METHOD void pass(int group) const { turn_pass(group); }
};

// bring has one lane request a tile of TOKENS tokens from the copy engine. A map's box holds these tokens of a panel.
template <int DIM, int TOKENS> DEV void bring(unsigned char *to, const unsigned char *map, u64 *here, i64 head, i64 sequence, i64 token) {
    if ((threadIdx.x & 31) != 0) return;
    barrier_expect(here, TILE_BYTES(TOKENS));
    UNROLL for (int e = 0; e < DIM; e += PANEL) bulk_copy(to + e / PANEL * TOKENS * ROW_BYTES, map, here, e, (int)head, (int)sequence, (int)token);
}

// direct does the work of the warp that requests tiles. Each tile overwrites the second tile before it, once
// that tile has been used.
template <int DIM> DEV void direct(const unsigned char *maps, u64 *barriers, const Part &x) {
    const unsigned char *const of_q = maps, *const of_k = maps + 128, *const of_v = maps + 256;
    map_ready(of_q), map_ready(of_k), map_ready(of_v);
    const auto keys = [&](int tile) {
        barrier_wait(barriers + KEYS_USED + tile % 2, (tile / 2 & 1) ^ 1);
        bring<DIM, KEYS>(x.keys + tile % 2 * TILE_BYTES(KEYS), of_k, barriers + KEYS_HERE + tile % 2, x.kvh, x.b, x.begin + tile * (i64)KEYS);
    };
    bring<DIM, 128>(x.queries, of_q, barriers + QUERIES_HERE, x.h, x.b, x.first);
    keys(0);
    for (int tile = 0; tile < x.tiles; tile++) {
        if (tile + 1 < x.tiles) keys(tile + 1);
        barrier_wait(barriers + VALUES_USED + tile % 2, (tile / 2 & 1) ^ 1);
        bring<DIM, KEYS>(x.values + tile % 2 * TILE_BYTES(KEYS), of_v, barriers + VALUES_HERE + tile % 2, x.kvh, x.b, x.begin + tile * (i64)KEYS);
    }
}

template <int DIM, class O> DEV void attention_bulk(O *o, float *lse, const unsigned char *maps, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = part_of<DIM>(s, memory);
    u64 *const barriers = (u64 *)(x.values + 2 * TILE_BYTES(KEYS));
    if (threadIdx.x == 0) {
        UNROLL for (int i = 0; i < BARRIERS; i++) barrier_init(barriers + i, i == QUERIES_HERE || i < KEYS_USED ? 1 : MULTIPLYING);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x < 32) direct<DIM>(maps, barriers, x);
    } else {
        registers_up<240>();
        attend<DIM>(o, lse, s, x, threadIdx.x / 128 - 1, accumulate, ByEngine{barriers, x.tiles});
    }
}

#define FORWARD(DIM, S, O)                                                                                                     \
    KERNEL(VARIANT(attention_hopper_##DIM##_##S), (O * o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, i64 n,      \
                                                   i64 keys, i64 heads, i64 kv_heads, i64 batch, i64 prefix, i64 window,       \
                                                   double softcap, i64 accumulate POSITIONS)) {                                \
        attention<DIM>(o, lse, q, k, v, HEADS, accumulate);                                                                    \
    }                                                                                                                          \
    KERNEL_THREE(VARIANT(attention_bulk_##DIM##_##S), (O * o, float *lse, const unsigned char *maps, i64 n, i64 keys,          \
                                                       i64 heads, i64 kv_heads, i64 batch, i64 prefix, i64 window,             \
                                                       double softcap, i64 accumulate POSITIONS)) {                            \
        attention_bulk<DIM>(o, lse, maps, HEADS, accumulate);                                                                  \
    }
FORWARD(64, f, float)
FORWARD(64, b, bf16)
FORWARD(80, f, float)
FORWARD(80, b, bf16)
FORWARD(96, f, float)
FORWARD(96, b, bf16)
FORWARD(128, f, float)
FORWARD(128, b, bf16)
FORWARD(192, f, float)
FORWARD(192, b, bf16)
FORWARD(256, f, float)
FORWARD(256, b, bf16)
