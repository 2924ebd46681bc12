// The scheduler of fibers. Built together with the kernels' sources into one shared library.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include <sys/mman.h>
#include "cuemu.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#define EMU_PORTABLE 1
#include <ucontext.h>
#endif

namespace emu {
thread_local Fiber *fiber;
thread_local Block block;

static Kernel *kernels;
Kernel::Kernel(const char *name, Entry entry) : name(name), entry(entry), next(kernels) { kernels = this; }

// A context switch: six registers and the stack pointer, or the C library's way where the processor is another.
#ifndef EMU_PORTABLE
typedef void *Context;
extern "C" void emu_switch(Context *save, Context *load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    ret
.size emu_switch,.-emu_switch
)");
static void prepare(Context *c, unsigned char *stack, size_t size, void (*start)()) {
    void **top = (void **)((uintptr_t)(stack + size) & ~(uintptr_t)15);
    *--top = nullptr; // where start would return to: it never does
    *--top = (void *)start;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    *c = top;
}
static void change(Context *save, Context *load) { emu_switch(save, load); }
#else
typedef ucontext_t Context;
static void prepare(Context *c, unsigned char *stack, size_t size, void (*start)()) {
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = size;
    c->uc_link = nullptr;
    makecontext(c, start, 0);
}
static void change(Context *save, Context *load) { swapcontext(save, load); }
#endif

static const size_t stackBytes = 128 << 10;
static const char done[] = "its end", barrier[] = "__syncthreads";

// One launch at a time on a system thread; several threads may launch at once.
static thread_local Context home;
static thread_local std::vector<Context> contexts;
static thread_local std::vector<Fiber> fibers;
static thread_local unsigned char *stacks;
static thread_local size_t stackCount;
static thread_local Entry entry_point;
static thread_local void **arguments;
static thread_local uint64_t seed;
static thread_local std::string failure;

void yield(const char *stop) {
    Fiber *self = fiber;
    self->stop = stop;
    change(&contexts[self - fibers.data()], &home);
}

static void start() {
    entry_point(arguments);
    for (;;) yield(done);
}

static unsigned random_below(unsigned n) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (unsigned)((seed >> 33) % n);
}

// An order in which to run: as numbered where the seed is 0.
static void shuffle(std::vector<int> &order, int n) {
    order.resize(n);
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; seed != 0 && i > 0; i--) std::swap(order[i], order[random_below(i + 1)]);
}

static bool fail(const char *a, const char *b, const char *who, int number) {
    char text[256];
    snprintf(text, sizeof text, "block (%u,%u,%u): threads of %s %d are at %s and at %s", block.block.x, block.block.y,
             block.block.z, who, number, a, b);
    failure = text;
    return false;
}

// Runs a warp until its lanes are at a barrier or at their end.
static bool run_warp(int warp, std::vector<int> &order) {
    Fiber *lanes = &fibers[warp * 32];
    for (;;) {
        shuffle(order, 32);
        for (int i : order) {
            fiber = &lanes[i];
            if (fiber->stop != done) change(&home, &contexts[warp * 32 + i]);
        }
        for (int i = 1; i < 32; i++)
            if (strcmp(lanes[i].stop, lanes[0].stop) != 0 || lanes[i].operations != lanes[0].operations)
                return fail(lanes[0].stop, lanes[i].stop, "warp", warp);
        if (strcmp(lanes[0].stop, barrier) == 0 || lanes[0].stop == done) return true;
    }
}

static bool run_block(int warps) {
    for (int i = 0; i < 32 * warps; i++) {
        fibers[i] = Fiber{{(unsigned)i, 0, 0}, i / 32, i % 32, 0, ""};
        prepare(&contexts[i], stacks + i * stackBytes, stackBytes, start);
    }
    static thread_local std::vector<int> order, lanes;
    for (;;) {
        shuffle(order, warps);
        for (int w : order)
            if (!run_warp(w, lanes)) return false;
        for (int w = 1; w < warps; w++)
            if (strcmp(fibers[32 * w].stop, fibers[0].stop) != 0) return fail(fibers[0].stop, fibers[32 * w].stop, "warp", w);
        if (fibers[0].stop == done) return true;
    }
}

static void reserve(size_t threads) {
    contexts.resize(threads);
    fibers.resize(threads);
    if (threads <= stackCount) return;
    if (stacks) munmap(stacks, stackCount * stackBytes);
    stacks = (unsigned char *)mmap(nullptr, threads * stackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    stackCount = threads;
}
} // namespace emu

// emu_find is the kernel of a name, or 0.
extern "C" const void *emu_find(const char *name) {
    for (emu::Kernel *k = emu::kernels; k; k = k->next)
        if (strcmp(k->name, name) == 0) return k;
    return nullptr;
}

// emu_launch runs a grid to its end and returns 0, or what went wrong, valid until the thread's next launch. The parameters
// are those of cuLaunchKernel. A seed other than 0 permutes the order of lanes and warps.
extern "C" const char *emu_launch(const void *kernel, u_int64_t gx, u_int64_t gy, u_int64_t gz, u_int64_t threads,
                                  u_int64_t shared, void **params, u_int64_t seed) {
    using namespace emu;
    failure.clear();
    if (threads == 0 || threads % 32 != 0 || threads > 1024 || gx == 0 || gy == 0 || gz == 0 || gy > 65535 || gz > 65535)
        return "emulator: a grid that a GPU would refuse";
    reserve(threads);
    const int warps = (int)threads / 32;
    std::vector<unsigned char> dynamic(shared + 16);
    std::vector<Slot> slots((size_t)warps * 2 * 32);
    block = Block{{0, 0, 0}, {(unsigned)gx, (unsigned)gy, (unsigned)gz}, {(unsigned)threads, 1, 1},
                  (unsigned char *)(((uintptr_t)dynamic.data() + 15) & ~(uintptr_t)15), (Slot(*)[2][32])slots.data()};
    entry_point = ((const Kernel *)kernel)->entry, arguments = params, emu::seed = seed;
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx; x++) {
                block.block = uint3{x, y, z};
                memset(dynamic.data(), 0xff, dynamic.size());
                if (!run_block(warps)) return failure.c_str();
            }
    return nullptr;
}
