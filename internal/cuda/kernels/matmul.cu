// matmul for systems without cuBLASLt: f32 with tiles in shared memory, bf16 on tensor cores. Sums are in f32. Blocks
// are numbered along c's columns in a one-dimensional grid, because the other dimensions allow at most 65535 blocks.
#include "common.cuh"

template <class C, class T>
DEV void matmul_store(C *c, i64 at, i64 column, float sum, const T *bias, i64 accumulate) {
    if (bias) sum += as_float(bias[column]);
    if (accumulate) sum += as_float(c[at]);
    store(c + at, sum);
}

// A block computes 64x64 elements of c and a thread 4x4, in steps of 16 along k.
template <class C, class T>
DEV void matmul(C *c, const T *a, const T *b, const T *bias, i64 m, i64 n, i64 k, i64 trans_a, i64 trans_b, i64 accumulate) {
    SHARED(float, as, 16 * 65);
    SHARED(float, bs, 16 * 65);
    const i64 tiles = (n + 63) / 64, row = blockIdx.x / tiles * 64, column = blockIdx.x % tiles * 64;
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
DEV void matmul_tensor(C *c, const bf16 *a, const bf16 *b, const bf16 *bias, i64 m, i64 n, i64 k, i64 accumulate) {
    typedef Tile<TRANS_A> TileA;
    typedef Tile<!TRANS_B> TileB;
    SHARED(bf16, as, TileA::elements);
    SHARED(bf16, bs, TileB::elements);
    const i64 tiles = (n + 127) / 128, row = blockIdx.x / tiles * 128, column = blockIdx.x % tiles * 128;
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
        matmul(c, a, b, bias, m, n, k, trans_a, trans_b, accumulate);                                                         \
    }                                                                                                                         \
    MATMUL_TENSOR(matmul_##S##b_nn, C, false, false)                                                                          \
    MATMUL_TENSOR(matmul_##S##b_nt, C, false, true)                                                                           \
    MATMUL_TENSOR(matmul_##S##b_tn, C, true, false)                                                                           \
    MATMUL_TENSOR(matmul_##S##b_tt, C, true, true)
#define MATMUL_TENSOR(NAME, C, TA, TB)                                                                                        \
    KERNEL_PAIR(NAME, (C * c, const bf16 *a, const bf16 *b, const bf16 *bias, i64 m, i64 n, i64 k, i64 accumulate)) {               \
        matmul_tensor<TA, TB>(c, a, b, bias, m, n, k, accumulate);                                                            \
    }
FOR_TYPES(MATMUL)
