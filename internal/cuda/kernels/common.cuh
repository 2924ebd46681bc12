// Definitions for every kernel. No header is included because NVRTC provides none. On the CPU the emulator's header
// replaces the CUDA compiler's built-ins (see cuda/emu).
//
// Every kernel argument is 8 bytes: a pointer, an i64 or a double. Blocks are one-dimensional and consist of whole
// warps, at most 256 threads by default. KERNEL_HALF is for blocks of at most 128 threads. KERNEL_PAIR limits registers
// so that a multiprocessor holds two blocks, KERNEL_WIDE so that it holds two blocks of up to 512 threads, and
// KERNEL_THREE so that it holds one block of three warpgroups. Warp operations name all 32 lanes, so no thread of a
// kernel that uses them returns early.

// Attention sources are compiled several times, into separate modules. With SOFTCAP 1 the kernels cap scores; with
// PACKED 1 a sequence holds several documents. Each option costs time and registers. With these options, the
// kernels' names end in _capped, _packed or both.
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef PACKED
#define PACKED 0
#endif
#if SOFTCAP && PACKED
#define VARIANT(name) name##_capped_packed
#elif SOFTCAP
#define VARIANT(name) name##_capped
#elif PACKED
#define VARIANT(name) name##_packed
#else
#define VARIANT(name) name
#endif
// With PACKED, the last parameter is POSITIONS: the position of each query's token in its document.
#if PACKED
#define POSITIONS , const int *positions
#define WITH_POSITIONS , positions
#else
#define POSITIONS
#define WITH_POSITIONS
#endif

#ifndef CUDA_EMULATOR
#define KERNEL(name, params) extern "C" __global__ void __launch_bounds__(256) name params
#define KERNEL_HALF(name, params) extern "C" __global__ void __launch_bounds__(128) name params
#define KERNEL_PAIR(name, params) extern "C" __global__ void __launch_bounds__(256, 2) name params
#define KERNEL_WIDE(name, params) extern "C" __global__ void __launch_bounds__(512, 2) name params
#define KERNEL_THREE(name, params) extern "C" __global__ void __launch_bounds__(384, 1) name params
#define DEV __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define SHARED(type, name, n) __shared__ __align__(16) type name[n]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define UNROLL _Pragma("unroll")
#define PRAGMA(words) _Pragma(#words)
#define UNROLL_BY(n) PRAGMA(unroll (n))
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

// A bf16 is the upper half of a float. It is a struct so that overloads distinguish it from integers.
struct bf16 {
    unsigned short bits;
};

static const u32 ALL = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)
#define LOWEST __int_as_float(0xff7fffff) // the lowest finite number

DEV float as_float(float x) { return x; }
DEV float as_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Round to nearest even.
#ifndef CUDA_EMULATOR
DEV unsigned short bf16_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEV u32 bf16_pair(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#else
DEV unsigned short bf16_bits(float x) {
    const u32 u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff; // rounding could turn a NaN into infinity
    return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
DEV u32 bf16_pair(float low, float high) { return (u32)bf16_bits(low) | (u32)bf16_bits(high) << 16; }
#endif
// power2 returns 2^x from the special function unit, or zero if the result is below 2^-126. quick_exp uses it for
// e^x, with a relative error of at most (|x| + 2) * 2^-23.
#ifndef CUDA_EMULATOR
DEV float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// reciprocal returns 1 / x from the special function unit with a relative error of at most 2^-23, or zero if the
// result is below 2^-126.
DEV float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
DEV float quick_exp(float x) { return power2(x * 1.4426950408889634f); }
// rounded returns x rounded to the type that the first argument points to.
DEV float rounded(const float *, float x) { return x; }
DEV float rounded(const bf16 *, float x) { return __uint_as_float((u32)bf16_bits(x) << 16); }
DEV void store(float *p, float x) { *p = x; }
DEV void store(bf16 *p, float x) { p->bits = bf16_bits(x); }

// Eight elements at once, 16 bytes per access. The address must be a multiple of 16.
struct alignas(16) Quad {
    u32 x, y, z, w;
};
DEV void load8(const float *p, float *v) {
    const Quad a = ((const Quad *)p)[0], b = ((const Quad *)p)[1];
    v[0] = __uint_as_float(a.x), v[1] = __uint_as_float(a.y), v[2] = __uint_as_float(a.z), v[3] = __uint_as_float(a.w);
    v[4] = __uint_as_float(b.x), v[5] = __uint_as_float(b.y), v[6] = __uint_as_float(b.z), v[7] = __uint_as_float(b.w);
}
DEV void load8(const bf16 *p, float *v) {
    const Quad a = *(const Quad *)p;
    const u32 words[4] = {a.x, a.y, a.z, a.w};
    UNROLL for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
DEV void store8(float *p, const float *v) {
    Quad a, b;
    a.x = __float_as_uint(v[0]), a.y = __float_as_uint(v[1]), a.z = __float_as_uint(v[2]), a.w = __float_as_uint(v[3]);
    b.x = __float_as_uint(v[4]), b.y = __float_as_uint(v[5]), b.z = __float_as_uint(v[6]), b.w = __float_as_uint(v[7]);
    ((Quad *)p)[0] = a, ((Quad *)p)[1] = b;
}
DEV void store8(bf16 *p, const float *v) {
    Quad a;
    a.x = bf16_pair(v[0], v[1]), a.y = bf16_pair(v[2], v[3]), a.z = bf16_pair(v[4], v[5]), a.w = bf16_pair(v[6], v[7]);
    *(Quad *)p = a;
}

// Up to eight elements, depending on how many are left; vectorised if the address and the count allow it.
DEV bool aligned(const void *p) { return ((u64)p & 15) == 0; }
template <class T> DEV void load_some(const T *p, float *v, i64 left) {
    if (left >= 8 && aligned(p)) return load8(p, v);
    UNROLL for (int i = 0; i < 8; i++) v[i] = i < left ? as_float(p[i]) : 0.0f;
}
template <class T> DEV void store_some(T *p, const float *v, i64 left) {
    if (left >= 8 && aligned(p)) return store8(p, v);
    UNROLL for (int i = 0; i < 8; i++)
        if (i < left) store(p + i, v[i]);
}

// draw returns value i of the VM's counter-based generator, SplitMix64 with random access.
DEV u64 draw(u64 key, u64 i) {
    u64 z = key + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// EACH8 loops over n elements in groups of eight, using all threads of the grid.
#define EACH8(i, n) \
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < (n); i += (i64)gridDim.x * blockDim.x * 8)
// ROW8 loops over the columns of a row in groups of eight, using the threads of one block.
#define ROW8(c, cols) for (i64 c = (i64)threadIdx.x * 8; c < (cols); c += (i64)blockDim.x * 8)

// Sums and maxima over a warp and over a block, in a fixed order. All threads get the result.
template <class T> DEV T warp_sum(T x) {
    UNROLL for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
DEV float warp_max(float x) {
    UNROLL for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
template <class T> DEV T block_sum(T x) {
    SHARED(T, part, 32);
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) part[warp] = x;
    __syncthreads();
    T sum = 0;
    for (int i = 0; i < warps; i++) sum += part[i];
    __syncthreads();
    return sum;
}
DEV float block_max(float x) {
    SHARED(float, part, 32);
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) part[warp] = x;
    __syncthreads();
    float largest = part[0];
    for (int i = 1; i < warps; i++) largest = fmaxf(largest, part[i]);
    __syncthreads();
    return largest;
}

// Tensor cores: a warp computes d[16,8] += a[16,16] b[16,8] in the fragment layout of mma.sync.m16n8k16. Let g =
// lane/4 and t = lane%4. a[0] holds columns 2t and 2t+1 of row g, a[1] those of row g+8; a[2] and a[3] hold the same
// rows, 8 columns further on. b[0] holds rows 2t and 2t+1 of column g, b[1] the rows 8 further on. d[0] and d[1]
// hold columns 2t and 2t+1 of row g, d[2] and d[3] those of row g+8.
#ifndef CUDA_EMULATOR
DEV void mma16816(float *d, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// ldmatrix loads four 8x8 matrices of bf16 from shared memory. Lane 8i+r passes the address of row r of matrix i. Each
// lane receives columns 2t and 2t+1 of row lane/4 of each matrix, where t = lane%4. ldmatrix_trans loads transposes.
DEV void ldmatrix(u32 *r, const bf16 *row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEV void ldmatrix_trans(u32 *r, const bf16 *row) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
#endif

// Fragments of a 16x16 part of a tile in shared memory, with ld elements per row. frag_a loads a from
// tile[row][k], frag_a_trans from tile[k][row]. frag_b loads two adjacent operands b from tile[column][k], into
// r[0..1] and r[2..3]; frag_b_trans loads them from tile[k][column].
DEV void frag_a(u32 *r, const bf16 *tile, int ld, int row, int k) {
    const int lane = threadIdx.x & 31;
    ldmatrix(r, tile + (row + (lane & 15)) * ld + k + (lane >> 4) * 8);
}
DEV void frag_a_trans(u32 *r, const bf16 *tile, int ld, int row, int k) {
    const int lane = threadIdx.x & 31;
    ldmatrix_trans(r, tile + (k + (lane >> 4) * 8 + (lane & 7)) * ld + row + ((lane >> 3) & 1) * 8);
}
DEV void frag_b(u32 *r, const bf16 *tile, int ld, int column, int k) {
    const int lane = threadIdx.x & 31;
    ldmatrix(r, tile + (column + (lane >> 4) * 8 + (lane & 7)) * ld + k + ((lane >> 3) & 1) * 8);
}
DEV void frag_b_trans(u32 *r, const bf16 *tile, int ld, int column, int k) {
    const int lane = threadIdx.x & 31;
    ldmatrix_trans(r, tile + (k + (lane & 15)) * ld + column + (lane >> 4) * 8);
}

// FOR_TYPES expands macro M for each element type. M's arguments are the type's letter in kernel names and the type.
#define FOR_TYPES(M) M(f, float) M(b, bf16)
