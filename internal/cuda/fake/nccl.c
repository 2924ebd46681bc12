// A stand-in for NCCL in tests, for the processes of one host, on top of the stand-in driver. Calls run on the
// driver's streams and wait there for their peers. Nothing blocks the host: joining is in progress until all
// members have joined. A team is a file next to this library; all members map it. Each member copies its data
// there, because no process sees another's memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int fake_call(uintptr_t stream, void (*call)(void *), const void *argument, size_t size);

enum { OK, UNHANDLED = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { SEND, RECV, GATHER, SCATTER, REDUCE, MESSAGES };
typedef struct {
    char bytes[128];
} ID;
struct Call {
    int op, type;
    const char *x;
    char *y;
    size_t count;
    int peer;           // of a message
    struct Call *next;  // next call of a group
};
#define MEMBERS 16
#define SLOT (4 << 20) // maximum number of bytes of a member; unwritten bytes take no space
struct Team {
    atomic_int ready;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char path[512];
    int size, joined, left, present, aborted, channels;
    uint64_t meeting;
    int untaken[MEMBERS]; // messages that each member has sent and that have not been received
    _Alignas(64) char brought[MEMBERS][SLOT];
};
// Note precedes the bytes of each message. Its peer is -1 once the message has been received.
struct Note {
    size_t size;
    int peer;
};
typedef struct Comm {
    struct Team *team;
    int rank, error;
    uintptr_t stream; // the only stream: NCCL runs calls in the order of issue, whatever their streams
} Comm;
struct Work {
    Comm *comm;
    struct Call call;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t comms, ids, polls, fail_poll;

// open_team maps the file of a team. The first member creates it.
static struct Team *open_team(const ID *id, int size) {
    Dl_info info;
    char path[sizeof ((struct Team *)0)->path];
    if (!dladdr((void *)open_team, &info) || !strrchr(info.dli_fname, '/')) return NULL;
    snprintf(path, sizeof path, "%.*s/%s", (int)(strrchr(info.dli_fname, '/') - info.dli_fname), info.dli_fname, id->bytes);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600), first = fd >= 0;
    if (!first && (fd = open(path, O_RDWR)) < 0) return NULL;
    if (first && ftruncate(fd, sizeof(struct Team)) != 0) return NULL;
    for (struct stat s; !first && fstat(fd, &s) == 0 && s.st_size == 0;) usleep(100);
    struct Team *t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (t == MAP_FAILED) return NULL;
    if (first) {
        pthread_mutexattr_t m;
        pthread_condattr_t c;
        pthread_mutexattr_init(&m), pthread_condattr_init(&c);
        pthread_mutexattr_setpshared(&m, PTHREAD_PROCESS_SHARED), pthread_condattr_setpshared(&c, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(&t->lock, &m), pthread_cond_init(&t->changed, &c);
        t->size = size;
        memcpy(t->path, path, sizeof path);
        atomic_store(&t->ready, 1);
    }
    while (!atomic_load(&t->ready)) usleep(100);
    return t;
}

int ncclGetVersion(int *v) { *v = 21805; return OK; }
const char *ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited or there was a network error" : code == OK ? "no error" : "an error"; }
const char *ncclGetLastError(Comm *c) { (void)c; return "told by the stand-in"; }
int ncclGetUniqueId(ID *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "team %d %lld", (int)getpid(), (long long)++ids);
    memset(id->bytes + 64, 0x5a, 64); // both halves must arrive
    pthread_mutex_unlock(&lock);
    return OK;
}
int ncclCommInitRankConfig(Comm **out, int size, ID id, int rank, const unsigned char *config) {
    uint64_t bytes;
    uint32_t magic, version;
    int32_t blocking, channels;
    memcpy(&bytes, config, 8), memcpy(&magic, config + 8, 4), memcpy(&version, config + 12, 4), memcpy(&blocking, config + 16, 4);
    memcpy(&channels, config + 28, 4);
    if (channels != INT32_MIN && (channels < 1 || channels > 32)) return INVALID_ARGUMENT;
    if (bytes != 44 || magic != 0xcafebeef || version != 21800 || blocking != 0 || size < 1 || size > MEMBERS || rank < 0 || rank >= size || id.bytes[127] != 0x5a)
        return INVALID_ARGUMENT;
    struct Team *t = open_team(&id, size);
    if (!t || t->size != size) return INVALID_ARGUMENT;
    pthread_mutex_lock(&t->lock);
    int alike = t->joined == 0 || t->channels == channels; // NCCL hangs if they differ
    t->joined++, t->channels = channels;
    pthread_mutex_unlock(&t->lock);
    if (!alike) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    comms++;
    pthread_mutex_unlock(&lock);
    *out = calloc(1, sizeof **out);
    (*out)->team = t, (*out)->rank = rank;
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(Comm *c, int *state) {
    pthread_mutex_lock(&lock);
    if (fail_poll && ++polls >= fail_poll) c->error = REMOTE, fail_poll = 0;
    int error = c->error;
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&c->team->lock);
    *state = error ? error : c->team->joined < c->team->size ? IN_PROGRESS : OK;
    pthread_mutex_unlock(&c->team->lock);
    return OK;
}
int ncclCommFinalize(Comm *c) { (void)c; return IN_PROGRESS; }
static int end(Comm *c, int abort) {
    struct Team *t = c->team;
    pthread_mutex_lock(&t->lock);
    if (abort) t->aborted = 1, pthread_cond_broadcast(&t->changed);
    if (++t->left == t->size) unlink(t->path);
    pthread_mutex_unlock(&t->lock);
    pthread_mutex_lock(&lock);
    comms--;
    pthread_mutex_unlock(&lock);
    return OK; // its memory stays, because streams may still have it in their queues
}
int ncclCommDestroy(Comm *c) { return end(c, 0); }
int ncclCommAbort(Comm *c) { return end(c, 1); }

static int meet(struct Team *t) { // requires the lock
    if (++t->present == t->size) {
        t->present = 0, t->meeting++;
        pthread_cond_broadcast(&t->changed);
    } else {
        for (uint64_t m = t->meeting; m == t->meeting && !t->aborted;) pthread_cond_wait(&t->changed, &t->lock);
    }
    return !t->aborted;
}
static size_t size_of(int type) { return type == 7 ? 4 : type == 9 ? 2 : 1; }
static void sum(struct Team *t, char *y, size_t from, size_t count, int type) {
    for (size_t i = from; i < from + count; i++) {
        float s = 0;
        for (int r = 0; r < t->size; r++) {
            uint32_t bits;
            float v;
            if (type == 7) memcpy(&bits, t->brought[r] + 4 * i, 4);
            else bits = (uint32_t)((const uint16_t *)t->brought[r])[i] << 16;
            memcpy(&v, &bits, 4);
            s = r == 0 ? v : s + v;
        }
        uint32_t bits;
        memcpy(&bits, &s, 4);
        if (type == 7) memcpy(y + 4 * (i - from), &s, 4);
        else ((uint16_t *)y)[i - from] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
// bring copies a member's data for a collective. It returns 0 if there is no space.
static int bring(const struct Call *call, int members, char *to) {
    size_t n = call->count * size_of(call->type) * (call->op == SCATTER ? (size_t)members : 1);
    if (n > SLOT) return 0;
    memcpy(to, call->x, n);
    return 1;
}
static void fail(struct Team *t) { t->aborted = 1, pthread_cond_broadcast(&t->changed); }
// find returns the first message from one member to another, or NULL.
static char *find(struct Team *t, int from, int to) {
    char *at = t->brought[from];
    for (int left = t->untaken[from]; left > 0;) {
        struct Note note;
        memcpy(&note, at, sizeof note);
        if (note.peer == to) return at;
        left -= note.peer >= 0, at += sizeof note + note.size;
    }
    return NULL;
}
// exchange sends and receives at the same time. It waits only for members to which this one sends or from which
// it receives.
static void exchange(struct Team *t, int rank, struct Call *calls) { // requires the lock
    char *at = t->brought[rank], *end = at + SLOT;
    for (struct Call *c = calls; c; c = c->next)
        if (c->op == SEND) {
            struct Note note = {c->count, c->peer};
            if (at + sizeof note + c->count > end) return fail(t);
            memcpy(at, &note, sizeof note), memcpy(at + sizeof note, c->x, c->count);
            at += sizeof note + c->count, t->untaken[rank]++;
        }
    pthread_cond_broadcast(&t->changed);
    for (struct Call *c = calls; c; c = c->next)
        if (c->op == RECV) {
            while (!t->aborted && !(at = find(t, c->peer, rank))) pthread_cond_wait(&t->changed, &t->lock);
            struct Note note;
            if (t->aborted) return;
            memcpy(&note, at, sizeof note);
            if (note.size != c->count) return fail(t);
            memcpy(c->y, at + sizeof note, note.size);
            note.peer = -1, memcpy(at, &note, sizeof note);
            if (--t->untaken[c->peer] == 0) pthread_cond_broadcast(&t->changed);
        }
    while (t->untaken[rank] > 0 && !t->aborted) pthread_cond_wait(&t->changed, &t->lock);
}
// missing is an error that a test plants: gathers leave out the last bytes of each member's part.
static size_t missing(void) { return getenv("SPPO_PLANTED") ? 4 : 0; }
static void work(void *argument) {
    struct Work *w = argument;
    struct Team *t = w->comm->team;
    size_t bytes = w->call.count * size_of(w->call.type);
    pthread_mutex_lock(&t->lock);
    if (w->call.op == MESSAGES) {
        if (!t->aborted) exchange(t, w->comm->rank, w->call.next);
        pthread_mutex_unlock(&t->lock);
        return;
    }
    if (!t->aborted && !bring(&w->call, t->size, t->brought[w->comm->rank])) fail(t);
    if (!t->aborted && meet(t)) { // keeps the lock, so that an abort waits until no other member writes to its rank's memory
        switch (w->call.op) {
        case GATHER:
            for (int r = 0; r < t->size; r++) memcpy(w->call.y + r * bytes, t->brought[r], bytes - missing());
            break;
        case SCATTER: sum(t, w->call.y, w->comm->rank * w->call.count, w->call.count, w->call.type); break;
        case REDUCE: sum(t, w->call.y, 0, w->call.count, w->call.type); break;
        }
        meet(t);
    }
    pthread_mutex_unlock(&t->lock);
}
static int issue(Comm *c, uintptr_t stream, struct Call call) {
    struct Work w = {c, call};
    if (c->stream && c->stream != stream) return INVALID_USAGE;
    c->stream = stream;
    return fake_call(stream, work, &w, sizeof w) ? UNHANDLED : OK;
}
// A single message is a group of one. Groups belong to threads.
static __thread int depth;
static __thread struct Call *pending, **last;
static __thread Comm *pending_comm;
static __thread uintptr_t pending_stream;
int ncclGroupStart(void) { depth++; return OK; }
int ncclGroupEnd(void) {
    if (--depth > 0 || !pending) return OK;
    struct Call call = {.op = MESSAGES, .next = pending};
    pending = NULL;
    return issue(pending_comm, pending_stream, call);
}
static int message(int op, const void *x, void *y, size_t n, int type, int peer, Comm *c, uintptr_t s) {
    if (peer < 0 || peer >= c->team->size || type != 0 || (pending && (pending_comm != c || pending_stream != s))) return INVALID_USAGE;
    ncclGroupStart();
    struct Call *call = malloc(sizeof *call);
    *call = (struct Call){op, type, x, y, n, peer, NULL};
    if (!pending) last = &pending;
    *last = call, last = &call->next, pending_comm = c, pending_stream = s;
    return ncclGroupEnd();
}
int ncclSend(const void *x, size_t n, int type, int peer, Comm *c, uintptr_t s) { return message(SEND, x, NULL, n, type, peer, c, s); }
int ncclRecv(void *y, size_t n, int type, int peer, Comm *c, uintptr_t s) { return message(RECV, NULL, y, n, type, peer, c, s); }
// fits reports whether a member's part and the whole are disjoint, or the part is at its place in the whole. NCCL
// supports no other layout.
static int fits(const Comm *c, const char *part, const char *whole, size_t bytes) {
    return part + bytes <= whole || whole + bytes * c->team->size <= part || part == whole + bytes * c->rank;
}
int ncclAllGather(const void *x, void *y, size_t n, int type, Comm *c, uintptr_t s) {
    return !fits(c, x, y, n * size_of(type)) ? INVALID_USAGE : issue(c, s, (struct Call){GATHER, type, x, y, n, 0, NULL});
}
int ncclReduceScatter(const void *x, void *y, size_t n, int type, int op, Comm *c, uintptr_t s) {
    if (!fits(c, y, x, n * size_of(type))) return INVALID_USAGE;
    return op != 0 ? INVALID_ARGUMENT : issue(c, s, (struct Call){SCATTER, type, x, y, n, 0, NULL});
}
int ncclAllReduce(const void *x, void *y, size_t n, int type, int op, Comm *c, uintptr_t s) {
    return op != 0 ? INVALID_ARGUMENT : issue(c, s, (struct Call){REDUCE, type, x, y, n, 0, NULL});
}

// fake_nccl_fail makes the n-th poll from now report that a peer was lost; fake_nccl_live returns the number of
// communicators.
void fake_nccl_fail(int64_t poll) {
    pthread_mutex_lock(&lock);
    polls = 0, fail_poll = poll;
    pthread_mutex_unlock(&lock);
}
int64_t fake_nccl_live(void) {
    pthread_mutex_lock(&lock);
    int64_t n = comms;
    pthread_mutex_unlock(&lock);
    return n;
}
