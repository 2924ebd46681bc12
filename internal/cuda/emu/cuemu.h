// The subset of CUDA that the project's kernels use, emulated on the CPU. It defines the CUDA compiler's built-ins so
// that g++ accepts the kernels' own sources. Each thread of a block is a fiber. The lanes of a warp run one after
// another up to the next warp operation, and warps run up to the next barrier, in an order that a seed permutes.
// Lanes of a warp that meet at different operations, and threads that miss a barrier, are errors. The emulator does
// not model bank conflicts. It detects missing memory ordering between lanes only where a permuted order exposes it.
//
// Thread copies, engine copies and warpgroup products complete at a time that the seed decides, but no later than a
// wait for them. Until then a product owns its registers. The async proxy has its own view of shared memory.
#pragma once
#define CUDA_EMULATOR 1
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <utility>

struct uint3 {
    unsigned x, y, z;
};

namespace emu {
// Barrier is an mbarrier in 8 bytes.
struct Barrier {
    unsigned char phase, count, pending, valid; // valid: isBarrier, or isBarrier+1 once the copy engine may see it
    int bytes; // still to come
};
// Map is the emulator's tensor map: bf16 in four dimensions, copied in boxes whose 16-byte chunks are swizzled as
// hopper.cuh describes.
struct Map {
    uint64_t address, extent[4], stride[3], box[4], unused[4];
};
struct Fiber {
    uint3 thread;
    int warp, lane;
    unsigned operations; // number of warp operations reached
    const char *stop;    // operation at which it waits
    const Barrier *barrier; // barrier whose phase it waits for, if any
    unsigned parity;
    int registers; // registers that its warp waits for, if barrier is null
    bool fenced;   // whether it has passed a wgmma.fence
};
struct Slot {
    unsigned char bytes[64];
};
struct Block {
    uint3 block, blocks, threads;
    unsigned char *shared, *seen; // dynamic shared memory, and the async proxy's view of it
    unsigned char *fixed;         // shared memory of the variables of all kernels
    Slot (*slots)[2][32]; // by warp, then by parity of the operation number
};
// These variables are at a fixed distance from the thread pointer, so that using them calls no function. A library
// opened at run time can have only a few such bytes.
#define NEAR_THREAD __thread __attribute__((tls_model("initial-exec")))
extern NEAR_THREAD Fiber *fiber;
extern NEAR_THREAD Block block;
size_t place(size_t bytes); // reserves bytes of fixed and returns their offset
void yield(const char *stop);
void copy(void *to, const void *from, int bytes); // copies zeros if from is null
void copied();                                    // completes the copies that this thread has begun
void init(Barrier *b, int arrivals);
void arrive(Barrier *b, int bytes); // also announces bytes
void wait(const Barrier *b, unsigned parity);

// Site is a place in a source that orders memory accesses. A test may omit one.
typedef std::source_location Site;
bool omits(const char *kind, const Site &at); // also records that the place was reached

void turn(int number, bool stay);
void show_barriers(); // makes the barriers that this thread initialised visible to the copy engine
void show_map(const void *map);
void show_writes(); // makes this thread's writes visible to the async proxy
void put(void *to, const void *from, int bytes);
void settle(void *registers, int bytes);
void mma(float *d, const unsigned *a, const unsigned *b);
void fence();
void commit();
void wait_products(int most);
void product(int columns, float (*d)[4], const unsigned *a, uint64_t from, uint64_t b, bool b_rows, bool add);
void set_registers(int count, bool more);
void pause();
void bring(unsigned char *to, const Map *map, Barrier *b, int element, int head, int sequence, int token);

// changed returns the swizzled offset of a byte. In rows of 128 bytes, bits 7 to 9 of the offset are XORed into bits
// 4 to 6; in rows of 64 bytes, bits 7 and 8 into bits 4 and 5; in rows of 32 bytes, bit 7 into bit 4.
static inline unsigned changed(unsigned at, unsigned row) { return at ^ (at >> 7 & (row / 16 - 1)) << 4; }

// exchange publishes a value of this lane to its warp and returns those of all lanes.
template <class T> const Slot *exchange(const char *what, const T &value) {
    static_assert(sizeof(T) <= sizeof(Slot), "a warp operation exchanges at most a slot");
    Slot *slots = block.slots[fiber->warp][fiber->operations++ & 1];
    memcpy(slots[fiber->lane].bytes, &value, sizeof(T));
    yield(what);
    return slots;
}
template <class T> T read(const Slot &slot) {
    T value;
    memcpy(&value, slot.bytes, sizeof(T));
    return value;
}

typedef void (*Entry)(void **params);
struct Kernel {
    Kernel(const char *name, const char *source, Entry entry, unsigned most);
    const char *name, *source;
    Entry entry;
    unsigned most; // maximum threads per block, for which the compiler allocates registers
    Kernel *next;
};
template <class... A, size_t... I> void unpack(void (*f)(A...), void **params, std::index_sequence<I...>) {
    f(*(A *)params[I]...);
}
template <auto F> void entry(void **params) {
    [params]<class... A>(void (*f)(A...)) { unpack(f, params, std::index_sequence_for<A...>{}); }(F);
}
template <class... A> constexpr bool eight(void (*)(A...)) { return ((sizeof(A) == 8) && ...); }
} // namespace emu

#define KERNEL_OF(most, name, params)                                                             \
    extern "C" void name params;                                                                  \
    static_assert(emu::eight(name), "every argument of a kernel is 8 bytes");                     \
    static emu::Kernel registered_##name(#name, __FILE__, emu::entry<name>, most);                \
    extern "C" void name params
#define KERNEL(name, params) KERNEL_OF(256, name, params)
#define KERNEL_HALF(name, params) KERNEL_OF(128, name, params)
#define KERNEL_PAIR(name, params) KERNEL_OF(256, name, params)
#define KERNEL_WIDE(name, params) KERNEL_OF(512, name, params)
#define KERNEL_THREE(name, params) KERNEL_OF(384, name, params)
#define DEV static inline
// Different sources define types with the same names but different methods, so the linker must not merge them.
#define METHOD __attribute__((always_inline)) inline
#define SHARED(type, name, n)                                        \
    static const size_t at_##name = emu::place(sizeof(type) * (n)); \
    type(&name)[n] = *(type(*)[n])(emu::block.fixed + at_##name)
#define DYNAMIC_SHARED(name) unsigned char *const name = emu::block.shared
#define UNROLL
#define UNROLL_BY(n)
#define HERE emu::Site at = emu::Site::current()

#define threadIdx (emu::fiber->thread)
#define blockIdx (emu::block.block)
#define blockDim (emu::block.threads)
#define gridDim (emu::block.blocks)

template <class To, class From> static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the bits of one are those of the other");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
static inline float __uint_as_float(unsigned u) { return same_bits<float>(u); }
static inline unsigned __float_as_uint(float f) { return same_bits<unsigned>(f); }
static inline float __int_as_float(int i) { return same_bits<float>(i); }
static inline double __longlong_as_double(long long i) { return same_bits<double>(i); }

// The sources are compiled without contraction, so each operation rounds once.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline void sincospif(float a, float *sine, float *cosine) {
    *sine = (float)sin(M_PI * (double)a), *cosine = (float)cos(M_PI * (double)a);
}
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline int __popc(unsigned u) { return __builtin_popcount(u); }
static inline int __ffs(int i) { return __builtin_ffs(i); }

static inline void __syncthreads(HERE) {
    if (!emu::omits("__syncthreads", at)) emu::yield("__syncthreads");
}
static inline void __syncwarp(HERE) {
    if (!emu::omits("__syncwarp", at)) emu::exchange("__syncwarp", 0);
}
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
    return emu::read<T>(emu::exchange("__shfl_xor_sync", x)[(emu::fiber->lane ^ mask) & 31]);
}
template <class T> T __shfl_sync(unsigned, T x, int lane) {
    return emu::read<T>(emu::exchange("__shfl_sync", x)[lane & 31]);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
    const emu::Slot *all = emu::exchange("__ballot_sync", predicate);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)(emu::read<int>(all[i]) != 0) << i;
    return bits;
}

struct bf16;
static inline float bf16_half(unsigned pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }

static inline void mma16816(float *d, const unsigned *a, const unsigned *b) { emu::mma(d, a, b); }
static inline unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - emu::block.shared); }
static inline void copy_chunk(void *to, const void *from, bool there) { emu::copy(to, there ? from : nullptr, 16); }
static inline void copy_word(void *to, const void *from, bool there) { emu::copy(to, there ? from : nullptr, 4); }
template <class Chunk> void put_chunk(void *to, const Chunk &chunk) { emu::put(to, &chunk, sizeof chunk); }
static inline void copies_here(HERE) {
    if (!emu::omits("cp.async.wait_all", at)) emu::copied();
}
static inline void copies_done(HERE) {
    if (!emu::omits("cp.async.wait_all", at)) emu::copied();
    if (!emu::omits("fence.proxy.async", at)) emu::show_writes();
}
static inline float power2(float x) { return exp2f(x); }
static inline float reciprocal(float x) { return 1 / x; }

// Hopper's matrix units, under the names of hopper.cuh. Products run one warp at a time, asynchronously, on the
// memory that descriptors name.
static inline void products_begin(HERE) {
    if (!emu::omits("wgmma.fence", at)) emu::exchange("products_begin", 0), emu::fence();
}
static inline void products_commit(HERE) {
    if (!emu::omits("wgmma.commit_group", at)) emu::exchange("products_commit", 0), emu::commit();
}
template <int N> void products_wait(HERE) {
    if (!emu::omits("wgmma.wait_group", at)) emu::exchange("products_wait", 0), emu::wait_products(N);
}
template <int N> void settle(float (*d)[4], HERE) {
    if (!emu::omits("settle", at)) emu::settle(d, 16 * N);
}
template <int N> void settle(unsigned (*a)[4], HERE) {
    if (!emu::omits("settle", at)) emu::settle(a, 16 * N);
}
static inline unsigned anew(unsigned x) { return x; }
template <int COLUMNS> void wgmma_rows(float (*d)[4], unsigned long long a, unsigned long long b, int add) { emu::product(COLUMNS, d, nullptr, a, b, true, add); }
template <int COLUMNS> void wgmma_own(float (*d)[4], const unsigned *a, unsigned long long b, int add) { emu::product(COLUMNS, d, a, 0, b, true, add); }
template <int COLUMNS> void wgmma_gather(float (*d)[4], const unsigned *a, unsigned long long b, int add = 1) { emu::product(COLUMNS, d, a, 0, b, false, add); }

// Barriers and the copy engine. The scheduler completes requested copies at any time and in any order.
static inline void barrier_init(unsigned long long *b, int arrivals, HERE) {
    if (!emu::omits("mbarrier.init", at)) emu::init((emu::Barrier *)b, arrivals);
}
static inline void barriers_ready(HERE) {
    emu::omits("fence.mbarrier_init", at); // affects other blocks of a cluster only, and there are none
    if (!emu::omits("fence.proxy.async", at)) emu::show_barriers();
}
static inline void barrier_arrive(unsigned long long *b, HERE) {
    if (!emu::omits("mbarrier.arrive", at)) emu::arrive((emu::Barrier *)b, 0), emu::pause();
}
static inline void barrier_expect(unsigned long long *b, int bytes, HERE) {
    if (!emu::omits("mbarrier.arrive.expect_tx", at)) emu::arrive((emu::Barrier *)b, bytes), emu::pause();
}
static inline void barrier_wait(unsigned long long *b, unsigned parity, HERE) {
    if (!emu::omits("mbarrier.try_wait", at)) emu::wait((emu::Barrier *)b, parity);
}
static inline void bulk_copy(void *to, const void *map, unsigned long long *b, int element, int head, int sequence, int token) {
    emu::bring((unsigned char *)to, (const emu::Map *)map, (emu::Barrier *)b, element, head, sequence, token);
}
static inline void map_ready(const void *map, HERE) {
    if (!emu::omits("fence.proxy.tensormap", at)) emu::show_map(map);
}
static inline void turn_wait(int turn, HERE) {
    if (!emu::omits("bar.sync", at)) emu::turn(turn, true);
}
static inline void turn_pass(int turn, HERE) {
    if (!emu::omits("bar.arrive", at)) emu::turn(turn, false);
}
template <int N> void registers_down(HERE) {
    if (!emu::omits("setmaxnreg.dec", at)) emu::set_registers(N, false);
}
template <int N> void registers_up(HERE) {
    if (!emu::omits("setmaxnreg.inc", at)) emu::set_registers(N, true);
}
static inline unsigned matrix_pair(const void *low, int low_at, const void *high, int high_at) {
    return ((const unsigned short *)low)[low_at] | (unsigned)((const unsigned short *)high)[high_at] << 16;
}
static inline void ldmatrix(unsigned *r, const bf16 *row) {
    const emu::Slot *all = emu::exchange("ldmatrix", row);
    const int g = emu::fiber->lane / 4, t = emu::fiber->lane % 4;
    for (int i = 0; i < 4; i++) {
        const void *p = emu::read<const void *>(all[8 * i + g]);
        r[i] = matrix_pair(p, 2 * t, p, 2 * t + 1);
    }
}
static inline void ldmatrix_trans(unsigned *r, const bf16 *row) {
    const emu::Slot *all = emu::exchange("ldmatrix_trans", row);
    const int g = emu::fiber->lane / 4, t = emu::fiber->lane % 4;
    for (int i = 0; i < 4; i++)
        r[i] = matrix_pair(emu::read<const void *>(all[8 * i + 2 * t]), g, emu::read<const void *>(all[8 * i + 2 * t + 1]), g);
}
