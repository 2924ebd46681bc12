// Definitions shared by the attention kernels that use tensor cores. In a product, each lane holds columns 2t and
// 2t+1 of rows g and g+8 out of every 16 rows and 8 columns, where g = lane/4 and t = lane%4. The accumulators of
// mma.sync and of wgmma both have this layout.

// Exponentials use base 2, so scores carry the factor log2(e).
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

#define HEADS Heads{n, keys, heads, kv_heads, batch, prefix, window, softcap WITH_POSITIONS}
// LEAST is the initial maximum of a row. It is finite, even times LOG2E, because a row may see no key of the first
// tile.
#define LEAST (SOFTCAP ? LOWEST / 2 : LOWEST)

struct Heads {
    i64 n, keys, heads, kv_heads, batch, prefix, window;
    double softcap;
#if PACKED
    const int *positions; // of each query within its document: 0, or one more than the preceding token's
    // first_key returns the first key that a query sees. It never decreases from one query to the next.
    METHOD i64 first_key(i64 query) const {
        return prefix + query - min(window - 1, (i64)positions[min(query, n - 1) * batch + blockIdx.z]);
    }
    // first_tile returns the first key of the first tile that a query sees; tiles have `tile` keys. If the query sees
    // no key, it returns the start of the last tile.
    METHOD i64 first_tile(i64 query, i64 tile) const { return max(min(first_key(query), keys - 1), (i64)0) / tile * tile; }
    // end_of_queries returns the first query that sees only keys at or after end, or n if there is none.
    METHOD i64 end_of_queries(i64 end) const {
        const i64 last = min(end, keys) - 1;
        i64 low = 0, high = min(n, last + window - prefix);
        while (low < high) {
            const i64 middle = (low + high) / 2;
            if (first_key(middle) <= last) low = middle + 1;
            else high = middle;
        }
        return low;
    }
#else
    // first_key returns the first key that a query sees. It is negative if the window starts before key 0.
    METHOD i64 first_key(i64 query) const { return prefix + query - window + 1; }
    // first_tile returns the first key of the first tile that a query sees; tiles have `tile` keys.
    METHOD i64 first_tile(i64 query, i64 tile) const { return max(first_key(query), (i64)0) / tile * tile; }
    // end_of_queries returns the first query that sees only keys at or after end, or n if there is none.
    METHOD i64 end_of_queries(i64 end) const { return min(n, min(end, keys) - 1 + window - prefix); }
#endif
};

#ifndef CUDA_EMULATOR
DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// copy_chunk starts an asynchronous copy of 16 bytes to shared memory, or of zeros if `there` is false.
DEV void copy_chunk(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// copy_word does the same for four bytes.
DEV void copy_word(void *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
}
// copies_here waits for the copies of this thread.
DEV void copies_here() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// as_operand packs two accumulators, of eight columns each, into an operand a.
DEV void as_operand(u32 *a, const float *left, const float *right) {
    a[0] = bf16_pair(left[0], left[1]), a[1] = bf16_pair(left[2], left[3]);
    a[2] = bf16_pair(right[0], right[1]), a[3] = bf16_pair(right[2], right[3]);
}

template <int N> DEV void clear(float (*sum)[4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) sum[i][e] = 0;
}

// share returns 1 / total, or 0 for a row that sees no key.
DEV float share(float total) { return PACKED && total == 0.0f ? 0.0f : 1.0f / total; }

// visible returns the index of the last key of a tile that a query sees, relative to a lane's first key.
DEV int visible(const Heads &s, i64 query, i64 key, i64 tile, int lane_first) {
    return (int)min(min(s.prefix + query, s.keys - 1) - key, tile) - lane_first;
}

// hidden returns the index of the first key of a tile in a query's window, relative to a lane's first key.
DEV int hidden(const Heads &s, i64 query, i64 key, i64 tile, int lane_first) {
    return (int)min(max(s.first_key(query) - key, (i64)0), tile) - lane_first;
}

DEV void store_pair(float *p, float a, float b) { p[0] = a, p[1] = b; }
DEV void store_pair(bf16 *p, float a, float b) {
    if (((u64)p & 3) == 0) {
        *(u32 *)p = bf16_pair(a, b);
    } else {
        store(p, a);
        store(p + 1, b);
    }
}

template <class O> DEV void add_pair(O *p, float a, float b, i64 accumulate) {
    if (accumulate) a += as_float(p[0]), b += as_float(p[1]);
    store_pair(p, a, b);
}

// Sums and maxima over the four lanes that share a row.
DEV float row_sum(float x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}
DEV float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}

// bound scales N accumulators of products into scores and applies the soft cap, with an error of at most 2^-21
// of the cap: c * tanh(x/c) is c - 2c / (1 + e^(2x/c)). It runs before scores are masked.
template <int N> DEV void bound(float (*p)[4], const Heads &s, float factor) {
    const float softcap = (float)s.softcap, inner = 2 * LOG2E * factor / softcap, twice = 2 * softcap;
    UNROLL for (int c = 0; c < N; c++) UNROLL for (int e = 0; e < 4; e++)
        p[c][e] = softcap - twice * reciprocal(1.0f + power2(p[c][e] * inner));
}
// slope returns the factor for the gradient of a capped score, where inverse = 1/softcap. It is zero for a masked
// score.
DEV float slope(float score, float inverse) {
    const float y = score * inverse;
    return fmaxf(1.0f - y * y, 0.0f);
}
