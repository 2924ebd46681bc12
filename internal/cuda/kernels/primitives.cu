// The building blocks of the attention kernels, one small kernel for each. If attention is wrong on a card, these
// kernels show which instruction behaves differently from the emulator. Operands are small whole numbers, so that
// every sum is exact in any order. Those of Hopper are in primitives_hopper.cu.
#include "common.cuh"
#include "attention.cuh"

// The product d[16,16] = a[16,16] b[16,16]^T of one warp, with mma.sync. With trans & 1, a is stored by columns; with
// trans & 2, b is.
KERNEL(primitive_fragments, (float *d, const bf16 *a, const bf16 *b, i64 trans)) {
    SHARED(bf16, left, 16 * 24);
    SHARED(bf16, right, 16 * 24);
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) left[i / 16 * 24 + i % 16] = a[i], right[i / 16 * 24 + i % 16] = b[i];
    __syncwarp();
    u32 rows[4], columns[4];
    if (trans & 1) frag_a_trans(rows, left, 24, 0, 0);
    else frag_a(rows, left, 24, 0, 0);
    if (trans & 2) frag_b_trans(columns, right, 24, 0, 0);
    else frag_b(columns, right, 24, 0, 0);
    float sum[2][4];
    clear<2>(sum);
    mma16816(sum[0], rows, columns);
    mma16816(sum[1], rows, columns + 2);
    UNROLL for (int c = 0; c < 2; c++) UNROLL for (int e = 0; e < 4; e++) d[(g + e / 2 * 8) * 16 + 8 * c + 2 * t + e % 2] = sum[c][e];
}

// Copies of 16 and of 4 bytes into two slots of shared memory in turn: y[tiles,640] is x[tiles,512] beside
// w[tiles,128], with zeros from chunk and word `there` on. The next tile is copied while this one is read.
KERNEL(primitive_ring, (u32 *y, const u32 *x, const u32 *w, i64 tiles, i64 there)) {
    SHARED(Quad, chunks, 2 * 128);
    SHARED(u32, words, 2 * 128);
    const auto bring = [&](i64 tile) {
        const i64 i = tile * 128 + threadIdx.x;
        const int at = (int)(tile % 2) * 128 + threadIdx.x;
        copy_chunk(chunks + at, i < there ? x + 4 * i : x, i < there);
        copy_word(words + at, i < there ? w + i : w, i < there);
    };
    bring(0);
    for (i64 tile = 0; tile < tiles; tile++) {
        copies_here();
        __syncthreads(); // no thread reads the other slot any longer
        if (tile + 1 < tiles) bring(tile + 1);
        const u32 *const from = (const u32 *)(chunks + tile % 2 * 128);
        UNROLL for (int i = 0; i < 4; i++) y[tile * 640 + i * 128 + threadIdx.x] = from[i * 128 + threadIdx.x];
        y[tile * 640 + 512 + threadIdx.x] = words[tile % 2 * 128 + 127 - threadIdx.x];
    }
}
