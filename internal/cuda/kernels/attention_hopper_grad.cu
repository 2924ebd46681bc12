// The gradient of attention in bf16 on Hopper's matrix units. Arguments, masks and layout are those of attention.cu. A
// block has two warpgroups that multiply. It keeps two tiles and loops over pairs of tiles. For dq it keeps queries and
// their gradient, 64 of each per warpgroup, and loops over keys and values; for dk and dv it is the other way round. There
// are slots for three pairs: one being copied, one in the products with the kept tiles, one in the sums.
//
// For dk and dv of wide heads, a warpgroup cannot hold both sums. The block then keeps only 64 keys and values: one
// warpgroup computes the probabilities and dv, the other dk, for which it gets the probabilities through shared memory.
//
// Tiles are loaded in either of the two ways of attention_hopper.cu, which give the same bits.
#include "common.cuh"
#include "attention.cuh"
#include "hopper.cuh"

#define WIDE (DIM > 128)
#define KEYS (!WIDE ? 64 : DIM == 192 ? 48 : 32) // of a pair: as many as shared memory holds
#define OWN (DIM < 256) // whether queries are in registers
#define KEPT_KEYS (!WIDE ? 128 : 64)
#define PAIR(tokens) (2 * TILE_BYTES(tokens))
#define PASSED_BYTES (WIDE ? 64 * 64 * 4 : 0) // probabilities on their way to the other warpgroup

// compare begins the product [64,TOKENS] of a warpgroup's rows of a kept tile of KEPT tokens with a tile of a pair.
template <int DIM, int KEPT, int TOKENS> DEV void compare(float (*d)[4], u32 kept, u32 tile) {
    UNROLL for (int s = 0; s < DIM / 16; s++) wgmma_rows<TOKENS>(d, by_rows<DIM, KEPT>(kept, 16 * s), by_rows<DIM, TOKENS>(tile, 16 * s), s > 0);
    products_commit();
}
// compare_own does the same with the rows in registers. Shared memory is then read for the tile only, half as much.
template <int DIM, int TOKENS> DEV void compare_own(float (*d)[4], const u32 (*rows)[4], u32 tile) {
    UNROLL for (int s = 0; s < DIM / 16; s++) wgmma_own<TOKENS>(d, rows[s], by_rows<DIM, TOKENS>(tile, 16 * s), s > 0);
    products_commit();
}
// add begins to add the product of weights [64,TOKENS] with a tile of a pair.
template <int DIM, int TOKENS> DEV void add(float (*sum)[4], const u32 (*weights)[4], u32 tile) {
    UNROLL for (int s = 0; s < TOKENS / 16; s++) wgmma_gather<DIM>(sum, weights[s], by_columns<DIM, TOKENS>(tile, 16 * s));
}
template <int TOKENS> DEV void as_weights(u32 (*weights)[4], const float (*p)[4]) {
    UNROLL for (int c = 0; c < TOKENS / 16; c++) as_operand(weights[c], p[2 * c], p[2 * c + 1]);
}

// Part describes a block's share of the work and the addresses of its tiles. For dk and dv, pair t holds
// queries of head(t), starting at query(t).
struct Part {
    i64 first, b, kvh; // of the kept tiles
    i64 h, begin, end; // for dq: the head, and the keys that some row sees, starting at the first tile
    i64 start, stop, group; // for dk and dv: the queries and heads that see the keys
    int each, tiles;   // pairs per head, and in total
    int own, tokens, slots; // tokens of a kept tile, tokens of a tile of a pair, slots for pairs; constants
    unsigned char *kept, *pairs, *passed;
    float *stats; // lse and delta for the queries of each pair
    METHOD i64 head(int tile) const { return kvh * group + tile / each; }
    METHOD i64 key(int tile) const { return begin + tile * (i64)tokens; }
    METHOD i64 query(int tile) const { return start + tile % each * (i64)tokens; }
};
template <int DIM> DEV void places(Part *x, unsigned char *memory, int own, int tokens, int slots, int passed) {
    x->own = own, x->tokens = tokens, x->slots = slots;
    x->kept = tile_start(memory), x->pairs = x->kept + 2 * TILE_BYTES(own), x->passed = x->pairs + slots * PAIR(tokens);
    x->stats = (float *)(x->passed + passed);
}
// of_queries gives a block 128 queries.
template <int DIM> DEV Part of_queries(const Heads &s, unsigned char *memory) {
    Part x;
    places<DIM>(&x, memory, 128, KEYS, 3, 0);
    x.first = (i64)(gridDim.x - 1 - blockIdx.x) * 128; // longest rows first
    x.h = blockIdx.y, x.b = blockIdx.z, x.kvh = x.h / (s.heads / s.kv_heads);
    x.end = min(s.keys, s.prefix + min(x.first + 128, s.n));
    x.begin = s.first_tile(x.first, KEYS);
    x.tiles = (int)((x.end - x.begin + KEYS - 1) / KEYS);
    return x;
}
// of_keys gives a block keys and all queries that see them, over all heads of the group.
template <int DIM> DEV Part of_keys(const Heads &s, unsigned char *memory) {
    Part x;
    places<DIM>(&x, memory, KEPT_KEYS, 64, DIM == 256 ? 2 : 3, PASSED_BYTES);
    x.first = (i64)blockIdx.x * KEPT_KEYS;
    x.kvh = blockIdx.y, x.b = blockIdx.z, x.group = s.heads / s.kv_heads;
    x.start = max(x.first - s.prefix, (i64)0) / 64 * 64;
    x.stop = max(s.end_of_queries(x.first + KEPT_KEYS), x.start);
    x.each = (int)((x.stop - x.start + 63) / 64), x.tiles = x.each * (int)x.group;
    return x;
}

// hold loads a warp's queries into registers.
template <int DIM> DEV void hold(u32 (*queries)[4], const unsigned char *kept, int row) {
    own_rows<DIM, 128>(queries, kept, row);
    settle<DIM / 16>(queries);
}

// change_queries computes warpgroup `group`'s part of dq. Way provides tiles. soon(t) and before(t) return when
// pair t has arrived; one of them precedes the products that read it. used(t) reports that a pair is no longer
// needed. Queries are in registers if these suffice. soon(t) also keeps ptxas from hoisting the wait for products above the exponentials (see attend).
template <int DIM, class O, class Way>
DEV void change_queries(O *dq, const float *lse, const float *delta, const Heads &s, const Part &x, int group, i64 accumulate, Way way) {
    const u32 kept = start_of(x.kept) + group * UNITS(64 * ROW_BYTES), pairs = start_of(x.pairs);
    const int warp = (threadIdx.x >> 5 & 3) + 4 * group, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 row = x.first + warp * 16 + g; // the lane's rows: row, row+8
    const i64 from = s.first_key(min(x.first + 127, s.n - 1)), all = min(s.keys, s.prefix + x.first + 1); // keys that every row sees
    const float factor = 1.0f / sqrtf((float)DIM), scale = SOFTCAP ? LOG2E : factor * LOG2E, inverse = 1.0f / (float)s.softcap;
    float sum[DIM / 8][4], p[KEYS / 8][4], dp[KEYS / 8][4], log_sum[2], del[2];
    u32 changes[KEYS / 16][4], queries[DIM / 16][4];
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 at = (min(row + 8 * half, s.n - 1) * s.batch + x.b) * s.heads + x.h;
        log_sum[half] = lse[at] * LOG2E, del[half] = delta[at];
    }
    const auto turn = [&](int tile) {
        const u32 mine = WIDE ? anew(kept) : kept, pair = pairs + tile % 3 * UNITS(PAIR(KEYS));
        settle<KEYS / 8>(p), settle<KEYS / 8>(dp);
        products_begin();
        if constexpr (OWN) compare_own<DIM, KEYS>(p, queries, pair);
        else compare<DIM, 128, KEYS>(p, mine, pair);
        compare<DIM, 128, KEYS>(dp, mine + UNITS(TILE_BYTES(128)), pair + UNITS(TILE_BYTES(KEYS)));
    };
    const auto weigh = [&](int tile) {
        const i64 key = x.key(tile);
        if (SOFTCAP) bound<KEYS / 8>(p, s, factor);
        if (key + KEYS > all || key < from) UNROLL for (int half = 0; half < 2; half++) {
            const int first_seen = hidden(s, row + 8 * half, key, KEYS, 2 * t), last = visible(s, row + 8 * half, key, KEYS, 2 * t);
            UNROLL for (int c = 0; c < KEYS / 8; c++) UNROLL for (int e = 2 * half; e < 2 * half + 2; e++)
                if (8 * c + e % 2 > last || 8 * c + e % 2 < first_seen) p[c][e] = MINUS_INFINITY;
        }
        UNROLL for (int c = 0; c < KEYS / 8; c++) UNROLL for (int e = 0; e < 4; e++) {
            const float weight = power2(p[c][e] * scale - log_sum[e / 2]);
            p[c][e] = SOFTCAP ? weight * slope(p[c][e], inverse) : weight;
        }
    };
    const auto change = [&]() {
        UNROLL for (int c = 0; c < KEYS / 8; c++) UNROLL for (int e = 0; e < 4; e++) p[c][e] *= dp[c][e] - del[e / 2];
    };
    way.before(0);
    if constexpr (OWN) hold<DIM>(queries, x.kept, warp * 16);
    turn(0);
    products_wait<0>();
    settle<KEYS / 8>(p), settle<KEYS / 8>(dp);
    weigh(0);
    change();
    as_weights<KEYS>(changes, p);
    clear<DIM / 8>(sum);
    for (int tile = 1; tile < x.tiles; tile++) {
        way.before(tile);
        settle<DIM / 8>(sum), settle<KEYS / 16>(changes);
        turn(tile);
        add<DIM, KEYS>(sum, changes, pairs + (tile - 1) % 3 * UNITS(PAIR(KEYS)));
        products_commit();
        products_wait<2>();
        settle<KEYS / 8>(p);
        weigh(tile);
        way.soon(tile + 1);
        products_wait<1>();
        settle<KEYS / 8>(dp);
        change();
        products_wait<0>();
        settle<DIM / 8>(sum), settle<KEYS / 16>(changes);
        way.used(tile - 1);
        as_weights<KEYS>(changes, p);
    }
    settle<DIM / 8>(sum), settle<KEYS / 16>(changes);
    products_begin();
    add<DIM, KEYS>(sum, changes, pairs + (x.tiles - 1) % 3 * UNITS(PAIR(KEYS)));
    products_commit();
    products_wait<0>();
    settle<DIM / 8>(sum);
    UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = (r * s.batch + x.b) * s.heads + x.h;
        if (r >= s.n) continue;
        UNROLL for (int c = 0; c < DIM / 8; c++)
            add_pair(dq + at * DIM + 8 * c + 2 * t, sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor, accumulate);
    }
}

// pass_weights gives probabilities to the same thread of the other warpgroup, which receives them in get_weights.
DEV void pass_weights(const Part &x, const float (*p)[4], int tile) {
    if (tile > 0) turn_wait(0); // for the other warpgroup to have taken the preceding ones
    Quad *const to = (Quad *)x.passed + threadIdx.x % 128;
    UNROLL for (int c = 0; c < 8; c++)
        to[128 * c] = Quad{__float_as_uint(p[c][0]), __float_as_uint(p[c][1]), __float_as_uint(p[c][2]), __float_as_uint(p[c][3])};
    turn_pass(1);
}
DEV void get_weights(const Part &x, float (*p)[4], int tile) {
    turn_wait(1);
    const Quad *const from = (const Quad *)x.passed + threadIdx.x % 128;
    UNROLL for (int c = 0; c < 8; c++) {
        const Quad four = from[128 * c];
        p[c][0] = __uint_as_float(four.x), p[c][1] = __uint_as_float(four.y), p[c][2] = __uint_as_float(four.z), p[c][3] = __uint_as_float(four.w);
    }
    if (tile + 1 < x.tiles) turn_pass(0);
}

// change_keys does the same for dk and dv. Products are transposed: rows are keys, columns are queries.
// Registers are scarce, so each sum begins as soon as its weights are ready, and nothing stays under way from
// one pair to the next. The other warpgroup fills the gaps. Sums says which sums this warpgroup computes.
enum Sums { OF_BOTH, OF_VALUES, OF_KEYS };
template <int DIM, Sums SUMS, class Way>
DEV void change_keys(float *dk, float *dv, const Heads &s, const Part &x, int group, i64 accumulate, Way way) {
    constexpr bool weighs = SUMS != OF_KEYS, changes_keys = SUMS != OF_VALUES;
    const u32 mine = start_of(x.kept) + group * UNITS(64 * ROW_BYTES), pairs = start_of(x.pairs);
    const int warp = (threadIdx.x >> 5 & 3) + 4 * group, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const i64 row = x.first + warp * 16 + g; // the lane's rows: row, row+8
    if (accumulate && x.tiles == 0) return;
    // Queries are counted from x.start; there are `queries` of them. Those in [seeing, until) see the row, and
    // those in [whole, end) see all rows of the block.
    const int queries = (int)(x.stop - x.start), seeing = (int)max(row - s.prefix - x.start, (i64)-8);
    const int until = (int)min(PACKED ? s.end_of_queries(row + 1) - x.start : row - s.prefix - x.start + s.window, (i64)queries);
    const int until8 = PACKED ? (int)min(s.end_of_queries(row + 9) - x.start, (i64)queries) : until + 8; // for row+8
    const int whole = (int)max(x.first + KEPT_KEYS - 1 - s.prefix - x.start, (i64)0);
    const int end = (int)min(PACKED ? s.end_of_queries(x.first + 1) - x.start : x.first - s.prefix - x.start + s.window, (i64)queries);
    const float factor = 1.0f / sqrtf((float)DIM), inverse = 1.0f / (float)s.softcap;
    float sum_k[DIM / 8][4], sum_v[DIM / 8][4], p[8][4], dp[8][4];
    u32 weights[4][4], changes[4][4];
    clear<DIM / 8>(sum_k), clear<DIM / 8>(sum_v);
    int base = 0; // first query of the tile
    for (int tile = 0; tile < x.tiles; tile++) {
        const u32 pair = pairs + tile % x.slots * UNITS(PAIR(64));
        const float *const log_sum = x.stats + tile % x.slots * 128 + 2 * t, *const del = log_sum + 64;
        way.before(tile);
        if constexpr (changes_keys) settle<DIM / 8>(sum_k);
        if constexpr (weighs) settle<DIM / 8>(sum_v);
        products_begin();
        if constexpr (weighs) compare<DIM, KEPT_KEYS, 64>(p, mine, pair);
        if constexpr (changes_keys) compare<DIM, KEPT_KEYS, 64>(dp, mine + UNITS(TILE_BYTES(KEPT_KEYS)), pair + UNITS(TILE_BYTES(64)));
        if constexpr (weighs) {
            products_wait<SUMS == OF_BOTH>(); // for the first product
            settle<8>(p);
            if (SOFTCAP) bound<8>(p, s, factor);
            if (base + 64 > end || base < whole) UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) {
                const int query = base + 8 * c + 2 * t + e % 2;
                if (query >= queries || query < seeing + 8 * (e / 2) || query >= (e / 2 ? until8 : until)) p[c][e] = MINUS_INFINITY;
            }
            if (!SOFTCAP) {
                UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++)
                    p[c][e] = power2((p[c][e] * factor - log_sum[8 * c + e % 2]) * LOG2E);
                as_weights<64>(weights, p);
            } else UNROLL for (int pair = 0; pair < 4; pair++) { // 16 columns at a time to save registers
                float weight[2][4];
                UNROLL for (int i = 0; i < 2; i++) UNROLL for (int e = 0; e < 4; e++) {
                    float *const score = p[2 * pair + i] + e;
                    weight[i][e] = power2((*score - log_sum[8 * (2 * pair + i) + e % 2]) * LOG2E);
                    *score = weight[i][e] * slope(*score, inverse);
                }
                as_operand(weights[pair], weight[0], weight[1]);
            }
            settle<4>(weights);
            products_begin();
            add<DIM, 64>(sum_v, weights, pair + UNITS(TILE_BYTES(64)));
            products_commit();
        }
        if constexpr (SUMS == OF_VALUES) pass_weights(x, p, tile);
        if constexpr (changes_keys) {
            products_wait<SUMS == OF_BOTH>(); // for the second
            settle<8>(dp);
            if constexpr (SUMS == OF_KEYS) get_weights(x, p, tile);
            UNROLL for (int c = 0; c < 8; c++) UNROLL for (int e = 0; e < 4; e++) dp[c][e] = p[c][e] * (dp[c][e] - del[8 * c + e % 2]);
            as_weights<64>(changes, dp);
            settle<4>(changes);
            products_begin();
            add<DIM, 64>(sum_k, changes, pair);
            products_commit();
        }
        products_wait<0>();
        if constexpr (changes_keys) settle<DIM / 8>(sum_k), settle<4>(changes);
        if constexpr (weighs) settle<DIM / 8>(sum_v), settle<4>(weights);
        way.used(tile);
        if ((base += 64) >= queries) base = 0; // start of the next head
    }
    UNROLL for (int c = 0; c < DIM / 8; c++) UNROLL for (int half = 0; half < 2; half++) {
        const i64 r = row + 8 * half, at = ((r * s.batch + x.b) * s.kv_heads + x.kvh) * DIM + 8 * c + 2 * t;
        if (r >= s.keys) continue;
        if (changes_keys) add_pair(dk + at, sum_k[c][2 * half] * factor, sum_k[c][2 * half + 1] * factor, accumulate);
        if (weighs) add_pair(dv + at, sum_v[c][2 * half], sum_v[c][2 * half + 1], accumulate);
    }
}

// change_either does the work of a warpgroup for dk, dv or both.
template <int DIM, class Way>
DEV void change_either(float *dk, float *dv, const Heads &s, const Part &x, int group, i64 accumulate, Way way) {
    if constexpr (!WIDE) change_keys<DIM, OF_BOTH>(dk, dv, s, x, group, accumulate, way);
    else if (group == 0) change_keys<DIM, OF_VALUES>(dk, dv, s, x, 0, accumulate, way);
    else change_keys<DIM, OF_KEYS>(dk, dv, s, x, 0, accumulate, way);
}

// ByThreads copies the next pair while the products of the current one run.
template <class Bring> struct ByThreads {
    const Bring &bring;
    int tiles;
    METHOD void soon(int tile) const {
        if (tile < tiles) copies_done();
    }
    METHOD void before(int tile) const {
        copies_done();
        __syncthreads(); // no thread is still reading the slot that will be overwritten next
        if (tile + 1 < tiles) bring(tile + 1);
    }
    METHOD void used(int) const {}
};

// keep_by_threads loads the kept tiles of KEPT tokens.
template <int DIM, int KEPT>
DEV void keep_by_threads(const Part &x, const bf16 *one, const bf16 *other, i64 tokens, i64 batch, i64 head, i64 heads) {
    fetch<DIM, KEPT, 256>(x.kept, one, x.first, tokens, x.b, batch, head, heads);
    fetch<DIM, KEPT, 256>(x.kept + TILE_BYTES(KEPT), other, x.first, tokens, x.b, batch, head, heads);
}

template <int DIM, class O>
DEV void attention_dq(O *dq, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse, const float *delta,
                      const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = of_queries<DIM>(s, memory);
    const auto bring = [&](int tile) {
        unsigned char *const to = x.pairs + tile % 3 * PAIR(KEYS);
        fetch<DIM, KEYS, 256>(to, k, x.key(tile), x.end, x.b, s.batch, x.kvh, s.kv_heads);
        fetch<DIM, KEYS, 256>(to + TILE_BYTES(KEYS), v, x.key(tile), x.end, x.b, s.batch, x.kvh, s.kv_heads);
    };
    keep_by_threads<DIM, 128>(x, q, dout, s.n, s.batch, x.h, s.heads);
    bring(0);
    change_queries<DIM>(dq, lse, delta, s, x, warpgroup(), accumulate, ByThreads<decltype(bring)>{bring, x.tiles});
}

template <int DIM>
DEV void attention_dkv(float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v, const float *lse,
                       const float *delta, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = of_keys<DIM>(s, memory);
    const auto bring = [&](int tile) {
        unsigned char *const to = x.pairs + tile % x.slots * PAIR(64);
        const i64 h = x.head(tile), base = x.query(tile);
        fetch<DIM, 64, 256>(to, q, base, s.n, x.b, s.batch, h, s.heads);
        fetch<DIM, 64, 256>(to + TILE_BYTES(64), dout, base, s.n, x.b, s.batch, h, s.heads);
        if (threadIdx.x < 128) {
            const i64 query = base + threadIdx.x % 64, at = (min(query, s.n - 1) * s.batch + x.b) * s.heads + h;
            copy_word(x.stats + tile % x.slots * 128 + threadIdx.x, (threadIdx.x < 64 ? lse : delta) + at, query < s.n);
        }
    };
    if (x.tiles > 0) {
        keep_by_threads<DIM, KEPT_KEYS>(x, k, v, s.keys, s.batch, x.kvh, s.kv_heads);
        bring(0);
    }
    change_either<DIM>(dk, dv, s, x, warpgroup(), accumulate, ByThreads<decltype(bring)>{bring, x.tiles});
}

// Barriers for the copy engine. For each of at most three slots they track whether its pair has arrived and whether it has
// been used. The last barrier is for the kept tiles.
enum { PAIR_HERE = 0, PAIR_USED = 3, KEPT_HERE = 6, BARRIERS = 7 };
#define MULTIPLYING 8 // warps

struct ByEngine {
    u64 *barriers;
    int tiles, slots;
    METHOD void soon(int tile) const {
        if (tile < tiles) barrier_wait(barriers + PAIR_HERE + tile % slots, tile / slots & 1);
    }
    METHOD void before(int tile) const {
        if (tile == 0) barrier_wait(barriers + KEPT_HERE, 0);
        soon(tile);
    }
    METHOD void used(int tile) const {
        __syncwarp(); // all lanes have read the statistics
        if ((threadIdx.x & 31) == 0) barrier_arrive(barriers + PAIR_USED + tile % slots);
    }
};
// barriers_of initialises the barriers. A pair is complete after the given number of arrivals.
template <int DIM> DEV u64 *barriers_of(const Part &x, int arrivals) {
    u64 *const barriers = (u64 *)(x.stats + x.slots * 128);
    if (threadIdx.x == 0) {
        UNROLL for (int i = 0; i < BARRIERS; i++) barrier_init(barriers + i, i < PAIR_USED ? arrivals : i < KEPT_HERE ? MULTIPLYING : 1);
        barriers_ready();
    }
    __syncthreads();
    return barriers;
}

// bring requests tokens from the copy engine, as part of a tile of the given number of tokens. A map's box holds
// them for a panel.
template <int DIM> DEV void bring(unsigned char *to, int tokens, const unsigned char *map, u64 *here, i64 head, i64 sequence, i64 token) {
    UNROLL for (int e = 0; e < DIM; e += PANEL) bulk_copy(to + e / PANEL * tokens * ROW_BYTES, map, here, e, (int)head, (int)sequence, (int)token);
}
template <int DIM> DEV void keep(const Part &x, const unsigned char *one, const unsigned char *other, u64 *barriers, i64 head) {
    if ((threadIdx.x & 31) != 0) return;
    barrier_expect(barriers + KEPT_HERE, 2 * TILE_BYTES(x.own));
    for (int half = 0; half < x.own / 64; half++) {
        unsigned char *const to = x.kept + half * 64 * ROW_BYTES;
        bring<DIM>(to, x.own, one, barriers + KEPT_HERE, head, x.b, x.first + 64 * half);
        bring<DIM>(to + TILE_BYTES(x.own), x.own, other, barriers + KEPT_HERE, head, x.b, x.first + 64 * half);
    }
}
// pair has one lane request a pair from the copy engine, once the pair's slot is free.
template <int DIM>
DEV void pair(const Part &x, int tile, const unsigned char *one, const unsigned char *other, u64 *barriers, i64 head, i64 token) {
    u64 *const here = barriers + PAIR_HERE + tile % x.slots;
    unsigned char *const to = x.pairs + tile % x.slots * PAIR(x.tokens);
    barrier_wait(barriers + PAIR_USED + tile % x.slots, (tile / x.slots & 1) ^ 1);
    if ((threadIdx.x & 31) != 0) return;
    barrier_expect(here, PAIR(x.tokens));
    bring<DIM>(to, x.tokens, one, here, head, x.b, token);
    bring<DIM>(to + TILE_BYTES(x.tokens), x.tokens, other, here, head, x.b, token);
}
DEV void maps_ready(const unsigned char *maps) { UNROLL for (int i = 0; i < 4; i++) map_ready(maps + 128 * i); }

// The maps are those of q, dout, k and v.
template <int DIM, class O>
DEV void bulk_dq(O *dq, const unsigned char *maps, const float *lse, const float *delta, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = of_queries<DIM>(s, memory);
    u64 *const barriers = barriers_of<DIM>(x, 1);
    if (threadIdx.x >= 128) {
        registers_up<240>();
        return change_queries<DIM>(dq, lse, delta, s, x, warpgroup() - 1, accumulate, ByEngine{barriers, x.tiles, x.slots});
    }
    registers_down<24>();
    if (threadIdx.x >= 32) return;
    maps_ready(maps);
    keep<DIM>(x, maps, maps + 128, barriers, x.h);
    for (int tile = 0; tile < x.tiles; tile++) pair<DIM>(x, tile, maps + 256, maps + 384, barriers, x.kvh, x.key(tile));
}

template <int DIM>
DEV void bulk_dkv(float *dk, float *dv, const unsigned char *maps, const float *lse, const float *delta, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    const Part x = of_keys<DIM>(s, memory);
    u64 *const barriers = barriers_of<DIM>(x, 2);
    if (threadIdx.x >= 128) {
        registers_up<240>();
        return change_either<DIM>(dk, dv, s, x, warpgroup() - 1, accumulate, ByEngine{barriers, x.tiles, x.slots});
    }
    registers_down<24>();
    if (threadIdx.x >= 32 || x.tiles == 0) return;
    maps_ready(maps);
    keep<DIM>(x, maps + 256, maps + 384, barriers, x.kvh);
    for (int tile = 0; tile < x.tiles; tile++) {
        const i64 h = x.head(tile), base = x.query(tile);
        pair<DIM>(x, tile, maps, maps + 128, barriers, h, base);
        UNROLL for (int i = 0; i < 4; i++) { // statistics are too small for the copy engine
            const int at = (threadIdx.x & 31) + 32 * i;
            const i64 query = base + at % 64;
            x.stats[tile % x.slots * 128 + at] = query < s.n ? (i < 2 ? lse : delta)[(query * s.batch + x.b) * s.heads + h] : 0.0f;
        }
        __syncwarp();
        if (threadIdx.x == 0) barrier_arrive(barriers + PAIR_HERE + tile % x.slots);
    }
}

#define RESULTS(DIM, S, O)                                                                                                     \
    KERNEL(VARIANT(attention_hopper_dq_##DIM##_##S), (O * dq, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v,   \
                                                      const float *lse, const float *delta, i64 n, i64 keys, i64 heads,        \
                                                      i64 kv_heads, i64 batch, i64 prefix, i64 window, double softcap,         \
                                                      i64 accumulate POSITIONS)) {                                             \
        attention_dq<DIM>(dq, dout, q, k, v, lse, delta, HEADS, accumulate);                                                   \
    }                                                                                                                          \
    KERNEL_THREE(VARIANT(attention_bulk_dq_##DIM##_##S), (O * dq, const unsigned char *maps, const float *lse,                 \
                                                          const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads,        \
                                                          i64 batch, i64 prefix, i64 window, double softcap,                   \
                                                          i64 accumulate POSITIONS)) {                                         \
        bulk_dq<DIM>(dq, maps, lse, delta, HEADS, accumulate);                                                                 \
    }
#define GRADIENTS(DIM)                                                                                                         \
    RESULTS(DIM, f, float)                                                                                                     \
    RESULTS(DIM, b, bf16)                                                                                                      \
    KERNEL(VARIANT(attention_hopper_dkv_##DIM), (float *dk, float *dv, const bf16 *dout, const bf16 *q, const bf16 *k,         \
                                                 const bf16 *v, const float *lse, const float *delta, i64 n, i64 keys,         \
                                                 i64 heads, i64 kv_heads, i64 batch, i64 prefix, i64 window, double softcap,   \
                                                 i64 accumulate POSITIONS)) {                                                  \
        attention_dkv<DIM>(dk, dv, dout, q, k, v, lse, delta, HEADS, accumulate);                                              \
    }                                                                                                                          \
    KERNEL_THREE(VARIANT(attention_bulk_dkv_##DIM), (float *dk, float *dv, const unsigned char *maps, const float *lse,        \
                                                     const float *delta, i64 n, i64 keys, i64 heads, i64 kv_heads,             \
                                                     i64 batch, i64 prefix, i64 window, double softcap,                        \
                                                     i64 accumulate POSITIONS)) {                                              \
        bulk_dkv<DIM>(dk, dv, maps, lse, delta, HEADS, accumulate);                                                            \
    }
GRADIENTS(64)
GRADIENTS(80)
GRADIENTS(96)
GRADIENTS(128)
GRADIENTS(192)
GRADIENTS(256)
