// What the kernels of attention on tensor cores share. A lane has, of every 16 rows and 8 columns of a product, columns 2t and
// 2t+1 of rows g and g+8, where g = lane/4 and t = lane%4: so lie the accumulators of mma.sync and those of wgmma.

// Exponentials are of base 2: scores carry the factor log2(e).
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

#define HEADS Heads{n, keys, heads, kv_heads, batch, prefix, window, softcap WITH_POSITIONS}
// LEAST is the largest score of a row that has seen none: finite, times LOG2E too, for a row may see nothing of the first tile.
#define LEAST (SOFTCAP ? LOWEST / 2 : LOWEST)

struct Heads {
    i64 n, keys, heads, kv_heads, batch, prefix, window;
    double softcap;
#if PACKED
    const int *positions; // of the queries in their documents: 0, or one more than that of the token before
    // first_key is the first key that a query sees, which never falls from one query to the next.
    METHOD i64 first_key(i64 query) const {
        return prefix + query - min(window - 1, (i64)positions[min(query, n - 1) * batch + blockIdx.z]);
    }
    // first_tile is the first key of the first tile of so many that a query sees, or of the last tile where it sees none.
    METHOD i64 first_tile(i64 query, i64 tile) const { return max(min(first_key(query), keys - 1), (i64)0) / tile * tile; }
    // end_of_queries is the end of those that see one of the keys up to an end, or begin after them.
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
    // first_key is the first key that a query sees, or a number below 0.
    METHOD i64 first_key(i64 query) const { return prefix + query - window + 1; }
    // first_tile is the first key of the first tile of so many that a query sees.
    METHOD i64 first_tile(i64 query, i64 tile) const { return max(first_key(query), (i64)0) / tile * tile; }
    // end_of_queries is the end of those that see one of the keys from first up to an end.
    METHOD i64 end_of_queries(i64 end) const { return min(n, min(end, keys) - 1 + window - prefix); }
#endif
};

#ifndef CUDA_EMULATOR
DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// copy_chunk begins to copy 16 bytes to shared memory, or zeros.
DEV void copy_chunk(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// copy_word does so with four bytes.
DEV void copy_word(void *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
}
// copies_here waits for those of this thread.
DEV void copies_here() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// as_operand makes 16 columns of two accumulators an operand a.
DEV void as_operand(u32 *a, const float *left, const float *right) {
    a[0] = bf16_pair(left[0], left[1]), a[1] = bf16_pair(left[2], left[3]);
    a[2] = bf16_pair(right[0], right[1]), a[3] = bf16_pair(right[2], right[3]);
}

template <int N> DEV void clear(float (*sum)[4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) sum[i][e] = 0;
}

// share is 1 / total, and 0 of a row that sees no key at all.
DEV float share(float total) { return PACKED && total == 0.0f ? 0.0f : 1.0f / total; }

// visible is the last key of a tile of so many that a query sees, counted from a lane's first.
DEV int visible(const Heads &s, i64 query, i64 key, i64 tile, int lane_first) {
    return (int)min(min(s.prefix + query, s.keys - 1) - key, tile) - lane_first;
}

// hidden is how many keys of a tile of so many are before the window of a query, counted from a lane's first.
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

// bound makes N columns of products scores by the factor and bounds these, to 2^-21 of the bound: c * tanh(x/c) is
// c - 2c / (1 + e^(2x/c)). It comes before scores are hidden.
template <int N> DEV void bound(float (*p)[4], const Heads &s, float factor) {
    const float softcap = (float)s.softcap, inner = 2 * LOG2E * factor / softcap, twice = 2 * softcap;
    UNROLL for (int c = 0; c < N; c++) UNROLL for (int e = 0; e < 4; e++)
        p[c][e] = softcap - twice * reciprocal(1.0f + power2(p[c][e] * inner));
}
// slope is what the gradient of a bounded score is multiplied by, for inverse = 1/softcap; zero of one that is hidden.
DEV float slope(float score, float inverse) {
    const float y = score * inverse;
    return fmaxf(1.0f - y * y, 0.0f);
}
