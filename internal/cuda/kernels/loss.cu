// Cross entropy over a vocabulary that may be divided among ranks: statistics per row, the loss and the gradient.
#include "common.cuh"

// row_stats makes one pass over a row. Each thread keeps the maximum of its logits and the sum of exponentials
// relative to it. The function `load` loads eight logits. The special function unit computes e^x for x < 0 with
// a relative error of at most (|x| + 2) * 2^-23; relative to the largest term, the error is e^x times that.
// capped applies the soft cap if softcap is positive.
DEV float capped(float x, float softcap) { return softcap > 0.0f ? softcap * tanhf(x / softcap) : x; }

template <class T, class Load>
DEV void row_stats(float *stats, const T *logits, i64 label, i64 valid, float softcap, Load load) {
    float largest = MINUS_INFINITY, sum = 0, v[8];
    ROW8(c, valid) {
        load(v, c);
        UNROLL for (int j = 0; j < 8; j++) v[j] = capped(v[j], softcap);
        if (valid - c < 8) UNROLL for (int j = 1; j < 8; j++)
            if (c + j >= valid) v[j] = MINUS_INFINITY;
        float m = largest;
        UNROLL for (int j = 0; j < 8; j++) m = fmaxf(m, v[j]);
        if (m > largest) sum *= quick_exp(largest - m), largest = m;
        UNROLL for (int j = 0; j < 8; j++) sum += quick_exp(v[j] - largest);
    }
    const float all = block_max(largest);
    const float total = block_sum(largest == all ? sum : sum * quick_exp(largest - all));
    if (threadIdx.x == 0) {
        stats[0] = all, stats[1] = total;
        stats[2] = label >= 0 && label < valid ? capped(as_float(logits[label]), softcap) : 0.0f;
    }
}
#define CE(S, T)                                                                                                    \
    KERNEL_WIDE(cross_entropy_stats_##S, (float *stats, const T *logits, const int *labels, i64 cols, i64 first, i64 valid, double softcap)) { \
        const i64 row = blockIdx.x;                                                                                 \
        const T *const x = logits + row * cols;                                                                     \
        row_stats(stats + 3 * row, x, (i64)labels[row] - first, valid, (float)softcap, [&](float *v, i64 c) { load_some(x + c, v, valid - c); }); \
    }
FOR_TYPES(CE)

// join combines the statistics of a row over the parts of the vocabulary, in rank order.
struct Joined {
    float largest, sum, label;
};
DEV Joined join(const float *stats, i64 parts, i64 rows, i64 row) {
    Joined j = {stats[3 * row], 0, 0};
    for (i64 p = 1; p < parts; p++) j.largest = fmaxf(j.largest, stats[3 * (p * rows + row)]);
    for (i64 p = 0; p < parts; p++) {
        const float *s = stats + 3 * (p * rows + row);
        j.sum += s[0] == j.largest ? s[1] : s[1] * expf(s[0] - j.largest);
        j.label += s[2]; // nonzero in one part only
    }
    return j;
}

// A single block computes the loss; its threads' sums are added in a fixed order.
KERNEL(cross_entropy, (float *loss, float *losses, const float *stats, const int *labels, const float *weight, i64 parts, i64 rows, double scale)) {
    double sum = 0;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) {
        if (labels && labels[row] < 0) {
            if (losses) losses[row] = MINUS_INFINITY - MINUS_INFINITY; // not a number
            continue;
        }
        const Joined j = join(stats, parts, rows, row);
        const double own = (double)(j.largest - j.label) + (double)logf(j.sum);
        if (losses) losses[row] = (float)own;
        sum += own;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss += (float)(weight ? scale * (double)*weight * sum : scale * sum);
}

// label_scale returns the factor of a row's gradient, which is 0 for a label below 0.
DEV float label_scale(const int *labels, i64 row, double scale, const float *weight) {
    if (labels[row] < 0) return 0.0f;
    return weight ? (float)(scale * (double)*weight) : (float)scale;
}

// ce_grad computes the gradient of a row from its complete statistics. The function `load` loads eight logits.
template <class D, class Load>
DEV void ce_grad(D *dlogits, const float *stats, i64 label, i64 parts, i64 rows, i64 cols, i64 valid, float factor, float softcap,
                 Load load) {
    SHARED(float, both, 2);
    if (threadIdx.x == 0) {
        const Joined j = join(stats, parts, rows, blockIdx.x);
        both[0] = j.largest, both[1] = 1.0f / j.sum;
    }
    __syncthreads();
    const float largest = both[0], inverse = both[1];
    ROW8(c, cols) {
        float v[8];
        const int left = (int)min(valid - c, (i64)8), hit = (int)max(min(label - c, (i64)8), (i64)-1);
        load(v, c);
        UNROLL for (int j = 0; j < 8; j++) {
            const float x = capped(v[j], softcap), y = softcap > 0.0f ? x / softcap : 0.0f;
            v[j] = j < left ? (quick_exp(x - largest) * inverse - (j == hit ? 1.0f : 0.0f)) * factor * (1.0f - y * y) : 0.0f;
        }
        store_some(dlogits + c, v, cols - c);
    }
}

// ce_whole computes statistics and gradient of a row whose vocabulary is not divided. The block keeps the first
// `kept` logits in shared memory; each thread reads back only the groups of eight that it stored.
template <class D, class T>
DEV void ce_whole(float *stats, D *dlogits, const T *logits, const int *labels, i64 cols, i64 kept, i64 first, i64 valid, double scale,
                  float softcap, const float *weight) {
    DYNAMIC_SHARED(memory);
    T *const keep = (T *)memory;
    const i64 row = blockIdx.x, label = (i64)labels[row] - first;
    const T *const x = logits + row * cols;
    row_stats(stats + 3 * row, x, label, valid, softcap, [&](float *v, i64 c) {
        load_some(x + c, v, valid - c);
        if (c + 8 <= kept) store8(keep + c, v);
    });
    ce_grad(dlogits + row * cols, stats, label, 1, gridDim.x, cols, valid, label_scale(labels, row, scale, weight), softcap, [&](float *v, i64 c) {
        if (c + 8 <= kept && c < valid) load8(keep + c, v);
        else load_some(x + c, v, cols - c);
    });
}
#define CE_GRAD(S, D, T)                                                                                              \
    KERNEL(cross_entropy_grad_##S, (D * dlogits, const T *logits, const float *stats, const int *labels, i64 parts, i64 rows, \
                                    i64 cols, i64 first, i64 valid, double scale, double softcap, const float *weight)) { \
        const i64 row = blockIdx.x;                                                                                   \
        const T *const x = logits + row * cols;                                                                       \
        ce_grad(dlogits + row * cols, stats, (i64)labels[row] - first, parts, rows, cols, valid, label_scale(labels, row, scale, weight), (float)softcap, \
                [&](float *v, i64 c) { load_some(x + c, v, cols - c); });                                             \
    }                                                                                                                 \
    KERNEL_WIDE(cross_entropy_whole_##S, (float *stats, D *dlogits, const T *logits, const int *labels, i64 cols, i64 kept, i64 first, \
                                          i64 valid, double scale, double softcap, const float *weight)) { \
        ce_whole(stats, dlogits, logits, labels, cols, kept, first, valid, scale, (float)softcap, weight);                            \
    }
CE_GRAD(ff, float, float)
CE_GRAD(fb, float, bf16)
CE_GRAD(bf, bf16, float)
CE_GRAD(bb, bf16, bf16)
