// A CUDA driver without a GPU, for tests. Device memory is host memory, every stream is a thread with a queue,
// events order streams, and kernels come from a shared library that runs them on the processor. An image that is
// loaded as a module is the path of such a library, which exports emu_find and emu_launch.
//
// It is stricter than a real driver: contexts must be current, copies must be inside memory that was allocated or
// pinned, and only existing objects can be destroyed. As on a GPU, faults appear when something waits for a
// stream. The functions fake_... at the end control it: the n-th call fails, memory is short, streams are delayed.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, NOT_WHILE_CAPTURED = 900, UNJOINED = 904, ISOLATION = 905 };
typedef int Result;
typedef uintptr_t Ptr;

#define DEVICES 8
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int devices = 1, retained[DEVICES];
static int64_t memory_total = 1 << 30, memory_used;
static int64_t calls, fail_at;
static int fail_code, delay_us, fault;
static uint64_t seed; // of the emulator, for all launches
static char fault_text[256];
static __thread uintptr_t current;

// Objects that exist, so that tests detect leaks and calls detect invalid handles.
enum { DEVICE_MEMORY, HOST_MEMORY, STREAM, EVENT, MODULE, GRAPH, EXEC, KINDS };
struct Object {
    int kind;
    uintptr_t at;
    size_t size;
    uintptr_t context; // context that was current when it was created
    struct Object *next;
};
static struct Object *objects;
static int64_t live[KINDS];

static void add(int kind, uintptr_t at, size_t size) {
    struct Object *o = malloc(sizeof *o);
    *o = (struct Object){kind, at, size, current, objects};
    objects = o;
    live[kind]++;
}
static struct Object *find(int kind, uintptr_t at) {
    for (struct Object *o = objects; o; o = o->next)
        if (o->kind == kind && o->at == at) return o;
    return NULL;
}
static int take(int kind, uintptr_t at) {
    for (struct Object **p = &objects; *p; p = &(*p)->next)
        if ((*p)->kind == kind && (*p)->at == at) {
            struct Object *o = *p;
            *p = o->next;
            free(o);
            live[kind]--;
            return 1;
        }
    return 0;
}
// memory returns the object that contains an address that the GPU can access.
static struct Object *memory(uintptr_t at) {
    for (struct Object *o = objects; o; o = o->next)
        if ((o->kind == DEVICE_MEMORY || o->kind == HOST_MEMORY) && at >= o->at && at < o->at + o->size) return o;
    return NULL;
}
// inside reports whether a range is within one object: no copy may span two, even if they are adjacent.
static int inside(uintptr_t at, size_t size) {
    struct Object *o = memory(at);
    return !size || (o && size <= o->at + o->size - at);
}

// Streams.
enum { COPY, RECORD, WAIT, LAUNCH, CALL, END };
struct Event {
    uint64_t recorded, passed; // number of recordings, and how many of them streams have reached
    struct timespec time;
    struct Graph *graph;   // graph that contains its last recording
    struct Node *recorder; // node of that recording
};
struct Kernel {
    uintptr_t context;
    unsigned shared; // maximum dynamic shared memory of a launch
    const void *kernel;
    const char *(*launch)(const void *, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, void **, uint64_t);
};
struct Work {
    int kind;
    uintptr_t to, from;
    size_t size;
    struct Event *event;
    uint64_t number;
    struct Kernel *kernel;
    uint64_t grid[3], threads, shared;
    uint64_t arguments[64];
    void (*call)(void *);
    uint64_t argument[64];
    struct Work *next;
};
struct Stream {
    pthread_t thread;
    struct Work *first, *last;
    uint64_t issued, done;
    struct Graph *graph; // graph that captures it
    int computes;        // it has launched a kernel
};
// A graph contains the work that captured streams received, in the order in which they received it.
struct Node {
    struct Work work;
    struct Stream *stream;
    struct Node *recorder; // for a wait: the recording that it waits for
    struct Event event;    // for a recording: set at each launch
    struct Node *next;
};
struct Graph {
    struct Stream *origin;
    struct Node *first, *last;
};

// Errors that tests plant. STALE: a copy to pinned memory has no effect if an earlier one had the same target, which then
// keeps its old contents. UNAWAITED: copies take long, and streams with kernels do not wait for events.
enum { STALE = 1, UNAWAITED };
static int planted;
static struct Target {
    uintptr_t at;
    struct Target *next;
} *targets;
static int lost(uintptr_t to) { // requires the lock
    if (planted != STALE || memory(to)->kind != HOST_MEMORY) return 0;
    for (struct Target *t = targets; t; t = t->next)
        if (t->at == to) return 1;
    struct Target *t = malloc(sizeof *t);
    *t = (struct Target){to, targets};
    targets = t;
    return 0;
}

static void fail(const char *what) {
    if (!fault) snprintf(fault_text, sizeof fault_text, "%s", what);
    fault = 1;
}
static void launch(struct Work *w) {
    void *params[64];
    for (int i = 0; i < 64; i++) params[i] = &w->arguments[i];
    const char *wrong = w->kernel->launch(w->kernel->kernel, w->grid[0], w->grid[1], w->grid[2], w->threads, w->shared, params, seed);
    if (wrong) {
        pthread_mutex_lock(&lock);
        fail(wrong);
        pthread_mutex_unlock(&lock);
    }
}
static void *serve(void *p) {
    struct Stream *s = p;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first) pthread_cond_wait(&changed, &lock);
        struct Work *w = s->first;
        if (delay_us && w->kind != END) {
            pthread_mutex_unlock(&lock);
            struct timespec t = {0, 1000L * (rand() % delay_us)};
            nanosleep(&t, NULL);
            pthread_mutex_lock(&lock);
        }
        if (w->kind == COPY && !fault) {
            if (!inside(w->to, w->size) || !inside(w->from, w->size)) {
                fail("a copy outside of memory");
            } else if (w->size && !lost(w->to)) {
                pthread_mutex_unlock(&lock);
                if (planted == UNAWAITED) nanosleep(&(struct timespec){0, 20000000}, NULL);
                memmove((void *)w->to, (void *)w->from, w->size);
                pthread_mutex_lock(&lock);
            }
        } else if (w->kind == LAUNCH && !fault) {
            s->computes = 1;
            pthread_mutex_unlock(&lock);
            launch(w);
            pthread_mutex_lock(&lock);
        } else if (w->kind == CALL) {
            pthread_mutex_unlock(&lock);
            w->call(w->argument); // a copy of the argument for this issue
            pthread_mutex_lock(&lock);
        } else if (w->kind == RECORD) {
            if (w->event->passed < w->number) w->event->passed = w->number;
            clock_gettime(CLOCK_MONOTONIC, &w->event->time);
        } else if (w->kind == WAIT) {
            while (w->event->passed < w->number && !(planted == UNAWAITED && s->computes)) pthread_cond_wait(&changed, &lock);
        }
        s->first = w->next;
        s->done++;
        pthread_cond_broadcast(&changed);
        int end = w->kind == END;
        free(w);
        if (end) break;
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}
static void push(struct Stream *s, struct Work work) { // requires the lock
    struct Work *w = malloc(sizeof *w);
    *w = work;
    w->next = NULL;
    if (s->first) s->last->next = w;
    else s->first = w;
    s->last = w;
    s->issued++;
    pthread_cond_broadcast(&changed);
}

// SPPO_FAKE_FAULT makes a process cause a fault at one of its calls: "fail 300 FILE", "hang 300 FILE" or "die 300
// FILE". The fault creates FILE. If FILE already exists, there is no fault, so only one of many processes is affected.
static char env_mode[8], env_file[256];
static long env_at;
__attribute__((constructor)) static void steer(void) {
    const char *text = getenv("SPPO_FAKE_FAULT");
    if (!text || sscanf(text, "%7s %ld %255s", env_mode, &env_at, env_file) != 3) env_at = 0;
}
static int wrong_here(void) { // requires the lock
    if (!env_at || calls != env_at) return 0;
    FILE *f = fopen(env_file, "wx");
    if (!f) return 0;
    fclose(f);
    if (env_mode[0] == 'd') raise(SIGKILL);
    while (env_mode[0] == 'h') sleep(1);
    fault = 1; // from now on every call that waits fails, too
    return 1;
}

// enter counts a call, and returns an error if the call is to fail. It leaves the lock held; out releases it.
static Result out(Result r) {
    pthread_mutex_unlock(&lock);
    return r;
}
static Result enter(int context) {
    pthread_mutex_lock(&lock);
    calls++;
    if (wrong_here()) return ILLEGAL_ADDRESS;
    if (fail_at && calls == fail_at) return fail_code;
    if (context && !current) return INVALID_CONTEXT;
    return OK;
}
#define ENTER(context) \
    do { \
        Result r_ = enter(context); \
        if (r_ != OK) return out(r_); \
    } while (0)
// Functions that free objects do so even if they are made to fail, as they do after a fault.
#define LEAVE(done) \
    do { \
        Result r_ = enter(1); \
        int found_ = (done); \
        return out(r_ != OK ? r_ : found_ ? OK : INVALID_HANDLE); \
    } while (0)

Result cuInit(unsigned flags) { ENTER(0); return out(flags ? INVALID_VALUE : OK); }
Result cuDriverGetVersion(int *v) { ENTER(0); *v = 12040; return out(OK); }
static const char *name_of(int code, int words) {
    switch (code) {
    case OUT_OF_MEMORY: return words ? "out of memory" : "CUDA_ERROR_OUT_OF_MEMORY";
    case INVALID_CONTEXT: return words ? "invalid device context" : "CUDA_ERROR_INVALID_CONTEXT";
    case INVALID_HANDLE: return words ? "invalid resource handle" : "CUDA_ERROR_INVALID_HANDLE";
    case NOT_FOUND: return words ? "named symbol not found" : "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return words ? "device not ready" : "CUDA_ERROR_NOT_READY";
    case ILLEGAL_ADDRESS: return words ? "an illegal memory access was encountered" : "CUDA_ERROR_ILLEGAL_ADDRESS";
    case LAUNCH_FAILED: return words ? "unspecified launch failure" : "CUDA_ERROR_LAUNCH_FAILED";
    case NOT_WHILE_CAPTURED: return words ? "operation not permitted when stream is capturing" : "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    case UNJOINED: return words ? "capturing stream has unjoined work" : "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    case ISOLATION: return words ? "dependency created on uncaptured work in another stream" : "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    case INVALID_VALUE: return words ? "invalid argument" : "CUDA_ERROR_INVALID_VALUE";
    }
    return NULL;
}
Result cuGetErrorName(int code, const char **p) { *p = name_of(code, 0); return *p ? OK : INVALID_VALUE; }
Result cuGetErrorString(int code, const char **p) { *p = name_of(code, 1); return *p ? OK : INVALID_VALUE; }
Result cuDeviceGetCount(int *n) { ENTER(0); *n = devices; return out(OK); }
Result cuDeviceGet(int *d, int i) { ENTER(0); *d = i; return out(i < devices ? OK : INVALID_VALUE); }
Result cuDeviceGetName(char *p, int n, int d) { ENTER(0); snprintf(p, n, "fake GPU %d", d); return out(OK); }
Result cuDeviceGetPCIBusId(char *p, int n, int d) { ENTER(0); snprintf(p, n, "0000:0%d:00.0", d); return out(OK); }
Result cuDeviceGetAttribute(int *v, int a, int d) {
    ENTER(0);
    *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 4 : a == 97 ? 232448 : 0;
    return out(d < devices ? OK : INVALID_VALUE);
}
Result cuDeviceTotalMem_v2(size_t *n, int d) { ENTER(0); *n = memory_total; return out(d < devices ? OK : INVALID_VALUE); }
Result cuDevicePrimaryCtxRetain(uintptr_t *c, int d) { ENTER(0); retained[d]++; *c = d + 1; return out(OK); }
Result cuDevicePrimaryCtxRelease_v2(int d) {
    Result r = enter(0);
    int had = retained[d] > 0;
    if (had) retained[d]--;
    return out(r != OK ? r : had ? OK : INVALID_CONTEXT);
}
Result cuCtxSetCurrent(uintptr_t c) {
    Result r = enter(0);
    if (r == OK || !c) current = c;
    return out(r);
}
Result cuCtxEnablePeerAccess(uintptr_t c, unsigned flags) { ENTER(1); return out(c && !flags ? OK : INVALID_VALUE); }
Result cuMemGetInfo_v2(size_t *f, size_t *t) { ENTER(1); *f = memory_total - memory_used; *t = memory_total; return out(OK); }
Result cuMemAlloc_v2(Ptr *p, size_t n) {
    ENTER(1);
    if (!n) return out(INVALID_VALUE);
    if (memory_used + (int64_t)n > memory_total) return out(OUT_OF_MEMORY);
    *p = (Ptr)aligned_alloc(256, (n + 255) & ~(size_t)255);
    memset((void *)*p, 0xcd, n);
    memory_used += n;
    add(DEVICE_MEMORY, *p, n);
    return out(OK);
}
static int free_memory(Ptr p) {
    struct Object *o = find(DEVICE_MEMORY, p);
    if (!o) return 0;
    memory_used -= o->size;
    take(DEVICE_MEMORY, p);
    free((void *)p);
    return 1;
}
Result cuMemFree_v2(Ptr p) { LEAVE(free_memory(p)); }
Result cuMemHostRegister_v2(Ptr p, size_t n, unsigned flags) {
    ENTER(1);
    if (!p || !n || flags != 3 || find(HOST_MEMORY, p)) return out(INVALID_VALUE);
    add(HOST_MEMORY, p, n);
    return out(OK);
}
Result cuMemHostUnregister(Ptr p) { LEAVE(take(HOST_MEMORY, p)); }
static Result copy_now(Ptr to, Ptr from, size_t n, Ptr device) {
    ENTER(1);
    if (fault) return out(ILLEGAL_ADDRESS);
    if (!inside(device, n)) return out(INVALID_VALUE);
    memcpy((void *)to, (void *)from, n);
    return out(OK);
}
Result cuMemcpyHtoD_v2(Ptr to, Ptr from, size_t n) { return copy_now(to, from, n, to); }
Result cuMemcpyDtoH_v2(Ptr to, Ptr from, size_t n) { return copy_now(to, from, n, from); }
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER(1); *least = 0, *greatest = -5; return out(OK); }
Result cuStreamCreateWithPriority(uintptr_t *p, unsigned flags, int priority) {
    ENTER(1);
    if (flags != 1 || priority > 0 || priority < -5) return out(INVALID_VALUE);
    struct Stream *s = calloc(1, sizeof *s);
    pthread_create(&s->thread, NULL, serve, s);
    *p = (uintptr_t)s;
    add(STREAM, *p, 0);
    return out(OK);
}
Result cuStreamDestroy_v2(uintptr_t p) {
    Result r = enter(1);
    if (!find(STREAM, p)) return out(INVALID_HANDLE);
    struct Stream *s = (struct Stream *)p;
    push(s, (struct Work){.kind = END});
    pthread_mutex_unlock(&lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&lock);
    take(STREAM, p);
    free(s);
    return out(r);
}
Result cuStreamSynchronize(uintptr_t p) {
    ENTER(1);
    if (p && !find(STREAM, p)) return out(INVALID_HANDLE);
    struct Stream *s = (struct Stream *)p;
    if (s && s->graph) return out(NOT_WHILE_CAPTURED);
    for (uint64_t until = s ? s->issued : 0; s && s->done < until;) pthread_cond_wait(&changed, &lock);
    return out(fault ? ILLEGAL_ADDRESS : OK);
}
Result cuStreamQuery(uintptr_t p) {
    ENTER(1);
    if (!find(STREAM, p)) return out(INVALID_HANDLE);
    struct Stream *s = (struct Stream *)p;
    return out(fault ? ILLEGAL_ADDRESS : s->done < s->issued ? NOT_READY : OK);
}
Result cuEventCreate(uintptr_t *p, unsigned flags) {
    ENTER(1);
    *p = (uintptr_t)calloc(1, sizeof(struct Event));
    add(EVENT, *p, flags);
    return out(OK);
}
static int free_event(uintptr_t p) {
    if (!take(EVENT, p)) return 0;
    return 1; // its memory stays, because streams may still have it in their queues
}
Result cuEventDestroy_v2(uintptr_t p) { LEAVE(free_event(p)); }
static struct Node *capture(struct Stream *s, struct Work w) {
    struct Node *n = calloc(1, sizeof *n);
    n->work = w, n->stream = s;
    if (s->graph->first) s->graph->last->next = n;
    else s->graph->first = n;
    return s->graph->last = n;
}
static Result enqueue(uintptr_t stream, struct Work w) { // requires the lock
    struct Object *o = find(STREAM, stream);
    if (!o || o->context != current) return out(INVALID_HANDLE);
    if (fault) return out(ILLEGAL_ADDRESS);
    struct Stream *s = (struct Stream *)stream;
    if (s->graph) capture(s, w);
    else push(s, w);
    return out(OK);
}
Result cuEventRecord(uintptr_t e, uintptr_t s) { // only waits may cross contexts
    ENTER(1);
    struct Object *of_event = find(EVENT, e), *of_stream = find(STREAM, s);
    if (!of_event || !of_stream || of_event->context != of_stream->context) return out(INVALID_HANDLE);
    struct Event *event = (struct Event *)e;
    struct Stream *stream = (struct Stream *)s;
    event->graph = stream->graph;
    if (stream->graph) {
        event->recorder = capture(stream, (struct Work){.kind = RECORD});
        return out(OK);
    }
    return enqueue(s, (struct Work){.kind = RECORD, .event = event, .number = ++event->recorded});
}
Result cuStreamWaitEvent(uintptr_t s, uintptr_t e, unsigned flags) {
    ENTER(1);
    if (!find(EVENT, e) || flags) return out(INVALID_HANDLE);
    struct Event *event = (struct Event *)e;
    struct Stream *stream = (struct Stream *)s;
    if (!find(STREAM, s)) return out(INVALID_HANDLE);
    if (event->graph && !stream->graph) stream->graph = event->graph; // this captures the stream, too
    if (event->graph != stream->graph) return out(ISOLATION);
    if (stream->graph) {
        capture(stream, (struct Work){.kind = WAIT})->recorder = event->recorder;
        return out(OK);
    }
    return enqueue(s, (struct Work){.kind = WAIT, .event = event, .number = event->recorded});
}
Result cuEventElapsedTime(float *ms, uintptr_t a, uintptr_t b) {
    ENTER(1);
    struct Object *first = find(EVENT, a), *second = find(EVENT, b);
    if (!first || !second || first->size || second->size) return out(INVALID_HANDLE);
    struct Event *x = (struct Event *)a, *y = (struct Event *)b;
    if (!x->recorded || !y->recorded) return out(INVALID_HANDLE);
    *ms = (y->time.tv_sec - x->time.tv_sec) * 1e3f + (y->time.tv_nsec - x->time.tv_nsec) / 1e6f;
    return out(OK);
}
Result cuMemcpyAsync(Ptr to, Ptr from, size_t n, uintptr_t s) {
    ENTER(1);
    if ((memory(to) && !inside(to, n)) || (memory(from) && !inside(from, n))) return out(INVALID_VALUE);
    return enqueue(s, (struct Work){.kind = COPY, .to = to, .from = from, .size = n});
}
struct Module {
    void *library;
    struct Kernel kernels[256];
    int count;
    uint64_t variable;
    int shown; // the variable has been requested
};
Result cuModuleLoadData(uintptr_t *p, const char *image) {
    ENTER(1);
    void *library = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    if (!library) return out(INVALID_VALUE);
    struct Module *m = calloc(1, sizeof *m);
    m->library = library;
    *p = (uintptr_t)m;
    add(MODULE, *p, 0);
    return out(OK);
}
Result cuModuleUnload(uintptr_t p) {
    LEAVE(take(MODULE, p) && (!((struct Module *)p)->shown || take(DEVICE_MEMORY, (uintptr_t)&((struct Module *)p)->variable)));
}
// Every module has one variable of 8 bytes, found under any name.
Result cuModuleGetGlobal_v2(Ptr *at, size_t *bytes, uintptr_t p, const char *name) {
    ENTER(1);
    if (!find(MODULE, p) || !name) return out(INVALID_HANDLE);
    struct Module *m = (struct Module *)p;
    *at = (uintptr_t)&m->variable, *bytes = sizeof m->variable;
    if (!m->shown) add(DEVICE_MEMORY, *at, *bytes);
    m->shown = 1;
    return out(OK);
}
Result cuModuleGetFunction(uintptr_t *f, uintptr_t p, const char *name) {
    ENTER(1);
    if (!find(MODULE, p)) return out(INVALID_HANDLE);
    struct Module *m = (struct Module *)p;
    const void *(*find_kernel)(const char *) = (const void *(*)(const char *))dlsym(m->library, "emu_find");
    const void *kernel = find_kernel ? find_kernel(name) : NULL;
    if (!kernel) return out(NOT_FOUND);
    struct Kernel *k = malloc(sizeof *k);
    *k = (struct Kernel){.context = current, .shared = 48 << 10, .kernel = kernel};
    *(void **)&k->launch = dlsym(m->library, "emu_launch");
    *f = (uintptr_t)k;
    return out(OK);
}
Result cuFuncSetAttribute(uintptr_t f, int attribute, int value) {
    ENTER(1);
    if (!f || attribute != 8 || value < 0 || value > 232448) return out(INVALID_VALUE);
    ((struct Kernel *)f)->shared = value;
    return out(OK);
}
// A tensor map has the format of the emulator.
Result cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, Ptr at, const uint64_t *extent, const uint64_t *stride, const uint32_t *box,
                              const uint32_t *step, int interleave, int swizzle, int promotion, int fill) {
    ENTER(0);
    if (((uintptr_t)map & 63) || type != 9 || rank != 4 || (at & 15) || interleave || swizzle < 1 || swizzle > 3 || promotion > 3 || fill) return out(INVALID_VALUE);
    memset(map, 0, 128);
    map[0] = at;
    for (int i = 0; i < 4; i++) {
        if (!extent[i] || !box[i] || box[i] > 256 || step[i] != 1 || (i < 3 && (stride[i] & 15))) return out(INVALID_VALUE);
        map[1 + i] = extent[i], map[8 + i] = box[i];
        if (i < 3) map[5 + i] = stride[i];
    }
    return out(box[0] * 2 == (unsigned)16 << swizzle ? OK : INVALID_VALUE);
}
Result cuLaunchKernel(uintptr_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, uintptr_t s, void **params, void **extra) {
    ENTER(1);
    if (!f || extra || by != 1 || bz != 1 || !gx || !gy || !gz || !bx || bx > 1024) return out(INVALID_VALUE);
    if (gx > 0x7fffffff || gy > 65535 || gz > 65535 || shared > ((struct Kernel *)f)->shared) return out(INVALID_VALUE);
    if (((struct Kernel *)f)->context != current) return out(INVALID_HANDLE);
    struct Work w = {.kind = LAUNCH, .kernel = (struct Kernel *)f, .grid = {gx, gy, gz}, .threads = bx, .shared = shared};
    for (int i = 0; params[i]; i++) { // every argument has eight bytes; the list ends with a null
        if (i == 64) return out(INVALID_VALUE);
        memcpy(&w.arguments[i], params[i], 8);
    }
    return enqueue(s, w);
}

// Graphs. Separate streams run the captured work. Each launch runs after all earlier work of its stream.
struct Exec {
    struct Graph *graph;
    struct Branch {
        struct Stream *captured, *runs;
        struct Event done;
        struct Branch *next;
    } *branches;
    struct Event begun;
};
Result cuStreamBeginCapture_v2(uintptr_t p, int mode) {
    ENTER(1);
    struct Stream *s = (struct Stream *)p;
    if (!find(STREAM, p) || mode != 1) return out(INVALID_VALUE);
    if (s->graph) return out(NOT_WHILE_CAPTURED);
    s->graph = calloc(1, sizeof *s->graph);
    s->graph->origin = s;
    return out(OK);
}
static void free_nodes(struct Graph *g) {
    for (struct Node *n = g->first, *next; n; n = next) next = n->next, free(n);
    free(g);
}
// joined reports whether the last work of a stream is a recording that the origin, or a stream that joins it
// later, waits for.
static int joined(struct Graph *g, struct Stream *s) {
    struct Node *last = NULL;
    for (struct Node *n = g->first; n; n = n->next)
        if (n->stream == s) last = n;
    if (s == g->origin) return 1;
    for (struct Node *n = last; n; n = n->next)
        if (n->recorder == last && last->work.kind == RECORD && (n->stream == g->origin || joined(g, n->stream))) return 1;
    return 0;
}
Result cuStreamEndCapture(uintptr_t p, uintptr_t *out_graph) {
    Result r = enter(1);
    if (!find(STREAM, p)) return out(INVALID_HANDLE);
    struct Graph *g = ((struct Stream *)p)->graph;
    if (!g || g->origin != (struct Stream *)p) return out(INVALID_VALUE);
    for (struct Node *n = g->first; n; n = n->next)
        if (r == OK && !joined(g, n->stream)) r = UNJOINED;
    for (struct Object *o = objects; o; o = o->next)
        if (o->kind == STREAM && ((struct Stream *)o->at)->graph == g) ((struct Stream *)o->at)->graph = NULL;
    *out_graph = 0;
    if (r != OK) free_nodes(g);
    else add(GRAPH, *out_graph = (uintptr_t)g, 0);
    return out(r);
}
Result cuGraphInstantiateWithFlags(uintptr_t *p, uintptr_t graph, uint64_t flags) {
    ENTER(1);
    if (!find(GRAPH, graph) || flags != 8) return out(INVALID_VALUE);
    struct Exec *x = calloc(1, sizeof *x);
    x->graph = calloc(1, sizeof *x->graph);
    *x->graph = *(struct Graph *)graph, ((struct Graph *)graph)->first = NULL; // now the executable's nodes
    for (struct Node *n = x->graph->first; n; n = n->next) {
        struct Branch *b = x->branches;
        while (b && b->captured != n->stream) b = b->next;
        if (b) continue;
        b = calloc(1, sizeof *b);
        b->captured = n->stream, b->runs = calloc(1, sizeof *b->runs);
        pthread_create(&b->runs->thread, NULL, serve, b->runs);
        b->next = x->branches, x->branches = b;
    }
    add(EXEC, *p = (uintptr_t)x, 0);
    return out(OK);
}
Result cuGraphLaunch(uintptr_t p, uintptr_t stream) {
    ENTER(1);
    if (!find(EXEC, p) || !find(STREAM, stream)) return out(INVALID_HANDLE);
    if (fault) return out(ILLEGAL_ADDRESS);
    struct Exec *x = (struct Exec *)p;
    struct Stream *s = (struct Stream *)stream;
    push(s, (struct Work){.kind = RECORD, .event = &x->begun, .number = ++x->begun.recorded});
    for (struct Branch *b = x->branches; b; b = b->next)
        push(b->runs, (struct Work){.kind = WAIT, .event = &x->begun, .number = x->begun.recorded});
    for (struct Node *n = x->graph->first; n; n = n->next) {
        struct Branch *b = x->branches;
        while (b->captured != n->stream) b = b->next;
        struct Work w = n->work;
        if (w.kind == RECORD) w.event = &n->event, w.number = ++n->event.recorded;
        if (w.kind == WAIT) w.event = &n->recorder->event, w.number = n->recorder->event.recorded;
        push(b->runs, w);
    }
    for (struct Branch *b = x->branches; b; b = b->next) {
        push(b->runs, (struct Work){.kind = RECORD, .event = &b->done, .number = ++b->done.recorded});
        push(s, (struct Work){.kind = WAIT, .event = &b->done, .number = b->done.recorded});
    }
    return out(OK);
}
Result cuGraphDestroy(uintptr_t p) {
    Result r = enter(1);
    if (!take(GRAPH, p)) return out(INVALID_HANDLE);
    free_nodes((struct Graph *)p);
    return out(r);
}
Result cuGraphExecDestroy(uintptr_t p) {
    Result r = enter(1);
    if (!take(EXEC, p)) return out(INVALID_HANDLE);
    struct Exec *x = (struct Exec *)p;
    for (struct Branch *b = x->branches, *next; b; b = next) {
        push(b->runs, (struct Work){.kind = END});
        pthread_mutex_unlock(&lock);
        pthread_join(b->runs->thread, NULL);
        pthread_mutex_lock(&lock);
        next = b->next;
        free(b->runs), free(b);
    }
    free_nodes(x->graph);
    free(x);
    return out(r);
}

// fake_call makes a stream call a function, so that other stand-ins can run work on it. The argument is copied.
Result fake_call(uintptr_t s, void (*call)(void *), const void *argument, size_t size) {
    struct Work w = {.kind = CALL, .call = call};
    if (size > sizeof w.argument) return INVALID_VALUE;
    memcpy(w.argument, argument, size);
    pthread_mutex_lock(&lock);
    return enqueue(s, w);
}

// Functions that tests use to control the driver. fake_reset resets counts and faults, but keeps objects.
void fake_reset(int gpus, int64_t memory, int delay) {
    pthread_mutex_lock(&lock);
    devices = gpus, memory_total = memory, delay_us = delay;
    calls = fail_at = fault = 0;
    seed = planted = 0;
    for (struct Target *next; targets; targets = next) next = targets->next, free(targets);
    pthread_mutex_unlock(&lock);
}
void fake_fail(int64_t at, int code) {
    pthread_mutex_lock(&lock);
    calls = 0, fail_at = at, fail_code = code;
    pthread_mutex_unlock(&lock);
}
// fake_seed permutes the order of lanes, copies and products in later launches, unless it is 0.
void fake_seed(uint64_t s) {
    pthread_mutex_lock(&lock);
    seed = s;
    pthread_mutex_unlock(&lock);
}
void fake_plant(int error) {
    pthread_mutex_lock(&lock);
    planted = error;
    pthread_mutex_unlock(&lock);
}
int64_t fake_calls(void) {
    pthread_mutex_lock(&lock);
    int64_t n = calls;
    pthread_mutex_unlock(&lock);
    return n;
}
// fake_live returns the number of objects except contexts, which processes keep.
int64_t fake_live(void) {
    pthread_mutex_lock(&lock);
    int64_t n = 0;
    for (int i = 0; i < KINDS; i++) n += live[i];
    pthread_mutex_unlock(&lock);
    return n;
}
