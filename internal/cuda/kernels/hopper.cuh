// Hopper's matrix units: products of a warpgroup, and the tiles in shared memory that they read.
//
// A tile holds tokens of a head of DIM elements, as panels of 64 elements. A panel's rows have 128 bytes each,
// in swizzled 16-byte chunks: chunk c of row r is at c^(r%8). If 64 does not divide DIM, panels have 32
// elements, rows have 64 bytes, and the chunk is at c^(r/2%4). If 32 does not divide DIM either, panels have 16
// elements, rows have 32 bytes, and the chunk is at c^(r/4%2). Tiles start at multiples of 1024 bytes, so that
// wgmma can compute these places from addresses. The macros are for use in templates with a parameter DIM.
#define PANEL (DIM % 64 == 0 ? 64 : DIM % 32 == 0 ? 32 : 16)
#define ROW_BYTES (2 * PANEL)
#define TILE_BYTES(tokens) ((tokens) * 2 * DIM)

#ifndef CUDA_EMULATOR
// copies_done waits for the copies of this thread and makes them visible to the matrix units, which read memory
// through the async proxy.
DEV void copies_done() {
    copies_here();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// put_chunk writes 16 bytes to shared memory.
DEV void put_chunk(void *to, Quad chunk) { *(Quad *)to = chunk; }
DEV void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// products_wait waits until at most N groups of products are under way.
template <int N> DEV void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// settle keeps the compiler from moving uses of accumulators across a wait, and from reusing operand registers that
// products under way still read.
template <int N> DEV void settle(float (*d)[4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[i][e])::"memory");
}
template <int N> DEV void settle(u32 (*a)[4]) {
    UNROLL for (int i = 0; i < N; i++) UNROLL for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[i][e])::"memory");
}
// anew returns x in a form that keeps the compiler from computing values that depend on it ahead of a loop, for which
// registers would not suffice.
DEV u32 anew(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
// wgmma_rows computes d[64,COLUMNS] = a[64,16] b[COLUMNS,16]^T, or += if `add`; a and b are tile descriptors. wgmma_own
// has a in registers as for mma.sync. So has wgmma_gather, whose b[16,COLUMNS] is not transposed.
template <int COLUMNS> DEV void wgmma_rows(float (*d)[4], u64 a, u64 b, int add);
template <int COLUMNS> DEV void wgmma_own(float (*d)[4], const u32 *a, u64 b, int add);
template <int COLUMNS> DEV void wgmma_gather(float (*d)[4], const u32 *a, u64 b, int add = 1);
// PLACES and NUMBERS list the accumulators of a product by its number of columns.
#define FOUR(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define EIGHT(i) FOUR(d[i]), FOUR(d[i + 1])
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 2)
#define THIRTY_TWO(i) SIXTEEN(i), SIXTEEN(i + 4)
#define NUMBERS_32 SIXTEEN(0)
#define NUMBERS_48 NUMBERS_32, EIGHT(4)
#define NUMBERS_64 THIRTY_TWO(0)
#define NUMBERS_80 NUMBERS_64, EIGHT(8)
#define NUMBERS_96 NUMBERS_64, SIXTEEN(8)
#define NUMBERS_112 NUMBERS_96, EIGHT(12)
#define NUMBERS_128 NUMBERS_64, THIRTY_TWO(8)
#define NUMBERS_192 NUMBERS_128, THIRTY_TWO(16)
#define NUMBERS_256 NUMBERS_192, THIRTY_TWO(24)
#define PLACES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_48 PLACES_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PLACES_64 PLACES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_80 PLACES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PLACES_96 PLACES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_112 PLACES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PLACES_128 PLACES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_192 PLACES_128                                                                                                  \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"                         \
    ",%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES_256 PLACES_192                                                                                                  \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119"     \
    ",%120,%121,%122,%123,%124,%125,%126,%127"
// WGMMA defines the products with a number of columns, whose operands other than accumulators have the places from P0 on.
#define WGMMA(COLUMNS, P0, P1, P2, P3, P4, P5)                                                                                 \
    template <> DEV void wgmma_rows<COLUMNS>(float (*d)[4], u64 a, u64 b, int add) {                                           \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" PLACES_##COLUMNS "}, "                 \
                     "%" #P0 ", %" #P1 ", p, 1, 1, 0, 0; }"                                                                    \
                     : NUMBERS_##COLUMNS : "l"(a), "l"(b), "r"(add));                                                          \
    }                                                                                                                          \
    OWN_WGMMA(wgmma_own, 0, COLUMNS, P0, P1, P2, P3, P4, P5)                                                                   \
    OWN_WGMMA(wgmma_gather, 1, COLUMNS, P0, P1, P2, P3, P4, P5)
#define OWN_WGMMA(NAME, TRANSPOSED, COLUMNS, P0, P1, P2, P3, P4, P5)                                                           \
    template <> DEV void NAME<COLUMNS>(float (*d)[4], const u32 *a, u64 b, int add) {                                          \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" PLACES_##COLUMNS "}, "                 \
                     "{%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4 ", p, 1, 1, " #TRANSPOSED "; }"                            \
                     : NUMBERS_##COLUMNS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
    }
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(48, 24, 25, 26, 27, 28, 29)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(80, 40, 41, 42, 43, 44, 45)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(112, 56, 57, 58, 59, 60, 61)
WGMMA(128, 64, 65, 66, 67, 68, 69)
WGMMA(192, 96, 97, 98, 99, 100, 101)
WGMMA(256, 128, 129, 130, 131, 132, 133)
// Barriers in shared memory. A barrier enters its next phase when the given number of threads and all announced
// bytes have arrived. barrier_wait waits for the end of the phase with the given parity; the first phase has
// parity 0.
DEV void barrier_init(u64 *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// barriers_ready makes barriers visible to the copy engine and, after __syncthreads, to the other threads.
DEV void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory"); }
DEV void barrier_arrive(u64 *b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory"); }
DEV void barrier_expect(u64 *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
DEV u32 barrier_over(u64 *b, u32 parity) {
    u32 over;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(over) : "r"(shared_address(b)), "r"(parity) : "memory");
    return over;
}
#ifndef BOUNDED_WAITS
DEV void barrier_wait(u64 *b, u32 parity) {
    while (!barrier_over(b, parity)) {}
}
#else
// A wait gives up after 2^32 cycles, which takes seconds. It writes its line, block and thread to pinned host
// memory, and the host discards the results. Later waits give up after 2^16 cycles. The wait does not trap: if
// the kernel had another exit, the compiler would make each product end before the next begins.
extern "C" {
__device__ u64 *wait_record;
}
DEV void barrier_wait_at(u64 *b, u32 parity, int line) {
    const i64 began = clock64(), most = 1ll << 32; // cycles
    while (!barrier_over(b, parity))
        if (clock64() - began > (*(volatile u64 *)wait_record ? 1 << 16 : most)) {
            volatile u64 *const record = wait_record;
            record[1] = (u64)blockIdx.x | (u64)blockIdx.y << 32, record[2] = (u64)blockIdx.z | (u64)threadIdx.x << 32;
            record[0] = (u64)line;
            break;
        }
}
#define barrier_wait(b, parity) barrier_wait_at(b, parity, __LINE__)
#endif
// bulk_copy has the copy engine copy a box of the tensor that a map in device memory describes, and notify a barrier.
DEV void bulk_copy(void *to, const void *map, u64 *b, int element, int head, int sequence, int token) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];"
                 ::"r"(shared_address(to)), "l"(map), "r"(element), "r"(head), "r"(sequence), "r"(token), "r"(shared_address(b)) : "memory");
}
// map_ready makes a map visible to the copy engine. The host writes maps as data, hence the system scope.
DEV void map_ready(const void *map) { asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory"); }
// A warpgroup gives registers away, or takes registers that another gave away.
template <int N> DEV void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// Two warpgroups take turns. turn_wait waits for a turn, which the other warpgroup grants with turn_pass; the calls
// match in pairs.
DEV void turn_wait(int turn) { asm volatile("bar.sync %0, 256;" ::"r"(turn + 1) : "memory"); }
DEV void turn_pass(int turn) { asm volatile("bar.arrive %0, 256;" ::"r"(turn + 1) : "memory"); }
#endif

// Descriptors of a tile of ROWS tokens. The layout repeats every eight rows of a panel. by_rows describes 16
// elements of each token, starting at `element`. by_columns describes all elements of 16 tokens, starting at `token`;
// panels follow each other. Both take a tile's start from start_of: the upper word of a descriptor is constant, and
// the lower word, with the start and the distance `leading` of neighbouring panels, is one addition away.
DEV u32 start_of(const unsigned char *tile) { return (shared_address(tile) & 0x3ffff) >> 4; }
// UNITS converts bytes into the units of descriptors.
#define UNITS(bytes) ((bytes) >> 4)
template <int DIM> DEV u64 descriptor(u32 start, int from, int leading) {
    const u32 upper = UNITS(8 * ROW_BYTES) | (PANEL == 64 ? 1u : PANEL == 32 ? 2u : 3u) << 30;
    return (u64)upper << 32 | (start + (UNITS(from) | UNITS(leading) << 16));
}
template <int DIM, int ROWS> DEV u64 by_rows(u32 tile, int element) {
    return descriptor<DIM>(tile, element / PANEL * (ROWS * ROW_BYTES) + element % PANEL * 2, 16);
}
template <int DIM, int ROWS> DEV u64 by_columns(u32 tile, int token) { return descriptor<DIM>(tile, token * ROW_BYTES, ROWS * ROW_BYTES); }

// warpgroup returns the number of a thread's warpgroup in a form that tells the compiler that all lanes of a warp
// agree.
DEV int warpgroup() { return __shfl_sync(ALL, (int)(threadIdx.x / 128), 0); }

// tile_start returns the first address in shared memory where a tile may start.
DEV unsigned char *tile_start(unsigned char *memory) { return memory + (1024 - shared_address(memory) % 1024) % 1024; }

// swizzled returns the place of chunk c in row r of a panel.
template <int DIM> DEV int swizzled(int c, int r) { return PANEL == 64 ? (c ^ r) & 7 : PANEL == 32 ? (c ^ r >> 1) & 3 : (c ^ r >> 2) & 1; }

// own_rows loads a warp's 16 rows of a tile of ROWS tokens as operands a of a product over the elements of a head.
template <int DIM, int ROWS> DEV void own_rows(u32 (*a)[4], const unsigned char *tile, int row) {
    const int r = row + (threadIdx.x & 15), half = threadIdx.x >> 4 & 1;
    UNROLL for (int s = 0; s < DIM / 16; s++)
        ldmatrix(a[s], (const bf16 *)(tile + 16 * s / PANEL * (ROWS * ROW_BYTES) + r * ROW_BYTES + swizzled<DIM>(2 * s % (PANEL / 8) + half, r) * 16));
}

// fetch begins to load ROWS tokens of a head into a tile with THREADS threads, with zeros past the last token. A
// thread copies the same chunks of every `apart`-th token: one chunk per token if the threads can share whole tokens,
// one chunk per token and panel otherwise. `apart` is a multiple of eight, so one address and one step serve all
// of a thread's tokens.
template <int DIM, int ROWS, int THREADS>
DEV void fetch(unsigned char *tile, const bf16 *p, i64 token, i64 tokens, i64 sequence, i64 batch, i64 head, i64 heads) {
    const bool whole = aligned(p);
    const int beside = THREADS % DIM == 0 ? DIM / 8 : PANEL / 8, apart = THREADS / beside, r = threadIdx.x / beside, c = threadIdx.x % beside;
    unsigned char *const to = tile + c * 8 / PANEL * (ROWS * ROW_BYTES) + r * ROW_BYTES + swizzled<DIM>(c, r) * 16;
    const bf16 *from = p + (((token + r) * batch + sequence) * heads + head) * DIM + c * 8;
    const i64 step = apart * batch * heads * DIM;
    UNROLL for (int i = 0; i < ROWS; i += apart, from += step) {
        if (ROWS % apart != 0 && r + i >= ROWS) break;
        const bool there = token + r + i < tokens;
        UNROLL for (int e = 0; e < DIM; e += beside * 8) {
            unsigned char *const place = to + e / PANEL * (ROWS * ROW_BYTES) + i * ROW_BYTES;
            if (whole) {
                copy_chunk(place, there ? from + e : p, there);
            } else {
                u32 words[4];
                UNROLL for (int w = 0; w < 4; w++) words[w] = there ? (u32)from[e + 2 * w].bits | (u32)from[e + 2 * w + 1].bits << 16 : 0;
                put_chunk(place, Quad{words[0], words[1], words[2], words[3]});
            }
        }
    }
}
