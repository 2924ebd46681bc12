// Attention in bf16 by Hopper's matrix units, for heads of 128. Arguments, masks and layout are those of attention.cu. A
// block has two warpgroups, each 64 queries; tiles of 128 tokens lie in dynamic shared memory, two of keys and two of
// values, so that copies of the next run while products of this one do. While a warpgroup takes the softmax of a tile of
// keys, the product of the probabilities before with their values is under way.
#include "common.cuh"
#include "attention.cuh"

// A tile is two panels of 64 elements by 128 tokens: rows of 128 bytes, whose chunks of 16 change places by the row, so that
// chunk c of row r is at c^(r%8). Tiles start at multiples of 1024 bytes: then the places are those that wgmma computes
// from addresses alone.
#define PANEL (128 * 128)
#define TILE (2 * PANEL)

#ifndef CUDA_EMULATOR
DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// copy_chunk begins to copy 16 bytes to shared memory, or zeros.
DEV void copy_chunk(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// copies_done waits for the chunks of this thread, and shows them to the matrix units, which read memory by a way of their own.
DEV void copies_done() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// products_wait waits until at most N groups of products are under way.
template <int N> DEV void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// settle keeps the compiler from moving uses of accumulators over a wait.
DEV void settle(float (*d)[4]) {
    UNROLL for (int i = 0; i < 16; i++) UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[i][e])::"memory");
}
#define FOUR(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define ACCUMULATORS(d)                                                                                                       \
    FOUR(d[0]), FOUR(d[1]), FOUR(d[2]), FOUR(d[3]), FOUR(d[4]), FOUR(d[5]), FOUR(d[6]), FOUR(d[7]), FOUR(d[8]), FOUR(d[9]),   \
        FOUR(d[10]), FOUR(d[11]), FOUR(d[12]), FOUR(d[13]), FOUR(d[14]), FOUR(d[15])
#define PLACES                                                                                                                \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"    \
    "%61,%62,%63}"
// wgmma_rows: d[64,128] = or += a[64,16] b[128,16]^T by a warpgroup; a and b are descriptors of tiles.
DEV void wgmma_rows(float (*d)[4], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " PLACES ", %64, %65, p, 1, 1, 0, 0; }"
                 : ACCUMULATORS(d) : "l"(a), "l"(b), "r"(add));
}
// wgmma_gather: d[64,128] += a[64,16] b[16,128]; a in registers as for mma.sync, b a descriptor of a tile.
DEV void wgmma_gather(float (*d)[4], const u32 *a, u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " PLACES ", {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"
                 : ACCUMULATORS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
DEV float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Descriptors of tiles, with chunks exchanged over 128 bytes. by_rows: 16 of the 128 elements of each of its tokens, eight tokens
// are 1024 bytes. by_columns: all elements of 16 of its tokens; panels are PANEL bytes apart, eight tokens 1024.
DEV u64 descriptor(const unsigned char *at, u64 leading, u64 stride) {
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | (u64)1 << 62;
}
DEV u64 by_rows(const unsigned char *tile, int token, int element) {
    return descriptor(tile + element / 64 * PANEL + token * 128 + element % 64 * 2, 16, 1024);
}
DEV u64 by_columns(const unsigned char *tile, int token) { return descriptor(tile + token * 128, PANEL, 1024); }

// fetch begins to bring 128 tokens of a head to a tile, zeros where there are no more.
DEV void fetch(unsigned char *tile, const bf16 *p, i64 token, i64 tokens, i64 sequence, i64 batch, i64 head, i64 heads) {
    const bool whole = aligned(p);
    for (int i = threadIdx.x; i < 128 * 16; i += 256) {
        const int r = i / 16, c = i % 16;
        unsigned char *const to = tile + c / 8 * PANEL + r * 128 + ((c ^ r) & 7) * 16;
        const bool there = token + r < tokens;
        const bf16 *const from = there ? p + (((token + r) * batch + sequence) * heads + head) * 128 + c * 8 : p;
        if (whole) {
            copy_chunk(to, from, there);
        } else {
            u32 words[4];
            UNROLL for (int w = 0; w < 4; w++) words[w] = there ? (u32)from[2 * w].bits | (u32)from[2 * w + 1].bits << 16 : 0;
            *(Quad *)to = Quad{words[0], words[1], words[2], words[3]};
        }
    }
}

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
    UNROLL for (int s = 0; s < 8; s++) wgmma_rows(p, by_rows(queries, 0, 16 * s), by_rows(keys, 0, 16 * s), s > 0);
    products_commit();
}
// weigh begins to add the product of probabilities with a tile of values.
DEV void weigh(float (*sum)[4], const u32 (*p)[4], const unsigned char *values) {
    UNROLL for (int s = 0; s < 8; s++) wgmma_gather(sum, p[s], by_columns(values, 16 * s));
    products_commit();
}

template <class O>
DEV void attention(O *o, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const Heads &s, i64 accumulate) {
    DYNAMIC_SHARED(memory);
    unsigned char *const queries = memory + (1024 - shared_address(memory) % 1024) % 1024;
    unsigned char *const keys = queries + TILE, *const values = keys + 2 * TILE;
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
    fetch(queries, q, first, s.n, b, s.batch, h, s.heads);
    fetch(keys, k, 0, end, b, s.batch, kvh, s.kv_heads);
    // The next tile of keys and this one of values are on their way while the products of this one are made.
    const auto turn = [&](int tile) {
        copies_done();
        __syncthreads(); // and nobody reads any more what is overwritten next
        if (tile + 1 < tiles) fetch(keys + (tile + 1) % 2 * TILE, k, (tile + 1) * (i64)128, end, b, s.batch, kvh, s.kv_heads);
        if (tile < tiles) fetch(values + tile % 2 * TILE, v, tile * (i64)128, end, b, s.batch, kvh, s.kv_heads);
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
    settle(p);
    soften(0);
    pass_on();
    for (int tile = 1; tile < tiles; tile++) {
        turn(tile);
        settle(p), settle(sum);
        products_begin();
        scores(p, mine, keys + tile % 2 * TILE);
        weigh(sum, weights, values + (tile + 1) % 2 * TILE);
        products_wait<1>();
        settle(p);
        soften(tile);
        products_wait<0>();
        settle(sum);
        pass_on();
    }
    turn(tiles);
    settle(sum);
    products_begin();
    weigh(sum, weights, values + (tiles + 1) % 2 * TILE);
    products_wait<0>();
    settle(sum);
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
