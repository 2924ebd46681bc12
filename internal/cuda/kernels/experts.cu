// Experts: the choice of experts for each token, the order of rows by expert, and sums over a token's experts. Operands
// that hold indices are bounded before they are used, so that no kernel accesses memory outside its operands; a result
// that lacks a row because of a wrong index is NaN.
#include "common.cuh"

// Numbers of experts, groups and choices are limited by the shared memory and the lanes of a warp.
static const int MAX_EXPERTS = 512, MAX_GROUPS = 32;
// Kinds of scores, as in the opcode.
static const i64 SOFTMAX = 0, SIGMOID = 1;
// The place of a choice of an expert of another rank.
static const i64 NO_PLACE = -1;

// Router computes the scores of a row's experts.
template <class T> struct Router {
    const T *logits;
    i64 experts, scores;
    float largest, sum; // of SOFTMAX

    // begin must be called by all lanes of a warp.
    METHOD void begin() {
        largest = LOWEST, sum = 0;
        if (scores != SOFTMAX) return;
        for (i64 e = threadIdx.x & 31; e < experts; e += 32) largest = fmaxf(largest, as_float(logits[e]));
        largest = warp_max(largest);
        for (i64 e = threadIdx.x & 31; e < experts; e += 32) sum += expf(as_float(logits[e]) - largest);
        sum = warp_sum(sum);
    }
    METHOD float score(i64 e) const {
        const float x = as_float(logits[e]);
        return scores == SOFTMAX ? expf(x - largest) / sum : scores == SIGMOID ? 1 / (1 + expf(-x)) : x;
    }
};

// chosen_softmax returns the softmax over the first `top` lanes.
DEV float chosen_softmax(float x, bool is) {
    const float largest = warp_max(is ? x : LOWEST), power = is ? expf(x - largest) : 0.0f;
    return power / warp_sum(power);
}

// drop_groups sets the keys to minus infinity of all groups but the top_groups with the largest key or, without by_max, sum of two keys.
DEV void drop_groups(float *keys, float *sums, i64 experts, i64 groups, i64 top_groups, i64 by_max) {
    const int lane = threadIdx.x & 31;
    const i64 size = experts / groups;
    float first = MINUS_INFINITY, second = MINUS_INFINITY;
    for (i64 e = lane * size; e < (lane + 1) * size && lane < groups; e++) {
        const float x = keys[e];
        if (x > first) second = first, first = x;
        else second = fmaxf(second, x);
    }
    sums[lane] = by_max ? first : first + second;
    __syncwarp();
    i64 better = 0;
    for (int g = 0; g < groups; g++) better += sums[g] > sums[lane] || (sums[g] == sums[lane] && g < lane);
    for (i64 e = lane * size; e < (lane + 1) * size && lane < groups; e++)
        if (better >= top_groups) keys[e] = MINUS_INFINITY;
    __syncwarp();
}

// A warp handles a row. If the order of the logits is that of the scores, it compares logits, which are not rounded.
template <class T>
DEV void route(float *weights, int *chosen, const T *logits, const float *correction, i64 rows, i64 experts, i64 top, i64 scores,
               i64 renormalize, double eps, double scale, i64 groups, i64 top_groups, i64 by_max) {
    SHARED(float, all_keys, 8 * MAX_EXPERTS);
    SHARED(float, all_sums, 8 * MAX_GROUPS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row = (i64)blockIdx.x * 8 + warp, safe = min(row, rows - 1);
    float *keys = all_keys + warp * MAX_EXPERTS;
    Router<T> r = {logits + safe * experts, experts, scores};
    r.begin();
    const bool plain = !correction && (groups <= 1 || by_max);
    for (i64 e = lane; e < experts; e += 32)
        keys[e] = plain ? as_float(r.logits[e]) : r.score(e) + (correction ? correction[e] : 0.0f);
    __syncwarp();
    if (groups > 1) drop_groups(keys, all_sums + warp * MAX_GROUPS, experts, groups, top_groups, by_max);
    i64 mine = 0; // the choice of this lane
    for (int k = 0; k < top; k++) {
        float best = MINUS_INFINITY;
        i64 at = experts;
        for (i64 e = lane; e < experts; e += 32)
            if (keys[e] > best || at == experts) best = keys[e], at = e;
        for (int d = 16; d > 0; d >>= 1) {
            const float other = __shfl_xor_sync(ALL, best, d);
            const i64 its = __shfl_xor_sync(ALL, at, d);
            if (its < experts && (at == experts || other > best || (other == best && its < at))) best = other, at = its;
        }
        if (lane == k) mine = at;
        if (at % 32 == lane) keys[at] = MINUS_INFINITY;
        __syncwarp();
    }
    const bool is = lane < top;
    float s = r.score(mine);
    if (scores > SIGMOID) s = chosen_softmax(s, is);
    const float sum = warp_sum(is ? s : 0.0f) + (float)eps;
    if (!is || row >= rows) return;
    chosen[row * top + lane] = (int)mine;
    weights[row * top + lane] = (renormalize ? s / sum : s) * (float)scale;
}

// count_experts counts the choices of each expert in a chunk; a thread counts those of an expert. Experts are those from lowest on.
KERNEL(count_experts, (i64 * counts, const int *chosen, i64 n, i64 chunk, i64 experts, i64 lowest)) {
    const i64 first = blockIdx.x * chunk, end = min(first + chunk, n);
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
        i64 count = 0;
        for (i64 i = first; i < end; i++) count += chosen[i] == lowest + e;
        counts[blockIdx.x * experts + e] = count;
    }
}

// expert_ends turns counts into the place of the first choice of each expert in each chunk; one block.
KERNEL(expert_ends, (int *ends, i64 *counts, i64 chunks, i64 experts)) {
    SHARED(i64, totals, MAX_EXPERTS);
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
        i64 total = 0;
        for (i64 c = 0; c < chunks; c++) {
            const i64 count = counts[c * experts + e];
            counts[c * experts + e] = total;
            total += count;
        }
        totals[e] = total;
    }
    __syncthreads();
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
        i64 first = 0;
        for (i64 i = 0; i < e; i++) first += totals[i];
        for (i64 c = 0; c < chunks; c++) counts[c * experts + e] += first;
        ends[e] = (int)(first + totals[e]);
    }
}

// place_rows gives the choices of each expert their places, in order, and all other choices none.
KERNEL(place_rows, (int *places, const i64 *firsts, const int *chosen, i64 n, i64 chunk, i64 experts, i64 lowest)) {
    const i64 first = blockIdx.x * chunk, end = min(first + chunk, n);
    for (i64 i = first + threadIdx.x; i < end; i += blockDim.x)
        if (chosen[i] < lowest || chosen[i] >= lowest + experts) places[i] = -1;
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
        i64 next = firsts[blockIdx.x * experts + e];
        for (i64 i = first; i < end; i++)
            if (chosen[i] == lowest + e) places[i] = (int)next++;
    }
}

// A warp computes the gradient of a row of logits; lane k holds the gradient of the score of the k-th choice.
template <class T, class D>
DEV void route_grad(D *dlogits, const float *dy, const T *logits, const int *chosen, i64 rows, i64 experts, i64 top, i64 scores,
                    i64 renormalize, double eps, double scale) {
    const int lane = threadIdx.x & 31;
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), safe = min(row, rows - 1);
    const bool is = lane < top;
    Router<T> r = {logits + safe * experts, experts, scores};
    r.begin();
    const i64 mine = is ? min(max((i64)chosen[safe * top + lane], (i64)0), experts - 1) : 0;
    float s = r.score(mine), g = is ? dy[safe * top + lane] * (float)scale : 0.0f;
    if (scores > SIGMOID) s = chosen_softmax(s, is);
    if (!is) s = 0;
    if (renormalize) {
        const float sum = warp_sum(s) + (float)eps, mean = warp_sum(s * g) / sum;
        g = is ? (g - mean) / sum : 0.0f;
    }
    const float total = warp_sum(s * g);
    for (i64 base = 0; base < experts; base += 32) {
        const i64 e = min(base + lane, experts - 1);
        float d = scores == SOFTMAX ? -r.score(e) * total : 0.0f;
        for (int k = 0; k < top; k++) {
            const i64 its = __shfl_sync(ALL, mine, k);
            const float score = __shfl_sync(ALL, s, k), grad = __shfl_sync(ALL, g, k);
            if (its == e) d = scores == SIGMOID ? score * (1 - score) * grad : score * (grad - total);
        }
        if (base + lane < experts && row < rows) store(dlogits + row * experts + e, d);
    }
}

// count_sequences counts the choices of each sequence's rows. A block has a sequence and an expert.
KERNEL(count_sequences, (float *counts, const int *chosen, i64 rows, i64 top, i64 batch, i64 experts, i64 accumulate)) {
    const i64 e = blockIdx.x % experts, sequence = blockIdx.x / experts, n = rows / batch * top;
    float count = 0; // whole numbers, so the order does not matter
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) count += chosen[(i / top * batch + sequence) * top + i % top] == e;
    count = block_sum(count);
    if (threadIdx.x == 0) counts[blockIdx.x] = (accumulate ? counts[blockIdx.x] : 0.0f) + count;
}

// expert_bias compares loads with their mean in f64, which is exact. It has one block.
KERNEL(expert_bias, (float *w, const float *load, const float *norm, i64 experts, double rate)) {
    double total = 0;
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) total += (double)load[e];
    total = block_sum(total);
    if (norm[1] < 0) return; // the step is skipped
    for (i64 e = threadIdx.x; e < experts; e += blockDim.x) {
        const double own = (double)load[e] * (double)experts;
        if (own != total) w[e] += own < total ? (float)rate : -(float)rate;
    }
}

// A warp computes the gradient of the losses of a row of logits.
template <class T, class D>
DEV void router_loss_grad(D *dlogits, const T *logits, const float *counts, i64 rows, i64 experts, i64 batch, i64 scores, double z,
                          double balance) {
    const int lane = threadIdx.x & 31;
    const i64 row = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), safe = min(row, rows - 1);
    Router<T> plain = {logits + safe * experts, experts, SOFTMAX}, r = {plain.logits, experts, scores == SIGMOID ? SIGMOID : SOFTMAX};
    plain.begin();
    r.begin();
    const float *own = counts ? counts + safe % batch * experts : 0;
    float sum = 0, mean = 0;
    for (i64 e = lane; e < experts && own; e += 32) sum += r.score(e), mean += r.score(e) * own[e];
    sum = warp_sum(sum), mean = warp_sum(mean);
    const float by_z = (float)z * (plain.largest + logf(plain.sum)), factor = own ? (float)balance / sum : 0.0f;
    mean = own ? mean / sum : 0.0f;
    for (i64 e = lane; e < experts && row < rows; e += 32) {
        const float s = r.score(e), slope = scores == SIGMOID ? 1 - s : 1.0f;
        store(dlogits + row * experts + e, by_z * plain.score(e) + (own ? factor * s * slope * (own[e] - mean) : 0.0f));
    }
}

// permute copies rows to their places, times their weights if there are any. y has n rows.
template <class T> DEV void permute(T *y, const T *x, const int *places, const float *weights, i64 choices, i64 top, i64 cols, i64 n) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < choices * cols; i += (i64)gridDim.x * blockDim.x) {
        const i64 k = i / cols, c = i % cols, at = places[k];
        if (at == NO_PLACE) continue;
        const float from = as_float(x[k / top * cols + c]);
        if (at < 0 || at >= n) store(y + c, __int_as_float(0x7fffffff));
        else store(y + at * cols + c, weights ? from * weights[k] : from);
    }
}

// unpermute adds up the rows at a token's places, times their weights if there are any. x has n rows.
template <class T> DEV void unpermute(T *y, const T *x, const int *places, const float *weights, i64 rows, i64 top, i64 cols, i64 n) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (i64)gridDim.x * blockDim.x) {
        const i64 row = i / cols, c = i % cols;
        float sum = 0;
        for (i64 k = row * top; k < (row + 1) * top; k++) {
            const i64 at = places[k];
            if (at == NO_PLACE) continue;
            const float from = at < 0 || at >= n ? __int_as_float(0x7fffffff) : as_float(x[at * cols + c]);
            sum += weights ? from * weights[k] : from;
        }
        store(y + i, sum);
    }
}

// weight_grads computes the gradients of the weights of unpermute; a warp computes one. x has n rows.
template <class T> DEV void weight_grads(float *dweights, const T *dy, const T *x, const int *places, i64 choices, i64 top, i64 cols, i64 n) {
    const i64 k = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), safe = min(k, choices - 1), at = places[safe];
    const bool outside = at < 0 || at >= n;
    float sum = outside && at != NO_PLACE ? __int_as_float(0x7fffffff) : 0.0f;
    for (i64 c = threadIdx.x & 31; c < cols && !outside; c += 32) sum += as_float(dy[safe / top * cols + c]) * as_float(x[at * cols + c]);
    sum = warp_sum(sum);
    if (k < choices && (threadIdx.x & 31) == 0) dweights[k] = sum;
}

// grouped_bias_grad adds up the rows of each expert.
template <class T> DEV void grouped_bias_grad(float *dbias, const T *dy, const int *ends, i64 n, i64 cols, i64 accumulate) {
    const i64 e = blockIdx.y, c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 end = min(max((i64)ends[e], (i64)0), n), first = e > 0 ? min(max((i64)ends[e - 1], (i64)0), end) : 0;
    if (c >= cols) return;
    float sum = accumulate ? dbias[e * cols + c] : 0.0f;
    for (i64 r = first; r < end; r++) sum += as_float(dy[r * cols + c]);
    dbias[e * cols + c] = sum;
}

#define EXPERTS(S, T)                                                                                                          \
    KERNEL(route_##S, (float *weights, int *chosen, const T *logits, const float *correction, i64 rows, i64 experts, i64 top,  \
                       i64 scores, i64 renormalize, double eps, double scale, i64 groups, i64 top_groups, i64 by_max)) {       \
        route(weights, chosen, logits, correction, rows, experts, top, scores, renormalize, eps, scale, groups, top_groups,    \
              by_max);                                                                                                         \
    }                                                                                                                          \
    KERNEL(permute_##S, (T * y, const T *x, const int *places, const float *weights, i64 choices, i64 top, i64 cols, i64 n)) { \
        permute(y, x, places, weights, choices, top, cols, n);                                                                 \
    }                                                                                                                          \
    KERNEL(unpermute_##S, (T * y, const T *x, const int *places, const float *weights, i64 rows, i64 top, i64 cols, i64 n)) {  \
        unpermute(y, x, places, weights, rows, top, cols, n);                                                                  \
    }                                                                                                                          \
    KERNEL(weight_grads_##S, (float *dweights, const T *dy, const T *x, const int *places, i64 choices, i64 top, i64 cols,     \
                              i64 n)) {                                                                                        \
        weight_grads(dweights, dy, x, places, choices, top, cols, n);                                                          \
    }                                                                                                                          \
    KERNEL(grouped_bias_grad_##S, (float *dbias, const T *dy, const int *ends, i64 n, i64 cols, i64 accumulate)) {             \
        grouped_bias_grad(dbias, dy, ends, n, cols, accumulate);                                                               \
    }
FOR_TYPES(EXPERTS)

#define ROUTE_GRAD(S, D, T)                                                                                                    \
    KERNEL(route_grad_##S, (D * dlogits, const float *dy, const T *logits, const int *chosen, i64 rows, i64 experts, i64 top,  \
                            i64 scores, i64 renormalize, double eps, double scale)) {                                          \
        route_grad(dlogits, dy, logits, chosen, rows, experts, top, scores, renormalize, eps, scale);                          \
    }
#define ROUTER_LOSS_GRAD(S, D, T)                                                                                              \
    KERNEL(router_loss_grad_##S, (D * dlogits, const T *logits, const float *counts, i64 rows, i64 experts, i64 batch,         \
                                  i64 scores, double z, double balance)) {                                                     \
        router_loss_grad(dlogits, logits, counts, rows, experts, batch, scores, z, balance);                                   \
    }
ROUTER_LOSS_GRAD(ff, float, float)
ROUTER_LOSS_GRAD(fb, float, bf16)
ROUTER_LOSS_GRAD(bf, bf16, float)
ROUTER_LOSS_GRAD(bb, bf16, bf16)

ROUTE_GRAD(ff, float, float)
ROUTE_GRAD(fb, float, bf16)
ROUTE_GRAD(bf, bf16, float)
ROUTE_GRAD(bb, bf16, bf16)
