// A stand-in for cuBLASLt in tests, on top of the stand-in driver. It computes products of column-major matrices with
// three loops, on the driver's streams. Like the real library, it has no algorithm for f32 matrices with a bf16 result,
// nor for a bias whose type differs from the result's. One algorithm relies on the alignment that was requested.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int fake_call(uintptr_t stream, void (*call)(void *), const void *argument, size_t size);

enum { SLOW = 0x5105, BROKEN = 0xbad, FAST = 0xfa57 };
enum { OK, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};
struct Desc {
    int trans_a, trans_b, epilogue, bias_type;
    uint64_t bias;
};
static int64_t live, fast;
static void *make(size_t n) {
    __atomic_add_fetch(&live, 1, __ATOMIC_SEQ_CST);
    return calloc(1, n);
}
static int drop(void *p) {
    __atomic_sub_fetch(&live, 1, __ATOMIC_SEQ_CST);
    free(p);
    return OK;
}
size_t cublasLtGetVersion(void) { return 120405; }
int cublasLtCreate(void **h) { *h = make(8); return OK; }
int cublasLtDestroy(void *h) { return drop(h); }
int cublasLtMatmulDescCreate(struct Desc **d, int compute, int scale) {
    if (compute != 68 || scale != 0) return INVALID_VALUE;
    *d = make(sizeof **d);
    (*d)->bias_type = -1;
    return OK;
}
int cublasLtMatmulDescDestroy(void *p) { return drop(p); }
int cublasLtMatmulDescSetAttribute(struct Desc *d, int attribute, const void *value, size_t size) {
    void *to = attribute == 3 ? (void *)&d->trans_a : attribute == 4 ? (void *)&d->trans_b : attribute == 7 ? (void *)&d->epilogue : attribute == 8 ? (void *)&d->bias : attribute == 26 ? (void *)&d->bias_type : NULL;
    if (!to || size != (attribute == 8 ? 8u : 4u)) return INVALID_VALUE;
    memcpy(to, value, size);
    return OK;
}
int cublasLtMatrixLayoutCreate(struct Layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *l = make(sizeof **l);
    **l = (struct Layout){type, rows, cols, ld};
    return OK;
}
int cublasLtMatrixLayoutDestroy(void *p) { return drop(p); }
struct Preference {
    uint32_t alignment[4];
};
int cublasLtMatmulPreferenceCreate(struct Preference **p) {
    *p = make(sizeof **p);
    **p = (struct Preference){{256, 256, 256, 256}};
    return OK;
}
int cublasLtMatmulPreferenceDestroy(void *p) { return drop(p); }
int cublasLtMatmulPreferenceSetAttribute(struct Preference *p, int attribute, const void *value, size_t size) {
    if (attribute >= 5 && attribute <= 8 && size == 4) {
        memcpy(&p->alignment[attribute - 5], value, 4);
        return OK;
    }
    return attribute == 1 && size == 8 ? OK : INVALID_VALUE;
}
struct Result {
    uint64_t algo[8], workspace;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *h, struct Desc *d, struct Layout *a, struct Layout *b, struct Layout *c, struct Layout *out, struct Preference *preference, int wanted, struct Result *r, int *found) {
    (void)h, (void)c;
    *found = 0;
    if (wanted < 1 || a->type != b->type) return INVALID_VALUE;
    if (a->type == 0 && out->type == 14) return NOT_SUPPORTED;
    if (d->epilogue == 4 && d->bias_type >= 0 && d->bias_type != out->type) return NOT_SUPPORTED;
    // The first algorithm works and is slow. Of the others, one fails when tried, one reports that it is
    // unsupported, and the last is fast.
    static const uint64_t algorithms[4] = {SLOW, BROKEN, 0, FAST};
    for (*found = 0; *found < wanted && *found < 4; ++*found) {
        memset(&r[*found], 0, sizeof *r);
        r[*found].algo[7] = algorithms[*found];
        memcpy(r[*found].algo, preference->alignment, sizeof preference->alignment);
        r[*found].state = *found == 2 ? NOT_SUPPORTED : OK;
    }
    return OK;
}
struct Work {
    struct Desc d;
    struct Layout a, b, c;
    float alpha, beta;
    const char *x, *y;
    char *z;
    int slow;
};
static float get(const char *p, int type, uint64_t i) {
    uint32_t bits = type == 0 ? ((const uint32_t *)p)[i] : (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static void put(char *p, int type, uint64_t i, float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (type == 0) ((uint32_t *)p)[i] = bits;
    else ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static void work(void *argument) {
    struct Work *w = argument;
    uint64_t k = w->d.trans_a ? w->a.rows : w->a.cols;
    for (uint64_t col = 0; col < w->c.cols; col++)
        for (uint64_t row = 0; row < w->c.rows; row++) {
            float s = 0;
            for (uint64_t i = 0; i < k; i++)
                s += get(w->x, w->a.type, w->d.trans_a ? row * w->a.ld + i : i * w->a.ld + row) * get(w->y, w->b.type, w->d.trans_b ? i * w->b.ld + col : col * w->b.ld + i);
            s *= w->alpha;
            if (w->beta != 0) s += w->beta * get(w->z, w->c.type, col * w->c.ld + row);
            if (w->d.epilogue == 4) s += get((const char *)w->d.bias, w->d.bias_type < 0 ? w->c.type : w->d.bias_type, row);
            put(w->z, w->c.type, col * w->c.ld + row, s);
        }
    if (w->slow) nanosleep(&(struct timespec){0, 2000000}, NULL);
    else __atomic_add_fetch(&fast, 1, __ATOMIC_SEQ_CST);
}
int cublasLtMatmul(void *h, struct Desc *d, const float *alpha, const void *x, struct Layout *a, const void *y, struct Layout *b, const float *beta, const void *z, struct Layout *c, void *out, struct Layout *l, const uint64_t *algo, void *workspace, size_t bytes, uintptr_t stream) {
    uint64_t m = d->trans_a ? a->cols : a->rows, k = d->trans_a ? a->rows : a->cols;
    if (algo[7] == BROKEN) return NOT_SUPPORTED;
    if (!h || (algo[7] != SLOW && algo[7] != FAST) || z != out || c != l || (bytes && !workspace) || m != c->rows || k != (d->trans_b ? b->cols : b->rows) || (d->trans_b ? b->rows : b->cols) != c->cols)
        return INVALID_VALUE;
    const void *const read[4] = {x, y, z, (const void *)((uintptr_t)out | (d->epilogue == 4 ? d->bias : 0))};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)read[i] % ((const uint32_t *)algo)[i]) return INVALID_VALUE; // a GPU reports this later
    struct Work w = {*d, *a, *b, *c, *alpha, *beta, x, y, out, algo[7] == SLOW};
    return fake_call(stream, work, &w, sizeof w) ? 13 : OK;
}
// fake_blas_fast returns the number of products by the fast algorithm so far.
int64_t fake_blas_fast(void) { return __atomic_load_n(&fast, __ATOMIC_SEQ_CST); }
int64_t fake_blas_live(void) { return __atomic_load_n(&live, __ATOMIC_SEQ_CST); }
