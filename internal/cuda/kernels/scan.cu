// Scans, their gradients, and the convolutions before them; see docs/bytecode.md for the formulas. A block handles a head of v,
// or some of its columns, a chunk of 64 tokens at a time. The matrices of a chunk are in the workspace, in f32. The factors of
// products are the sum of two bf16 numbers each on tensor cores, so that they have 16 significant bits, or f32. Exponents are
// sums of decays between two tokens, and so never positive.
#include "common.cuh"

static const int ROWS = 64, SUB = 16; // of a chunk, and of its sub-blocks
static const int SEGMENT = 1024;      // tokens of a segment; no chunk crosses its end

static const int DEPTH = 64; // of a step along k

// Product is c [m, n] = factor * a b, plus what is there if add is set; a and b have any strides. A kernel has one place where it
// multiplies: its steps prepare operands and return products. Without rows, there is none.
struct Product {
    float *c;
    int ld, m, n, k;
    const float *a;
    int a_row, a_k;
    const float *b;
    int b_k, b_column;
    float factor;
    bool add;
};
DEV Product no_product() {
    Product p = {};
    return p;
}

// multiply computes a product, 64x64 elements at a time, a thread 4x4 of them, in steps of DEPTH along k. left and right are DEPTH rows of
// 65. All threads call it; it begins and ends with a barrier.
DEV void multiply(const Product &p, float *left, float *right) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    __syncthreads();
    for (int row = 0; row < p.m; row += 64) for (int column = 0; column < p.n; column += 64) {
        float sum[4][4] = {};
        for (int base = 0; base < p.k; base += DEPTH) {
            __syncthreads();
            UNROLL_BY(8) for (int i = threadIdx.x; i < 64 * DEPTH; i += 256) {
                const int r = i / DEPTH, d = i % DEPTH;
                left[d * 65 + r] = row + r < p.m && base + d < p.k ? p.a[(row + r) * p.a_row + (base + d) * p.a_k] : 0.0f;
                right[d * 65 + r] = column + r < p.n && base + d < p.k ? p.b[(base + d) * p.b_k + (column + r) * p.b_column] : 0.0f;
            }
            __syncthreads();
            UNROLL_BY(4) for (int d = 0; d < DEPTH; d++)
                UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++)
                    sum[i][j] += left[d * 65 + y * 4 + i] * right[d * 65 + x * 4 + j];
        }
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++)
            if (row + y * 4 + i < p.m && column + x * 4 + j < p.n) {
                float *to = p.c + (row + y * 4 + i) * p.ld + column + x * 4 + j;
                *to = p.factor * sum[i][j] + (p.add ? *to : 0.0f);
            }
    }
    __syncthreads();
}

// On tensor cores, left and right are 64 rows of DEPTH + 8: the upper halves of factors and, 64 rows later, the lower ones. A warp computes 16
// rows and 32 columns.
DEV void multiply(const Product &p, bf16 *left, bf16 *right) {
    const int lane = threadIdx.x & 31, own_row = (threadIdx.x >> 6) * 16, own_column = ((threadIdx.x >> 5) & 1) * 32, LD = DEPTH + 8, LOW = 64 * LD;
    __syncthreads();
    for (int row = 0; row < p.m; row += 64) for (int column = 0; column < p.n; column += 64) {
        float sum[4][4] = {};
        for (int base = 0; base < p.k; base += DEPTH) {
            __syncthreads();
            UNROLL_BY(8) for (int i = threadIdx.x; i < 64 * DEPTH; i += 256) {
                const int r = i / DEPTH, d = i % DEPTH, at = r * LD + d;
                const float x = row + r < p.m && base + d < p.k ? p.a[(row + r) * p.a_row + (base + d) * p.a_k] : 0.0f;
                const float y = column + r < p.n && base + d < p.k ? p.b[(base + d) * p.b_k + (column + r) * p.b_column] : 0.0f;
                store(left + at, x);
                store(left + at + LOW, x - as_float(left[at]));
                store(right + at, y);
                store(right + at + LOW, y - as_float(right[at]));
            }
            __syncthreads();
            UNROLL for (int d = 0; d < DEPTH; d += 16) {
                u32 a_high[4], a_low[4], b_high[4], b_low[4];
                frag_a(a_high, left, LD, own_row, d);
                frag_a(a_low, left + LOW, LD, own_row, d);
                UNROLL for (int half = 0; half < 2; half++) {
                    frag_b(b_high, right, LD, own_column + 16 * half, d);
                    frag_b(b_low, right + LOW, LD, own_column + 16 * half, d);
                    UNROLL for (int j = 0; j < 2; j++) {
                        mma16816(sum[2 * half + j], a_low, b_high + 2 * j);
                        mma16816(sum[2 * half + j], a_high, b_low + 2 * j);
                        mma16816(sum[2 * half + j], a_high, b_high + 2 * j);
                    }
                }
            }
        }
        UNROLL for (int t = 0; t < 4; t++) UNROLL for (int e = 0; e < 4; e++) {
            const int r = row + own_row + lane / 4 + e / 2 * 8, d = column + own_column + t * 8 + lane % 4 * 2 + e % 2;
            if (r < p.m && d < p.n) {
                float *to = p.c + r * p.ld + d;
                *to = p.factor * sum[t][e] + (p.add ? *to : 0.0f);
            }
        }
    }
    __syncthreads();
}
#define FACTORS_OF_float              \
    SHARED(float, left, DEPTH * 65);  \
    SHARED(float, right, DEPTH * 65);
#define FACTORS_OF_bf16                        \
    SHARED(bf16, left, 2 * 64 * (DEPTH + 8));  \
    SHARED(bf16, right, 2 * 64 * (DEPTH + 8));

// Sizes are the attributes of a scan.
struct Sizes {
    i64 tokens, batch, heads;
    int shared, key_dim, value_dim, channels, delta;
    double norm, scale;
    METHOD i64 all() const { return heads * shared; }
};
#define SIZES i64 tokens, i64 batch, i64 heads, i64 shared, i64 key_dim, i64 value_dim, i64 channels, i64 delta, double norm, double scale
#define SIZES_HERE Sizes{tokens, batch, heads, (int)shared, (int)key_dim, (int)value_dim, (int)channels, (int)delta, norm, scale}

// EACH loops over the elements of a matrix, with all threads of a block.
#define EACH(i, n) UNROLL_BY(1) for (int i = threadIdx.x; i < (n); i += blockDim.x)

// Head is a head of v in a sequence, of which a block handles columns first_column to first_column + width - 1. It is in shared memory.
template <class T> struct Head : Sizes {
    const T *q_in, *k_in, *v_in;
    const float *decay_in, *beta_in;
    const int *positions;
    i64 own, sequence;
    int first_column, width;
    // A chunk's matrices: q and k; both times what is left since the start of the chunk; k times what is left at its end; these
    // factors; v; what is added to the state; scores.
    float *q, *k, *qs, *ks, *kt, *early, *late, *v, *e, *p, *a, *beta, *whole, *lq, *lk, *r, *right;
    double *sums; // of the decays of a head with one decay
    i64 first;    // token
    int n, fresh; // whether it begins a document

    METHOD static i64 words(i64 key_dim, i64 width) { return 9 * ROWS * key_dim + 2 * SUB * key_dim + 2 * ROWS * width + 2 * ROWS * ROWS + ROWS + key_dim + 2 * ROWS; }
    METHOD float *take(float *&at, i64 n) {
        float *here = at;
        at += n;
        return here;
    }
    METHOD float *place(float *at) {
        sums = (double *)take(at, 2 * ROWS);
        const i64 keys = ROWS * key_dim;
        q = take(at, keys), k = take(at, keys), qs = take(at, keys), ks = take(at, keys), kt = take(at, keys), early = take(at, keys);
        late = take(at, keys), r = take(at, keys), right = take(at, keys), lq = take(at, SUB * key_dim), lk = take(at, SUB * key_dim);
        v = take(at, ROWS * width), e = take(at, ROWS * width), p = take(at, ROWS * ROWS), a = take(at, ROWS * ROWS);
        beta = take(at, ROWS), whole = take(at, key_dim);
        return at;
    }

    METHOD i64 token_row(int i) const { return (first + i) * batch + sequence; }
    METHOD i64 value_row(int i) const { return token_row(i) * all() + own; }
    METHOD float decay(int i, int c) const { return decay_in[value_row(i) * channels + c]; }
    METHOD bool begins(i64 t) const { return positions && positions[t * batch + sequence] == 0; }

    // next_chunk finds the chunk that begins at token t.
    METHOD void next_chunk(i64 t) {
        __syncthreads();
        if (threadIdx.x == 0) {
            const i64 end = min(min(t + ROWS, tokens), (t / SEGMENT + 1) * SEGMENT);
            first = t, fresh = begins(t), n = 1;
            while (t + n < end && !begins(t + n)) n++;
        }
        __syncthreads();
    }

    // factor returns what a row of q or k is multiplied by; a warp calls it.
    METHOD float factor(const T *row, double by) const {
        if (norm == 0) return (float)by;
        float sum = 0;
        for (int c = threadIdx.x & 31; c < key_dim; c += 32) sum += as_float(row[c]) * as_float(row[c]);
        return (float)by / sqrtf(warp_sum(sum) + (float)norm);
    }
    METHOD double query_factor() const { return scale == 0 ? 1.0 : scale; }
    METHOD const T *key_row(const T *x, i64 row) const { return x + (row * heads + own / shared) * key_dim; }

    METHOD void load() {
        const int lane = threadIdx.x & 31;
        for (int i = threadIdx.x >> 5; i < n; i += 8) {
            const T *from_q = key_row(q_in, token_row(i)), *from_k = key_row(k_in, token_row(i));
            const float by_q = factor(from_q, query_factor()), by_k = factor(from_k, 1);
            for (int c = lane; c < key_dim; c += 32) {
                q[i * key_dim + c] = as_float(from_q[c]) * by_q;
                k[i * key_dim + c] = as_float(from_k[c]) * by_k;
            }
        }
        EACH(i, n * width) v[i] = as_float(v_in[value_row(i / width) * value_dim + first_column + i % width]);
        EACH(i, n) beta[i] = beta_in[value_row(i)];
        if (channels == 1) {
            EACH(i, n) {
                double sum = 0;
                for (int t = 0; t <= i; t++) sum += decay(t, 0);
                sums[i] = sum;
            }
            __syncthreads();
            EACH(i, n * key_dim) {
                early[i] = expf((float)sums[i / key_dim]);
                late[i] = expf((float)(sums[n - 1] - sums[i / key_dim]));
            }
        } else {
            EACH(c, key_dim) {
                float sum = 0;
                for (int i = 0; i < n; i++) early[i * key_dim + c] = expf(sum += decay(i, c));
                sum = 0;
                for (int i = n - 1; i >= 0; i--) {
                    late[i * key_dim + c] = expf(sum);
                    sum += decay(i, c);
                }
            }
        }
        __syncthreads();
        EACH(i, n * key_dim) qs[i] = q[i] * early[i], ks[i] = k[i] * early[i], kt[i] = k[i] * late[i];
        EACH(c, key_dim) whole[c] = early[(n - 1) * key_dim + c];
        __syncthreads();
    }

    // left returns the share that is left of token j at a later token i of the chunk, if a head has one decay, and left_of the same for a
    // channel.
    METHOD float left(int i, int j) const { return expf((float)(sums[i] - sums[j])); }
    METHOD float left_of(int i, int j, int c) const {
        float sum = 0;
        for (int t = j + 1; t <= i; t++) sum += decay(t, c);
        return expf(sum);
    }

    // sub_block sets lq, lk and r for rows first_row to first_row + rows - 1 and the earlier tokens, and right to the factors of r.
    METHOD void sub_block(int first_row, int rows) {
        EACH(i, rows * key_dim) {
            const int row = first_row + i / key_dim, c = i % key_dim;
            const float kept = left_of(row, first_row - 1, c);
            lq[i] = q[row * key_dim + c] * kept;
            lk[i] = k[row * key_dim + c] * kept;
        }
        EACH(c, key_dim) {
            float sum = 0;
            for (int j = first_row - 1; j >= 0; j--) {
                right[j * key_dim + c] = expf(sum);
                r[j * key_dim + c] = k[j * key_dim + c] * right[j * key_dim + c];
                sum += decay(j, c);
            }
        }
        __syncthreads();
    }

    // score is a step towards p and a: by head, one product for each; by channel, two for every sub-block but the first.
    METHOD Product score(int step) {
        const int row = (step / 2 + 1) * SUB, rows = min(SUB, n - row);
        if (channels == 1) {
            if (step > 1 || (step == 1 && !delta)) return no_product();
            return Product{step == 0 ? p : a, ROWS, n, n, key_dim, step == 0 ? q : k, key_dim, 1, k, 1, key_dim, 1, false};
        }
        if (rows <= 0 || step >= 2 * (ROWS / SUB - 1)) return no_product();
        if (step % 2 == 0) sub_block(row, rows);
        return Product{(step % 2 == 0 ? p : a) + row * ROWS, ROWS, rows, row, key_dim, step % 2 == 0 ? lq : lk, key_dim, 1, r, 1, key_dim, 1, false};
    }
    // scored completes the scores: a is minus beta times those of keys.
    METHOD void scored() {
        if (channels > 1)
            EACH(x, n * SUB) {
                const int i = x / SUB, j = i / SUB * SUB + x % SUB;
                if (j > i) continue;
                float of_q = 0, of_k = 0;
                for (int c = 0; c < key_dim; c++) {
                    const float kept = left_of(i, j, c) * k[j * key_dim + c];
                    of_q += q[i * key_dim + c] * kept;
                    of_k += k[i * key_dim + c] * kept;
                }
                p[i * ROWS + j] = of_q, a[i * ROWS + j] = of_k;
            }
        __syncthreads();
        mask(p, 0, false);
        if (delta) mask(a, 1, true);
        __syncthreads();
    }
    // mask multiplies the scores of earlier tokens, or of those at least `before` earlier, by what is left, and by minus beta if that is
    // wanted. The others become 0.
    METHOD void mask(float *x, int before, bool by_beta) {
        EACH(y, n * n) {
            const int i = y / n, j = y % n;
            float *to = x + i * ROWS + j;
            if (j + before > i) *to = 0;
            else *to *= (channels == 1 ? left(i, j) : 1.0f) * (by_beta ? -beta[i] : 1.0f);
        }
    }

    // value is a step towards e, given the state before the chunk: what the state returns for k, and then a sub-block at a time.
    METHOD Product value(int step, const float *state) {
        const int row = step * SUB, before = row - SUB, rows = min(SUB, n - row);
        if (step == 0) return delta ? Product{e, width, n, width, key_dim, ks, key_dim, 1, state, width, 1, 1, false} : no_product();
        if (step == 1) {
            EACH(i, n * width) e[i] = beta[i / width] * (delta ? v[i] - e[i] : v[i]);
            __syncthreads();
        }
        if (!delta || before >= n) return no_product();
        EACH(c, width) for (int i = before + 1; i < min(n, row); i++) {
            float sum = e[i * width + c];
            for (int j = before; j < i; j++) sum += a[i * ROWS + j] * e[j * width + c];
            e[i * width + c] = sum;
        }
        if (rows <= 0) return no_product();
        return Product{e + row * width, width, rows, width, row, a + row * ROWS, ROWS, 1, e, width, 1, 1, true};
    }

    // advance is the step that turns the state before the chunk into that after it.
    METHOD Product advance(float *state) {
        EACH(i, key_dim * width) state[i] *= whole[i / width];
        return Product{state, width, key_dim, width, n, kt, 1, key_dim, e, width, 1, 1, true};
    }
};

// The steps of a chunk: scores, values, two products for o, and the new state.
static const int SCORED = 2 * (ROWS / SUB - 1), OUTPUT = SCORED + ROWS / SUB + 1, ADVANCE = OUTPUT + 2;

// scan computes o and the state after the last token, if they are not 0, and saves the state before each segment, if saved is not 0.
template <class T>
DEV void scan(T *left, T *right, T *o, float *next, float *saved, const T *q, const T *k, const T *v, const float *decay, const float *beta,
              const float *state_in, const int *positions, float *work, i64 columns, i64 end, Sizes sizes) {
    const i64 slices = (sizes.value_dim + columns - 1) / columns;
    SHARED(Head<T>, heads, 1);
    Head<T> &h = heads[0];
    (Sizes &)h = sizes;
    h.q_in = q, h.k_in = k, h.v_in = v, h.decay_in = decay, h.beta_in = beta, h.positions = positions;
    h.own = blockIdx.x / slices, h.sequence = blockIdx.y, h.first_column = (int)(blockIdx.x % slices * columns), h.width = min((int)columns, h.value_dim - h.first_column);
    const i64 size = h.key_dim * h.value_dim, at = h.sequence * h.all() + h.own, elements = h.key_dim * h.width;
    work += (blockIdx.y * gridDim.x + blockIdx.x) * (Head<T>::words(h.key_dim, columns) + (h.key_dim + ROWS) * columns);
    float *const state = h.place(work), *const out = state + elements;
    EACH(i, elements) state[i] = state_in ? state_in[at * size + i / h.width * h.value_dim + h.first_column + i % h.width] : 0.0f;
    __syncthreads();
    for (i64 t = 0; t < end; t += h.n) {
        h.next_chunk(t);
        if (h.fresh) EACH(i, elements) state[i] = 0;
        __syncthreads();
        if (saved && t % SEGMENT == 0)
            EACH(i, elements) saved[(at * ((h.tokens + SEGMENT - 1) / SEGMENT) + t / SEGMENT) * size + i / h.width * h.value_dim + h.first_column + i % h.width] = state[i];
        h.load();
        for (int step = 0; step < ADVANCE + 1; step++) {
            if (step == OUTPUT && !o) step = ADVANCE;
            Product next_product = no_product();
            if (step == SCORED) h.scored();
            if (step < SCORED) next_product = h.score(step);
            else if (step < OUTPUT) next_product = h.value(step - SCORED, state);
            else if (step == OUTPUT) next_product = Product{out, h.width, h.n, h.width, h.key_dim, h.qs, h.key_dim, 1, state, h.width, 1, 1, false};
            else if (step == OUTPUT + 1) next_product = Product{out, h.width, h.n, h.width, h.n, h.p, ROWS, 1, h.e, h.width, 1, 1, true};
            else next_product = h.advance(state);
            multiply(next_product, left, right);
            if (step == OUTPUT + 1)
                EACH(i, h.n * h.width) store(o + h.value_row(i / h.width) * h.value_dim + h.first_column + i % h.width, out[i]);
        }
    }
    if (saved && end < h.tokens)
        EACH(i, elements) saved[(at * ((h.tokens + SEGMENT - 1) / SEGMENT) + end / SEGMENT) * size + i / h.width * h.value_dim + h.first_column + i % h.width] = state[i];
    if (next) EACH(i, elements) next[at * size + i / h.width * h.value_dim + h.first_column + i % h.width] = state[i];
}

// Backward is the work on the gradients of a head of v.
template <class T> struct Backward : Head<T> {
    float *states, *ds, *dout, *y, *dp, *da, *kq, *kr, *kc, *last, *diagonal;
    METHOD static i64 words(i64 key_dim, i64 value_dim) {
        return Head<T>::words(key_dim, value_dim) + (SEGMENT / ROWS + 1) * key_dim * value_dim + 2 * ROWS * value_dim + 2 * ROWS * ROWS + 3 * ROWS * key_dim + key_dim + ROWS;
    }
    METHOD void place_all(float *at) {
        at = this->place(at);
        const i64 keys = ROWS * this->key_dim, values = ROWS * this->width;
        states = this->take(at, (SEGMENT / ROWS + 1) * this->key_dim * this->width);
        dout = this->take(at, values), y = this->take(at, values), dp = this->take(at, ROWS * ROWS), da = this->take(at, ROWS * ROWS);
        kq = this->take(at, keys), kr = this->take(at, keys), kc = this->take(at, keys), last = this->take(at, this->key_dim);
        diagonal = this->take(at, ROWS);
    }

    // add is a step towards y: the gradient of e, of which every token also gets that of later ones, times the scores.
    METHOD Product add(int step) {
        const int n = this->n, width = this->width;
        if (step == 0) return Product{y, width, n, width, this->key_dim, this->kt, this->key_dim, 1, ds, width, 1, 1, false};
        if (step == 1) return Product{y, width, n, width, n, this->p, 1, ROWS, dout, width, 1, 1, true};
        const int row = (ROWS / SUB - 1 - (step - 2)) * SUB, end = min(n, row + SUB); // a sub-block, of which the last comes first
        if (!this->delta) return no_product();
        solve(end, min(n, end + SUB));
        if (row < 0 || end >= n) return no_product();
        return Product{y + row * width, width, end - row, width, n - end, this->a + end * ROWS + row, 1, ROWS, y + end * width, width, 1, 1, true};
    }
    // solve completes y for a sub-block, once later ones are part of it.
    METHOD void solve(int row, int end) {
        const int width = this->width;
        EACH(c, width) for (int i = end - 2; i >= row; i--) {
            float sum = y[i * width + c];
            for (int j = i + 1; j < end; j++) sum += this->a[j * ROWS + i] * y[j * width + c];
            y[i * width + c] = sum;
        }
        __syncthreads();
    }

    // key is a step towards kq, the gradient of q; kr and kc, that of k as the later of two tokens, without beta, and as the earlier one;
    // last, that of the logarithm of what is left at the end; and diagonal, the gradients of the scores of tokens with themselves, which
    // decays do not change, and which are therefore missing from the others.
    METHOD Product key(int step, const float *state) {
        const int n = this->n, width = this->width, dim = this->key_dim;
        switch (step) {
        case 0: return Product{kq, dim, n, dim, width, dout, width, 1, state, 1, width, 1, false};
        case 1: return Product{kr, dim, n, dim, width, y, width, 1, state, 1, width, -1, false};
        case 2: return Product{kc, dim, n, dim, width, this->e, width, 1, ds, 1, width, 1, false};
        case 3: of_state(state); return Product{dp, ROWS, n, n, width, dout, width, 1, this->e, 1, width, 1, false};
        case 4: return Product{da, ROWS, n, n, width, y, width, 1, this->e, 1, width, -1, false};
        case 5: of_scores(); break;
        }
        return this->channels == 1 ? by_head(step - 5) : by_channel((step - 5) / 4, (step - 5) % 4);
    }
    METHOD void of_state(const float *state) {
        const int n = this->n, width = this->width, dim = this->key_dim;
        EACH(i, n * dim) {
            kq[i] *= this->early[i], kc[i] *= this->late[i];
            kr[i] = this->delta ? kr[i] * this->early[i] : 0.0f;
        }
        __syncthreads();
        EACH(c, dim) {
            float sum = 0;
            for (int j = 0; j < width; j++) sum += state[c * width + j] * ds[c * width + j];
            sum *= this->whole[c];
            for (int i = 0; i < n; i++) sum += kc[i * dim + c] * this->k[i * dim + c];
            last[c] = sum;
        }
    }
    METHOD void of_scores() {
        EACH(i, this->n) diagonal[i] = dp[i * ROWS + i];
        __syncthreads();
        this->mask(dp, 1, false);
        this->mask(da, 1, false);
        __syncthreads();
    }
    METHOD Product by_head(int step) {
        const int n = this->n, dim = this->key_dim;
        if (step == 0) return Product{kq, dim, n, dim, n, dp, ROWS, 1, this->k, dim, 1, 1, true};
        if (step == 1) return Product{kc, dim, n, dim, n, dp, 1, ROWS, this->q, dim, 1, 1, true};
        if (!this->delta || step > 3) return no_product();
        if (step == 2) return Product{kr, dim, n, dim, n, da, ROWS, 1, this->k, dim, 1, 1, true};
        EACH(i, n * dim) this->r[i] = this->beta[i / dim] * this->k[i];
        return Product{kc, dim, n, dim, n, da, 1, ROWS, this->r, dim, 1, 1, true};
    }
    // by_channel has four products for each sub-block with the tokens before it, and then does the rest.
    METHOD Product by_channel(int block, int step) {
        const int n = this->n, dim = this->key_dim, row = (block + 1) * SUB, rows = min(SUB, n - row);
        float *const part = this->late; // which is not needed any more
        if (rows <= 0 || row >= ROWS) {
            if (block == (n - 1) / SUB && step == 0) within();
            return no_product();
        }
        if (step == 0) {
            this->sub_block(row, rows);
            return Product{part, dim, rows, dim, row, dp + row * ROWS, ROWS, 1, this->r, dim, 1, 1, false};
        }
        if (step == 1) {
            EACH(i, rows * dim) kq[row * dim + i] += part[i] * this->left_of(row + i / dim, row - 1, i % dim);
            __syncthreads();
            return Product{part, dim, rows, dim, row, da + row * ROWS, ROWS, 1, this->r, dim, 1, 1, false};
        }
        if (step == 2) {
            EACH(i, rows * dim) {
                if (this->delta) kr[row * dim + i] += part[i] * this->left_of(row + i / dim, row - 1, i % dim);
                this->lk[i] *= this->delta ? this->beta[row + i / dim] : 0.0f;
            }
            return Product{part, dim, row, dim, rows, dp + row * ROWS, 1, ROWS, this->lq, dim, 1, 1, false};
        }
        return Product{part, dim, row, dim, rows, da + row * ROWS, 1, ROWS, this->lk, dim, 1, 1, true};
    }
    // after_key adds the last products of a sub-block.
    METHOD void after_key(int step) {
        const int dim = this->key_dim, row = ((step - 5) / 4 + 1) * SUB;
        if (this->channels == 1 || step < 5 || (step - 5) % 4 != 3 || row >= this->n) return;
        EACH(i, row * dim) kc[i] += this->late[i] * this->right[i];
        __syncthreads();
    }
    // within adds the gradients by scores within sub-blocks.
    METHOD void within() {
        const int n = this->n, dim = this->key_dim;
        EACH(x, n * dim) {
            const int i = x / dim, c = x % dim, start = i / SUB * SUB, end = min(n, start + SUB);
            float sum = 0, of_q = 0, of_r = 0, of_c = 0;
            for (int j = i; j >= start; j--) { // earlier tokens
                const float kept = expf(sum) * this->k[j * dim + c];
                of_q += dp[i * ROWS + j] * kept;
                of_r += da[i * ROWS + j] * kept;
                sum += this->decay(j, c);
            }
            sum = 0;
            for (int j = i; j < end; j++) { // later tokens
                if (j > i) sum += this->decay(j, c);
                of_c += expf(sum) * (dp[j * ROWS + i] * this->q[j * dim + c] + (this->delta ? this->beta[j] * da[j * ROWS + i] * this->k[j * dim + c] : 0.0f));
            }
            kq[x] += of_q, kc[x] += of_c;
            if (this->delta) kr[x] += of_r;
        }
        __syncthreads();
    }

    // back is a step that turns the gradient of the state after the chunk into that of the state before it.
    METHOD Product back(int step) {
        const int n = this->n, width = this->width, dim = this->key_dim;
        if (step == 0) {
            EACH(i, dim * width) ds[i] = this->fresh ? 0.0f : ds[i] * this->whole[i / width];
            EACH(i, n * dim) this->ks[i] *= -this->beta[i / dim];
        }
        if (this->fresh || (step == 1 && !this->delta)) return no_product();
        return step == 0 ? Product{ds, width, dim, width, n, this->qs, 1, dim, dout, width, 1, 1, true}
                         : Product{ds, width, dim, width, n, this->ks, 1, dim, y, width, 1, 1, true};
    }

    // store_all stores the gradients of v, of beta and of decays, and those of q and k of this head of v, from the segment's first token on.
    METHOD void store_all(T *dv, float *dbeta, float *ddecay, float *dq, float *dk, i64 segment, bool stated) {
        const int n = this->n, width = this->width, dim = this->key_dim, lane = threadIdx.x & 31;
        const bool nothing = this->fresh || (this->first == 0 && !stated); // that decays
        EACH(i, n * width) store(dv + this->value_row(i / width) * width + i % width, this->beta[i / width] * y[i]);
        for (int i = threadIdx.x >> 5; i < n; i += 8) {
            float sum = 0;
            for (int c = lane; c < width; c += 32) sum += y[i * width + c] * this->v[i * width + c];
            for (int c = lane; c < dim; c += 32) sum += this->k[i * dim + c] * kr[i * dim + c];
            sum = warp_sum(sum);
            if (lane == 0) dbeta[this->value_row(i)] = sum;
        }
        __syncthreads();
        // A token's decay changes the score of every pair of a later token and an earlier one: what it adds to a gradient at the later
        // token, it takes away at the earlier one.
        EACH(i, n * dim) {
            const float later = this->beta[i / dim] * kr[i];
            kr[i] = this->q[i] * kq[i] + this->k[i] * (later - kc[i]);
            dq[(this->first - segment) * dim + i] = kq[i] + diagonal[i / dim] * this->k[i];
            dk[(this->first - segment) * dim + i] = later + kc[i] + diagonal[i / dim] * this->q[i];
        }
        __syncthreads();
        if (this->channels == 1) {
            for (int i = threadIdx.x >> 5; i < n; i += 8) {
                float sum = 0;
                for (int c = lane; c < dim; c += 32) sum += kr[i * dim + c] + (i == n - 1 ? last[c] : 0.0f);
                sum = warp_sum(sum);
                if (lane == 0) this->r[i] = sum;
            }
            __syncthreads();
            EACH(i, n) {
                float sum = 0;
                for (int t = n - 1; t >= i; t--) sum += this->r[t];
                ddecay[this->value_row(i)] = i == 0 && nothing ? 0.0f : sum;
            }
        } else {
            EACH(c, dim) {
                float sum = last[c];
                for (int i = n - 1; i >= 0; i--) {
                    sum += kr[i * dim + c];
                    ddecay[this->value_row(i) * dim + c] = i == 0 && nothing ? 0.0f : sum;
                }
            }
        }
        __syncthreads();
    }
};

// The steps of a chunk's gradients: those of a chunk up to its values, and then y, the gradients of q and k, and that of the state.
static const int KEYS = OUTPUT + 2 + ROWS / SUB + 1, BACK = KEYS + 5 + 4 * (ROWS / SUB), GRAD_STEPS = BACK + 2;

// scan_grad computes the gradients of a segment, of which saved holds the state before it. ds holds the gradient of the state after it,
// and then of that before it. dq and dk of all heads of v are in the workspace.
template <class T>
DEV void scan_grad(T *left, T *right, float *dq, float *dk, T *dv, float *ddecay, float *dbeta, float *ds, const float *saved, const T *dout,
                   const T *q, const T *k, const T *v, const float *decay, const float *beta, const float *state_in, const int *positions, float *work, i64 segment, Sizes sizes) {
    SHARED(Backward<T>, heads, 1);
    Backward<T> &h = heads[0];
    (Sizes &)h = sizes;
    h.q_in = q, h.k_in = k, h.v_in = v, h.decay_in = decay, h.beta_in = beta, h.positions = positions;
    h.own = blockIdx.x, h.sequence = blockIdx.y, h.first_column = 0, h.width = h.value_dim;
    const i64 size = h.key_dim * h.value_dim, at = h.sequence * h.all() + h.own, end = min(h.tokens, segment + SEGMENT);
    h.place_all(work + at * Backward<T>::words(h.key_dim, h.value_dim));
    h.ds = ds + at * size;
    dq += at * SEGMENT * h.key_dim, dk += at * SEGMENT * h.key_dim;
    // The states before the chunks that do not begin a document; there is one for every 64 tokens at most. One more is for the next.
    // A chunk at a time, from the first to the last for the states, and then from the last to the first for the gradients.
    int kept = 0;
    EACH(i, size) h.states[i] = saved[(at * ((h.tokens + SEGMENT - 1) / SEGMENT) + segment / SEGMENT) * size + i];
    __syncthreads();
    i64 t = segment;
    for (bool backward = false;;) {
        h.next_chunk(t);
        const bool last = t + h.n >= end;
        backward = backward || last;
        // The last chunk and those before the first of a document only need the state before them.
        const bool advances = !backward && !h.begins(t + h.n);
        float *state = h.states + kept * size;
        if (backward && !last && !h.fresh) state = h.states + --kept * size;
        if (!backward && !h.fresh) kept++, state += size;
        if (h.fresh) EACH(i, size) state[i] = 0;
        else if (!backward) EACH(i, size) state[i] = state[i - size];
        __syncthreads();
        if (backward || advances) h.load();
        if (backward) EACH(i, h.n * h.width) h.dout[i] = as_float(dout[h.value_row(i / h.width) * h.value_dim + i % h.width]);
        for (int step = 0; step < (backward ? GRAD_STEPS : advances ? OUTPUT + 1 : 0); step++) {
            Product product = no_product();
            if (step == SCORED) h.scored();
            if (step < SCORED) product = h.score(step);
            else if (step < OUTPUT) product = h.value(step - SCORED, state);
            else if (!backward) product = h.advance(state);
            else if (step < KEYS) product = h.add(step - OUTPUT);
            else if (step < BACK) product = h.key(step - KEYS, state);
            else product = h.back(step - BACK);
            multiply(product, left, right);
            if (step >= KEYS && step < BACK) h.after_key(step - KEYS);
        }
        if (!backward) {
            t += h.n;
            continue;
        }
        h.store_all(dv, dbeta, ddecay, dq, dk, segment, state_in != 0);
        if (t == segment) break;
        const i64 after = t;
        for (t--; t > segment && !h.begins(t);) t--;
        for (h.next_chunk(t); t + h.n < after; h.next_chunk(t)) t += h.n;
    }
}

// scan_finish adds the gradients of q, or of k, over the heads of v that share it, in order, and turns them into those of x before it was
// normalised. A warp handles a head of a token.
template <class T>
DEV void scan_finish(T *dx, const T *x, const float *sums, i64 segment, i64 tokens, i64 batch, i64 heads, i64 shared, i64 dim, double norm, double scale) {
    const i64 at = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), safe = min(at, tokens * batch * heads - 1);
    const i64 head = safe % heads, sequence = safe / heads % batch, t = safe / heads / batch;
    const i64 row = (((segment + t) * batch + sequence) * heads + head) * dim;
    const float *const from = sums + ((sequence * heads + head) * shared * SEGMENT + t) * dim;
    const double factor = scale == 0 ? 1.0 : scale;
    float squares = 0, inner = 0;
    for (i64 c = threadIdx.x & 31; c < dim; c += 32) {
        float sum = 0;
        for (i64 j = 0; j < shared; j++) sum += from[j * SEGMENT * dim + c];
        squares += as_float(x[row + c]) * as_float(x[row + c]);
        inner += as_float(x[row + c]) * sum;
    }
    squares = warp_sum(squares) + (float)norm, inner = warp_sum(inner);
    const float by = norm == 0 ? (float)factor : (float)factor / sqrtf(squares);
    for (i64 c = threadIdx.x & 31; c < dim && at == safe; c += 32) {
        float sum = 0;
        for (i64 j = 0; j < shared; j++) sum += from[j * SEGMENT * dim + c];
        store(dx + row + c, by * (norm == 0 ? sum : sum - as_float(x[row + c]) * inner / squares));
    }
}

// Columns is a convolution of columns.
template <class T> struct Columns {
    const T *x, *w, *bias, *tail;
    const int *positions;
    i64 tokens, width, batch, cols;

    // at returns an element of a token; those before the first have negative numbers.
    METHOD float at(i64 t, i64 sequence, i64 c) const {
        if (t >= 0) return as_float(x[(t * batch + sequence) * cols + c]);
        return tail ? as_float(tail[((width + t) * batch + sequence) * cols + c]) : 0.0f;
    }
    METHOD float weight(i64 c, i64 j) const { return as_float(w[c * width + width - 1 - j]); }
    METHOD i64 seen(i64 t, i64 sequence) const { return positions ? min(width, (i64)positions[t * batch + sequence] + 1) : width; }
    METHOD float sum(i64 t, i64 sequence, i64 c) const {
        float sum = bias ? as_float(bias[c]) : 0.0f;
        const i64 n = seen(t, sequence);
        for (i64 j = 0; j < n; j++) sum += weight(c, j) * at(t - j, sequence, c);
        return sum;
    }
    // slope returns the gradient of the sum.
    METHOD float slope(const T *dy, i64 t, i64 sequence, i64 c) const {
        const float pre = sum(t, sequence, c), s = 1 / (1 + expf(-pre));
        return as_float(dy[(t * batch + sequence) * cols + c]) * (s + pre * s * (1 - s));
    }
};

// conv computes y, and after the last token the rows of next.
template <class T> DEV void conv(T *y, T *next, Columns<T> s) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (s.tokens + s.width) * s.batch * s.cols; i += (i64)gridDim.x * blockDim.x) {
        const i64 c = i % s.cols, sequence = i / s.cols % s.batch, t = i / s.cols / s.batch;
        if (t < s.tokens) {
            const float sum = s.sum(t, sequence, c);
            store(y + i, sum / (1 + expf(-sum)));
        } else {
            store(next + i - s.tokens * s.batch * s.cols, s.at(t - s.width, sequence, c));
        }
    }
}

// conv_grad computes dtail, and then dx.
template <class T> DEV void conv_grad(T *dx, float *dtail, const T *dy, const float *dnext, Columns<T> s) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (s.tokens + s.width) * s.batch * s.cols; i += (i64)gridDim.x * blockDim.x) {
        const i64 c = i % s.cols, sequence = i / s.cols % s.batch, t = i / s.cols / s.batch - s.width, kept = t - s.tokens + s.width;
        float sum = kept >= 0 && dnext ? dnext[(kept * s.batch + sequence) * s.cols + c] : 0.0f;
        for (i64 j = max((i64)0, -t); j < s.width && t + j < s.tokens; j++)
            if (s.seen(t + j, sequence) > j) sum += s.weight(c, j) * s.slope(dy, t + j, sequence, c);
        if (t < 0) dtail[i] = sum;
        else store(dx + i - s.width * s.batch * s.cols, sum);
    }
}

// conv_sums adds up the gradients of a column's weights and bias over a part of the tokens: sums [width + 1, parts, cols].
template <class T> DEV void conv_sums(float *sums, const T *dy, i64 part, Columns<T> s) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * part, end = min(s.tokens, first + part);
    if (c >= s.cols) return;
    for (i64 j = 0; j <= s.width; j++) {
        float sum = 0;
        for (i64 t = first; t < end; t++)
            for (i64 sequence = 0; sequence < s.batch; sequence++) {
                if (j == s.width) sum += s.slope(dy, t, sequence, c);
                else if (s.seen(t, sequence) > j) sum += s.slope(dy, t, sequence, c) * s.at(t - j, sequence, c);
            }
        sums[(j * gridDim.y + blockIdx.y) * s.cols + c] = sum;
    }
}

KERNEL(conv_join, (float *dw, float *dbias, const float *sums, i64 parts, i64 width, i64 cols, i64 accumulate)) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    for (i64 j = 0; j <= width; j++) {
        float *const to = j < width ? dw ? dw + c * width + width - 1 - j : 0 : dbias ? dbias + c : 0;
        float sum = to && accumulate ? *to : 0.0f;
        for (i64 p = 0; p < parts; p++) sum += sums[(j * parts + p) * cols + c];
        if (to) *to = sum;
    }
}

// Decays of columns, of which those of a head have one rate. Rates and biases are bf16 if a flag is set.
template <class T> struct Decays {
    const T *x;
    const void *rate, *bias;
    i64 rate_type, bias_type, rows, cols, dim;
    float least;

    METHOD static float number(const void *p, i64 type, i64 i) { return type ? as_float(((const bf16 *)p)[i]) : ((const float *)p)[i]; }
    METHOD float factor(i64 c) const { return -expf(number(rate, rate_type, c / dim)); }
    METHOD float sum(i64 i) const { return as_float(x[i]) + number(bias, bias_type, i % cols); }
    // step returns ln(1 + exp(sum)), but at least the least step, and sets slope to its derivative.
    METHOD float step(i64 i, float &slope) const {
        const float z = sum(i), e = expf(-fabsf(z)), step = fmaxf(z, 0.0f) + log1pf(e);
        slope = step < least ? 0 : z < 0 ? e / (1 + e) : 1 / (1 + e);
        return fmaxf(step, least);
    }
};

template <class T> DEV void decay(float *y, float *step, Decays<T> s) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < s.rows * s.cols; i += (i64)gridDim.x * blockDim.x) {
        float slope;
        const float own = s.step(i, slope);
        y[i] = s.factor(i % s.cols) * own;
        if (step) step[i] = own;
    }
}

// decay_grad computes dx, and the sums of rows of a part: sums [2, parts, cols] of rates, and of biases.
template <class T> DEV void decay_grad(T *dx, float *sums, const float *dy, const float *dstep, i64 part, Decays<T> s) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * part, end = min(s.rows, first + part);
    if (c >= s.cols) return;
    float of_rate = 0, of_bias = 0;
    for (i64 i = first * s.cols + c; i < end * s.cols; i += s.cols) {
        float slope;
        const float step = s.step(i, slope);
        float d = s.factor(c) * dy[i];
        of_rate += d * step;
        if (dstep) d += dstep[i];
        of_bias += d * slope;
        store(dx + i, d * slope);
    }
    sums[blockIdx.y * s.cols + c] = of_rate;
    sums[(gridDim.y + blockIdx.y) * s.cols + c] = of_bias;
}

KERNEL(decay_join, (float *drate, float *dbias, const float *sums, i64 parts, i64 cols, i64 dim, i64 accumulate)) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (dbias && i < cols) {
        float sum = accumulate ? dbias[i] : 0.0f;
        for (i64 p = 0; p < parts; p++) sum += sums[(parts + p) * cols + i];
        dbias[i] = sum;
    }
    if (drate && i < cols / dim) {
        float sum = accumulate ? drate[i] : 0.0f;
        for (i64 p = 0; p < parts; p++)
            for (i64 c = i * dim; c < (i + 1) * dim; c++) sum += sums[p * cols + c];
        drate[i] = sum;
    }
}

// Columns of which those of a head have one factor, which is bf16 if a flag is set.
template <class T> struct Scaled {
    const T *x;
    const void *factor;
    i64 type, rows, cols, dim;

    METHOD float of(i64 c) const { return Decays<T>::number(factor, type, c / dim); }
};

template <class T> DEV void scale_columns(T *y, Scaled<T> s) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < s.rows * s.cols; i += (i64)gridDim.x * blockDim.x)
        store(y + i, s.of(i % s.cols) * as_float(s.x[i]));
}

// scale_columns_grad computes dx, and the sums [parts, cols] of rows of a part.
template <class T> DEV void scale_columns_grad(T *dx, float *sums, const T *dy, i64 part, Scaled<T> s) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * part, end = min(s.rows, first + part);
    if (c >= s.cols) return;
    const float factor = s.of(c);
    float sum = 0;
    for (i64 i = first * s.cols + c; i < end * s.cols; i += s.cols) {
        const float d = as_float(dy[i]);
        sum += d * as_float(s.x[i]);
        store(dx + i, factor * d);
    }
    sums[blockIdx.y * s.cols + c] = sum;
}

#define DECAYS(S, T)                                                                                                           \
    KERNEL(decay_##S, (float *y, float *step, const T *x, const void *rate, const void *bias, i64 rate_type, i64 bias_type,    \
                       i64 rows, i64 cols, i64 dim, double least)) {                                                           \
        decay(y, step, Decays<T>{x, rate, bias, rate_type, bias_type, rows, cols, dim, (float)least});                         \
    }                                                                                                                          \
    KERNEL(decay_grad_##S, (T * dx, float *sums, const float *dy, const float *dstep, i64 part, const T *x, const void *rate,  \
                            const void *bias, i64 rate_type, i64 bias_type, i64 rows, i64 cols, i64 dim, double least)) {      \
        decay_grad(dx, sums, dy, dstep, part, Decays<T>{x, rate, bias, rate_type, bias_type, rows, cols, dim, (float)least});  \
    }                                                                                                                          \
    KERNEL(scale_columns_##S, (T * y, const T *x, const void *factor, i64 type, i64 rows, i64 cols, i64 dim)) {                \
        scale_columns(y, Scaled<T>{x, factor, type, rows, cols, dim});                                                         \
    }                                                                                                                          \
    KERNEL(scale_columns_grad_##S, (T * dx, float *sums, const T *dy, i64 part, const T *x, const void *factor, i64 type,      \
                                    i64 rows, i64 cols, i64 dim)) {                                                            \
        scale_columns_grad(dx, sums, dy, part, Scaled<T>{x, factor, type, rows, cols, dim});                                   \
    }
FOR_TYPES(DECAYS)

#define SCANS(S, T)                                                                                                                       \
    KERNEL_PAIR(scan_##S, (T * o, float *next, float *saved, const T *q, const T *k, const T *v, const float *decay, const float *beta,   \
                      const float *state, const int *positions, float *work, i64 columns, i64 end, SIZES)) {                              \
        FACTORS_OF_##T                                                                                                                    \
        scan(left, right, o, next, saved, q, k, v, decay, beta, state, positions, work, columns, end, SIZES_HERE);                        \
    }                                                                                                                                     \
    KERNEL_PAIR(scan_grad_##S, (float *dq, float *dk, T *dv, float *ddecay, float *dbeta, float *ds, const float *saved, const T *dout,   \
                           const T *q, const T *k, const T *v, const float *decay, const float *beta, const float *state,                 \
                           const int *positions, float *work, i64 segment, SIZES)) {                                                      \
        FACTORS_OF_##T                                                                                                                    \
        scan_grad(left, right, dq, dk, dv, ddecay, dbeta, ds, saved, dout, q, k, v, decay, beta, state, positions, work, segment,         \
                  SIZES_HERE);                                                                                                            \
    }                                                                                                                                     \
    KERNEL(scan_finish_##S, (T * dx, const T *x, const float *sums, i64 segment, i64 tokens, i64 batch, i64 heads, i64 shared, i64 dim,   \
                             double norm, double scale)) {                                                                                \
        scan_finish(dx, x, sums, segment, tokens, batch, heads, shared, dim, norm, scale);                                                \
    }                                                                                                                                     \
    KERNEL(conv_##S, (T * y, T *next, const T *x, const T *w, const T *bias, const T *tail, const int *positions, i64 tokens,             \
                      i64 width, i64 batch, i64 cols)) {                                                                                  \
        conv(y, next, Columns<T>{x, w, bias, tail, positions, tokens, width, batch, cols});                                               \
    }                                                                                                                                     \
    KERNEL(conv_grad_##S, (T * dx, float *dtail, const T *dy, const float *dnext, const T *x, const T *w, const T *bias, const T *tail,   \
                           const int *positions, i64 tokens, i64 width, i64 batch, i64 cols)) {                                           \
        conv_grad(dx, dtail, dy, dnext, Columns<T>{x, w, bias, tail, positions, tokens, width, batch, cols});                             \
    }                                                                                                                                     \
    KERNEL(conv_sums_##S, (float *sums, const T *dy, i64 part, const T *x, const T *w, const T *bias, const T *tail,                      \
                           const int *positions, i64 tokens, i64 width, i64 batch, i64 cols)) {                                           \
        conv_sums(sums, dy, part, Columns<T>{x, w, bias, tail, positions, tokens, width, batch, cols});                                   \
    }
FOR_TYPES(SCANS)
