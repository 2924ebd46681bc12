// matmul for systems without cuBLASLt: f32 with tiles in shared memory, bf16 on tensor cores. Sums are in f32. Blocks
// are numbered along c's columns in a one-dimensional grid, because the other dimensions allow at most 65535 blocks.
#include "common.cuh"

template <class C, class T>
DEV void matmul_store(C *c, i64 at, i64 column, float sum, const T *bias, i64 accumulate) {
    if (bias) sum += as_float(bias[column]);
    if (accumulate) sum += as_float(c[at]);
    store(c + at, sum);
}

// A block computes 64x64 elements of c and a thread 4x4, in steps of 16 along k. `block` is its number.
template <class C, class T>
DEV void matmul(i64 block, C *c, const T *a, const T *b, const T *bias, i64 m, i64 n, i64 k, i64 trans_a, i64 trans_b, i64 accumulate) {
    SHARED(float, as, 16 * 65);
    SHARED(float, bs, 16 * 65);
    const i64 tiles = (n + 63) / 64, row = block / tiles * 64, column = block % tiles * 64;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum[4][4] = {};
    for (i64 base = 0; base < k; base += 16) {
        UNROLL for (int i = 0; i < 4; i++) { // adjacent threads read adjacent elements
            const int at = threadIdx.x + 256 * i;
            const int ak = trans_a ? at / 64 : at % 16, ar = trans_a ? at % 64 : at / 16;
            const int bk = trans_b ? at % 16 : at / 64, bc = trans_b ? at / 16 : at % 64;
            const bool inside_a = row + ar < m && base + ak < k, inside_b = column + bc < n && base + bk < k;
            as[ak * 65 + ar] = inside_a ? as_float(a[trans_a ? (base + ak) * m + row + ar : (row + ar) * k + base + ak]) : 0.0f;
            bs[bk * 65 + bc] = inside_b ? as_float(b[trans_b ? (column + bc) * k + base + bk : (base + bk) * n + column + bc]) : 0.0f;
        }
        __syncthreads();
        UNROLL for (int s = 0; s < 16; s++) {
            float p[4], q[4];
            UNROLL for (int i = 0; i < 4; i++) p[i] = as[s * 65 + y + 16 * i], q[i] = bs[s * 65 + x + 16 * i];
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) sum[i][j] += p[i] * q[j];
        }
        __syncthreads();
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
        const i64 r = row + y + 16 * i, col = column + x + 16 * j;
        if (r < m && col < n) matmul_store(c, r * n + col, col, sum[i][j], bias, accumulate);
    }
}

// Tile is a tile of an operand, 128 elements along m or n by 32 along k. It is stored as the operand is:
// [128][32] or, if K_FIRST, [32][128]. A thread fetches two groups of eight elements into registers while the
// block computes, then writes them to shared memory.
template <bool K_FIRST> struct Tile {
    static const int columns = K_FIRST ? 128 : 32, ld = columns + 8, elements = (K_FIRST ? 32 : 128) * ld;
    Quad held[2];

    METHOD void fetch(const bf16 *p, i64 rows, i64 cols, i64 row, i64 col) {
        UNROLL for (int i = 0; i < 2; i++) {
            const int at = (threadIdx.x + 256 * i) * 8;
            const i64 r = row + at / columns, c = col + at % columns;
            const bf16 *from = p + r * cols + c;
            held[i].x = held[i].y = held[i].z = held[i].w = 0;
            if (r >= rows || c >= cols) continue;
            if (c + 8 <= cols && aligned(from)) {
                held[i] = *(const Quad *)from;
                continue;
            }
            u32 pair[4] = {0, 0, 0, 0};
            UNROLL for (int j = 0; j < 8; j++)
                if (c + j < cols) pair[j / 2] |= (u32)from[j].bits << (j % 2 * 16);
            held[i].x = pair[0], held[i].y = pair[1], held[i].z = pair[2], held[i].w = pair[3];
        }
    }
    METHOD void put(bf16 *tile) const {
        UNROLL for (int i = 0; i < 2; i++) {
            const int at = (threadIdx.x + 256 * i) * 8;
            *(Quad *)(tile + at / columns * ld + at % columns) = held[i];
        }
    }
};

// A block computes 128x128 elements of c; each of its 8 warps computes 64x32.
template <bool TRANS_A, bool TRANS_B, class C>
DEV void matmul_tensor(i64 block, C *c, const bf16 *a, const bf16 *b, const bf16 *bias, i64 m, i64 n, i64 k, i64 accumulate) {
    typedef Tile<TRANS_A> TileA;
    typedef Tile<!TRANS_B> TileB;
    SHARED(bf16, as, TileA::elements);
    SHARED(bf16, bs, TileB::elements);
    const i64 tiles = (n + 127) / 128, row = block / tiles * 128, column = block % tiles * 128;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wr = warp / 4 * 64, wc = warp % 4 * 32;
    TileA ta;
    TileB tb;
    float sum[4][4][4] = {};
    for (i64 base = -32; base < k; base += 32) {
        if (base >= 0) {
            ta.put(as), tb.put(bs);
            __syncthreads();
        }
        if (base + 32 < k) {
            if (TRANS_A) ta.fetch(a, k, m, base + 32, row);
            else ta.fetch(a, m, k, row, base + 32);
            if (TRANS_B) tb.fetch(b, n, k, column, base + 32);
            else tb.fetch(b, k, n, base + 32, column);
        }
        if (base < 0) continue;
        UNROLL for (int s = 0; s < 32; s += 16) {
            u32 fa[4][4], fb[2][4];
            UNROLL for (int i = 0; i < 4; i++) {
                if (TRANS_A) frag_a_trans(fa[i], as, TileA::ld, wr + 16 * i, s);
                else frag_a(fa[i], as, TileA::ld, wr + 16 * i, s);
            }
            UNROLL for (int j = 0; j < 2; j++) {
                if (TRANS_B) frag_b(fb[j], bs, TileB::ld, wc + 16 * j, s);
                else frag_b_trans(fb[j], bs, TileB::ld, wc + 16 * j, s);
            }
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) mma16816(sum[i][j], fa[i], fb[j / 2] + j % 2 * 2);
        }
        __syncthreads();
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) UNROLL for (int e = 0; e < 4; e++) {
        const i64 r = row + wr + 16 * i + lane / 4 + e / 2 * 8, col = column + wc + 8 * j + lane % 4 * 2 + e % 2;
        if (r < m && col < n) matmul_store(c, r * n + col, col, sum[i][j][e], bias, accumulate);
    }
}

#define MATMUL(S, C)                                                                                                          \
    KERNEL(matmul_##S##f, (C * c, const float *a, const float *b, const float *bias, i64 m, i64 n, i64 k, i64 trans_a, i64 trans_b, \
                           i64 accumulate)) {                                                                                 \
        matmul(blockIdx.x, c, a, b, bias, m, n, k, trans_a, trans_b, accumulate);                                                         \
    }                                                                                                                         \
    MATMUL_TENSOR(matmul_##S##b_nn, C, false, false)                                                                          \
    MATMUL_TENSOR(matmul_##S##b_nt, C, false, true)                                                                           \
    MATMUL_TENSOR(matmul_##S##b_tn, C, true, false)                                                                           \
    MATMUL_TENSOR(matmul_##S##b_tt, C, true, true)
#define MATMUL_TENSOR(NAME, C, TA, TB)                                                                                        \
    KERNEL_PAIR(NAME, (C * c, const bf16 *a, const bf16 *b, const bf16 *bias, i64 m, i64 n, i64 k, i64 accumulate)) {               \
        matmul_tensor<TA, TB>(blockIdx.x, c, a, b, bias, m, n, k, accumulate);                                                            \
    }
FOR_TYPES(MATMUL)

// Grouped products: rows in the order of experts, and a matrix for each expert. A block finds its expert from ends, which it
// bounds, so that it accesses nothing outside the operands whatever they hold. If they do not divide rows, c[0] is NaN.
struct Group {
    i64 first, rows;
    METHOD Group(const int *ends, i64 e, i64 n) {
        const i64 end = min(max((i64)ends[e], (i64)0), n);
        first = e > 0 ? min(max((i64)ends[e - 1], (i64)0), end) : 0, rows = end - first;
    }
};

// A block of a product with rows of c in groups; side is the side of a tile. trans_b selects the gradient of a.
template <class C, class T, class Product>
DEV void matmul_grouped(C *c, const T *a, const T *b, const T *bias, const int *ends, i64 experts, i64 n, i64 inner, i64 outer, int side,
                        bool trans_b, Product product) {
    const i64 cols = trans_b ? inner : outer, depth = trans_b ? outer : inner, tiles = (cols + side - 1) / side;
    i64 block = blockIdx.x;
    for (i64 e = 0; e < experts; e++) {
        const Group g(ends, e, n);
        const i64 blocks = (g.rows + side - 1) / side * tiles;
        if (block < blocks) {
            product(block, c + g.first * cols, a + g.first * depth, b + e * inner * outer, bias ? bias + e * outer : bias, g.rows, cols, depth);
            break;
        }
        block -= blocks;
    }
    bool wrong = ends[experts - 1] > n;
    for (i64 e = 0; e < experts; e++) wrong = wrong || ends[e] < (e > 0 ? ends[e - 1] : 0);
    if (wrong && threadIdx.x == 0) store(c, __int_as_float(0x7fffffff));
}

template <bool TRANS_A, bool TRANS_B> struct Plain {
    i64 accumulate;
    template <class C, class T>
    METHOD void operator()(i64 block, C *c, const T *a, const T *b, const T *bias, i64 m, i64 n, i64 k) const {
        matmul(block, c, a, b, bias, m, n, k, (i64)TRANS_A, (i64)TRANS_B, accumulate);
    }
};
template <bool TRANS_A, bool TRANS_B> struct Tensor {
    i64 accumulate;
    template <class C>
    METHOD void operator()(i64 block, C *c, const bf16 *a, const bf16 *b, const bf16 *bias, i64 m, i64 n, i64 k) const {
        matmul_tensor<TRANS_A, TRANS_B>(block, c, a, b, bias, m, n, k, accumulate);
    }
};

// The gradients of the matrices: a product for each expert, whose depth is its number of rows.
template <class T, class Product>
DEV void matmul_grouped_weights(float *db, const T *a, const T *dy, const int *ends, i64 experts, i64 n, i64 inner, i64 outer, int side,
                                Product product) {
    const i64 blocks = (inner + side - 1) / side * ((outer + side - 1) / side), e = blockIdx.x / blocks;
    const Group g(ends, e, n);
    product(blockIdx.x % blocks, db + e * inner * outer, a + g.first * inner, dy + g.first * outer, (const T *)0, inner, outer, g.rows);
}

#define GROUPED(S, C, T, SIDE, PRODUCT)                                                                                        \
    KERNEL(matmul_grouped_##S, (C * c, const T *a, const T *b, const T *bias, const int *ends, i64 experts, i64 n, i64 inner,  \
                                i64 outer, i64 accumulate)) {                                                                  \
        matmul_grouped(c, a, b, bias, ends, experts, n, inner, outer, SIDE, false, PRODUCT<false, false>{accumulate});         \
    }
GROUPED(ff, float, float, 64, Plain)
GROUPED(bf, bf16, float, 64, Plain)
GROUPED(fb, float, bf16, 128, Tensor)
GROUPED(bb, bf16, bf16, 128, Tensor)
#define GROUPED_GRADS(S, T, SIDE, PRODUCT)                                                                                     \
    KERNEL(matmul_grouped_grad_##S, (T * da, const T *dy, const T *b, const int *ends, i64 experts, i64 n, i64 inner,          \
                                     i64 outer, i64 accumulate)) {                                                             \
        matmul_grouped(da, dy, b, (const T *)0, ends, experts, n, inner, outer, SIDE, true, PRODUCT<false, true>{accumulate}); \
    }                                                                                                                          \
    KERNEL(matmul_grouped_weights_##S, (float *db, const T *a, const T *dy, const int *ends, i64 experts, i64 n, i64 inner,    \
                                        i64 outer, i64 accumulate)) {                                                          \
        matmul_grouped_weights(db, a, dy, ends, experts, n, inner, outer, SIDE, PRODUCT<true, false>{accumulate});             \
    }
GROUPED_GRADS(f, float, 64, Plain)
GROUPED_GRADS(b, bf16, 128, Tensor)
