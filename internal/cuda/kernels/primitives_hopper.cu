// The building blocks of the attention kernels for Hopper, as in primitives.cu: tiles in shared memory as threads and as
// the copy engine write them, products of both kinds, turns, barriers with two arrivals, and registers that change
// hands.
#include "common.cuh"
#include "attention.cuh"
#include "hopper.cuh"

// dump writes bytes of shared memory to y.
DEV void dump(u32 *y, const void *from, int bytes, int thread, int threads) {
    for (int i = thread; i < bytes / 4; i += threads) y[i] = ((const u32 *)from)[i];
}

// A tile of 128 tokens of one head, as the threads write it.
template <int DIM> DEV void tile_by_threads(u32 *y, const bf16 *x, i64 tokens, i64 heads, i64 head) {
    DYNAMIC_SHARED(memory);
    unsigned char *const tile = tile_start(memory);
    fetch<DIM, 128, 256>(tile, x, 0, tokens, 0, 1, head, heads);
    copies_done();
    __syncthreads();
    dump(y, tile, TILE_BYTES(128), threadIdx.x, 256);
}

// The same tile, as the copy engine writes it.
template <int DIM> DEV void tile_by_engine(u32 *y, const unsigned char *map, i64 head) {
    DYNAMIC_SHARED(memory);
    unsigned char *const tile = tile_start(memory);
    u64 *const here = (u64 *)(tile + TILE_BYTES(128));
    if (threadIdx.x == 0) {
        barrier_init(here, 1);
        barriers_ready();
        map_ready(map);
        barrier_expect(here, TILE_BYTES(128));
        UNROLL for (int e = 0; e < DIM; e += PANEL) bulk_copy(tile + e / PANEL * 128 * ROW_BYTES, map, here, e, (int)head, 0, 0);
    }
    __syncthreads();
    barrier_wait(here, 0);
    dump(y, tile, TILE_BYTES(128), threadIdx.x, 256);
}

// put_sums stores a warpgroup's accumulators of a product with COLUMNS columns.
template <int COLUMNS> DEV void put_sums(float *d, const float (*sum)[4]) {
    const int row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    UNROLL for (int c = 0; c < COLUMNS / 8; c++) UNROLL for (int e = 0; e < 4; e++)
        d[(row + e / 2 * 8) * COLUMNS + 8 * c + 2 * t + e % 2] = sum[c][e];
}

// d[128,COLUMNS] = a[128,DIM] b[COLUMNS,DIM]^T, with b in shared memory, and with a there, too, or in registers if OWN.
template <int DIM, int COLUMNS, bool OWN> DEV void product_of_rows(float *d, const bf16 *a, const bf16 *b) {
    DYNAMIC_SHARED(memory);
    unsigned char *const left = tile_start(memory), *const right = left + TILE_BYTES(128);
    fetch<DIM, 128, 256>(left, a, 0, 128, 0, 1, 0, 1);
    fetch<DIM, COLUMNS, 256>(right, b, 0, COLUMNS, 0, 1, 0, 1);
    copies_done();
    __syncthreads();
    const u32 mine = start_of(left) + warpgroup() * UNITS(64 * ROW_BYTES), other = start_of(right);
    float sum[COLUMNS / 8][4];
    u32 own[DIM / 16][4];
    if (OWN) own_rows<DIM, 128>(own, left, threadIdx.x / 32 * 16), settle<DIM / 16>(own);
    products_begin();
    UNROLL for (int s = 0; s < DIM / 16; s++) {
        const u64 of_a = by_rows<DIM, 128>(mine, 16 * s), of_b = by_rows<DIM, COLUMNS>(other, 16 * s);
        if constexpr (OWN) wgmma_own<COLUMNS>(sum, own[s], of_b, s > 0);
        else wgmma_rows<COLUMNS>(sum, of_a, of_b, s > 0);
    }
    products_commit();
    products_wait<0>();
    settle<COLUMNS / 8>(sum);
    put_sums<COLUMNS>(d, sum);
}

// d[128,DIM] = a[128,TOKENS] b[TOKENS,DIM], with a in registers.
template <int DIM, int TOKENS> DEV void product_of_columns(float *d, const bf16 *a, const bf16 *b) {
    DYNAMIC_SHARED(memory);
    unsigned char *const right = tile_start(memory);
    fetch<DIM, TOKENS, 256>(right, b, 0, TOKENS, 0, 1, 0, 1);
    copies_done();
    __syncthreads();
    const int row = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    u32 left[TOKENS / 16][4];
    UNROLL for (int s = 0; s < TOKENS / 16; s++) UNROLL for (int i = 0; i < 4; i++)
        left[s][i] = *(const u32 *)(a + (row + i % 2 * 8) * TOKENS + 16 * s + i / 2 * 8 + 2 * t);
    float sum[DIM / 8][4];
    clear<DIM / 8>(sum);
    settle<DIM / 8>(sum), settle<TOKENS / 16>(left);
    products_begin();
    UNROLL for (int s = 0; s < TOKENS / 16; s++) wgmma_gather<DIM>(sum, left[s], by_columns<DIM, TOKENS>(start_of(right), 16 * s));
    products_commit();
    products_wait<0>();
    settle<DIM / 8>(sum), settle<TOKENS / 16>(left);
    put_sums<DIM>(d, sum);
}

#define TILES(DIM)                                                                                                             \
    KERNEL(primitive_threads_##DIM, (u32 * y, const bf16 *x, i64 tokens, i64 heads, i64 head)) {                              \
        tile_by_threads<DIM>(y, x, tokens, heads, head);                                                                       \
    }                                                                                                                          \
    KERNEL(primitive_engine_##DIM, (u32 * y, const unsigned char *map, i64 head)) { tile_by_engine<DIM>(y, map, head); }
#define OWN_PRODUCTS(DIM, N)                                                                                                   \
    KERNEL(primitive_own_##DIM##_##N, (float *d, const bf16 *a, const bf16 *b)) { product_of_rows<DIM, N, true>(d, a, b); }   \
    PRODUCTS(DIM, N)
#define PRODUCTS(DIM, N)                                                                                                       \
    KERNEL(primitive_rows_##DIM##_##N, (float *d, const bf16 *a, const bf16 *b)) { product_of_rows<DIM, N, false>(d, a, b); } \
    KERNEL(primitive_columns_##DIM##_##N, (float *d, const bf16 *a, const bf16 *b)) { product_of_columns<DIM, N>(d, a, b); }
#define OF_DIM(DIM) TILES(DIM) OWN_PRODUCTS(DIM, 64) PRODUCTS(DIM, 128)
OF_DIM(64)
OF_DIM(80)
OF_DIM(96)
OF_DIM(128)
TILES(192) OWN_PRODUCTS(192, 48) PRODUCTS(192, 64) PRODUCTS(192, 112)
TILES(256) PRODUCTS(256, 32) PRODUCTS(256, 64) PRODUCTS(256, 80)

// Two warpgroups take turns; y[2*rounds] is the order of their turns: 0, 1, 0, 1 and so on.
KERNEL(primitive_turns, (float *y, i64 rounds)) {
    SHARED(int, next, 1);
    volatile int *const at = next;
    const int group = warpgroup();
    if (threadIdx.x == 0) *at = 0;
    __syncthreads();
    if (group == 1) turn_pass(0);
    for (i64 i = 0; i < rounds; i++) {
        turn_wait(group);
        if (threadIdx.x % 128 == 0) {
            const int n = *at;
            y[n] = (float)group;
            *at = n + 1;
        }
        turn_pass(group ^ 1);
    }
    if (group == 0) turn_wait(0); // the last turn that was passed
}

// A warp gives each of two warpgroups pairs of a box of the copy engine and of statistics that its lanes write. The
// barrier of a pair has two arrivals. Three slots are reused: y[tiles,2048] are the boxes, z[tiles,128] is w.
enum { PAIR_HERE = 0, PAIR_USED = 3, BARRIERS = 6 };
DEV void pairs(u32 *y, float *z, const unsigned char *map, const float *w, i64 tiles) {
    DYNAMIC_SHARED(memory);
    const int box = 64 * 128;
    unsigned char *const boxes = tile_start(memory);
    float *const stats = (float *)(boxes + 3 * box);
    u64 *const barriers = (u64 *)(stats + 3 * 128);
    if (threadIdx.x == 0) {
        UNROLL for (int i = 0; i < BARRIERS; i++) barrier_init(barriers + i, i < PAIR_USED ? 2 : 8);
        barriers_ready();
    }
    __syncthreads();
    const int thread = threadIdx.x - 128;
    if (thread >= 0) for (int tile = 0; tile < tiles; tile++) {
        barrier_wait(barriers + PAIR_HERE + tile % 3, tile / 3 & 1);
        dump(y + tile * (box / 4), boxes + tile % 3 * box, box, thread, 256);
        if (thread < 128) z[tile * 128 + thread] = stats[tile % 3 * 128 + thread];
        __syncwarp();
        if ((thread & 31) == 0) barrier_arrive(barriers + PAIR_USED + tile % 3);
    }
    if (threadIdx.x >= 32) return;
    map_ready(map);
    for (int tile = 0; tile < tiles; tile++) {
        barrier_wait(barriers + PAIR_USED + tile % 3, (tile / 3 & 1) ^ 1);
        if (threadIdx.x == 0) {
            barrier_expect(barriers + PAIR_HERE + tile % 3, box);
            bulk_copy(boxes + tile % 3 * box, map, barriers + PAIR_HERE + tile % 3, 0, 0, 0, 64 * tile);
        }
        UNROLL for (int i = 0; i < 4; i++) stats[tile % 3 * 128 + 32 * i + threadIdx.x] = w[tile * 128 + 32 * i + threadIdx.x];
        __syncwarp();
        if (threadIdx.x == 0) barrier_arrive(barriers + PAIR_HERE + tile % 3);
    }
}
KERNEL_THREE(primitive_pairs, (u32 * y, float *z, const unsigned char *map, const float *w, i64 tiles)) { pairs(y, z, map, w, tiles); }

// One warpgroup gives registers to the two others, whose threads then hold 200 numbers each:
// y[j] is the sum of (i+1) x[i,j], or x[0,j] for the first 128.
KERNEL_THREE(primitive_registers, (float *y, const float *x)) {
    if (threadIdx.x < 128) {
        registers_down<24>();
        y[threadIdx.x] = x[threadIdx.x];
    } else {
        registers_up<240>();
        float held[50][4], sum;
        UNROLL for (int i = 0; i < 200; i++) held[i / 4][i % 4] = x[i * 384 + threadIdx.x];
        settle<50>(held);
        volatile float *const start = y + threadIdx.x; // so that ptxas can neither load later than here nor add earlier
        *start = 0;
        sum = *start;
        UNROLL for (int i = 199; i >= 0; i--) sum += (float)(i + 1) * held[i / 4][i % 4];
        y[threadIdx.x] = sum;
    }
}
