// NCCL among the threads of one process, for tests, over the stand-in driver: what is asked for is done on its streams,
// which wait there for their peers. Nothing blocks the host: joining is in progress until all members have joined.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    struct Call *next;  // of a group of them
};
struct Team {
    ID id;
    int size, joined, present, aborted;
    uint64_t meeting;
    struct Call calls[16];
    struct Team *next;
};
typedef struct Comm {
    struct Team *team;
    int rank, error;
} Comm;
struct Work {
    Comm *comm;
    struct Call call;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct Team *teams;
static int64_t comms, ids, polls, fail_poll;

int ncclGetVersion(int *v) { *v = 21805; return OK; }
const char *ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited or there was a network error" : code == OK ? "no error" : "an error"; }
const char *ncclGetLastError(Comm *c) { (void)c; return "told by the stand-in"; }
int ncclGetUniqueId(ID *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "team %lld", (long long)++ids);
    memset(id->bytes + 64, 0x5a, 64); // both ends of it must arrive
    pthread_mutex_unlock(&lock);
    return OK;
}
int ncclCommInitRankConfig(Comm **out, int size, ID id, int rank, const unsigned char *config) {
    uint64_t bytes;
    uint32_t magic, version;
    int32_t blocking;
    memcpy(&bytes, config, 8), memcpy(&magic, config + 8, 4), memcpy(&version, config + 12, 4), memcpy(&blocking, config + 16, 4);
    if (bytes != 44 || magic != 0xcafebeef || version != 21800 || blocking != 0 || size < 1 || size > 16 || rank < 0 || rank >= size || id.bytes[127] != 0x5a)
        return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    struct Team *t = teams;
    while (t && memcmp(&t->id, &id, sizeof id) != 0) t = t->next;
    if (!t) {
        t = calloc(1, sizeof *t);
        t->id = id, t->size = size, t->next = teams;
        teams = t;
    }
    t->joined++, comms++;
    *out = calloc(1, sizeof **out);
    (*out)->team = t, (*out)->rank = rank;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(Comm *c, int *state) {
    pthread_mutex_lock(&lock);
    if (fail_poll && ++polls >= fail_poll) c->error = REMOTE, fail_poll = 0;
    *state = c->error ? c->error : c->team->joined < c->team->size ? IN_PROGRESS : OK;
    pthread_mutex_unlock(&lock);
    return OK;
}
int ncclCommFinalize(Comm *c) { (void)c; return IN_PROGRESS; }
static int end(Comm *c, int abort) {
    pthread_mutex_lock(&lock);
    if (abort) c->team->aborted = 1, pthread_cond_broadcast(&changed);
    comms--;
    pthread_mutex_unlock(&lock);
    return OK; // its memory stays: streams may still have it in their queues
}
int ncclCommDestroy(Comm *c) { return end(c, 0); }
int ncclCommAbort(Comm *c) { return end(c, 1); }

static int meet(struct Team *t) { // with the lock
    if (++t->present == t->size) {
        t->present = 0, t->meeting++;
        pthread_cond_broadcast(&changed);
    } else {
        for (uint64_t m = t->meeting; m == t->meeting && !t->aborted;) pthread_cond_wait(&changed, &lock);
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
            if (type == 7) memcpy(&bits, t->calls[r].x + 4 * i, 4);
            else bits = (uint32_t)((const uint16_t *)t->calls[r].x)[i] << 16;
            memcpy(&v, &bits, 4);
            s = r == 0 ? v : s + v;
        }
        uint32_t bits;
        memcpy(&bits, &s, 4);
        if (type == 7) memcpy(y + 4 * (i - from), &s, 4);
        else ((uint16_t *)y)[i - from] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
static void work(void *argument) {
    struct Work *w = argument;
    struct Team *t = w->comm->team;
    size_t bytes = w->call.count * size_of(w->call.type);
    char *result = malloc(bytes * t->size + 1); // for an operation in place: written once nobody reads any more
    pthread_mutex_lock(&lock);
    t->calls[w->comm->rank] = w->call;
    if (meet(t)) { // the lock stays: after an abort members leave, and their memory goes with them
        size_t n = bytes;
        switch (w->call.op) {
        case MESSAGES:
            for (struct Call *mine = w->call.next; mine; mine = mine->next)
                for (struct Call *c = t->calls[mine->peer].next; mine->op == RECV && c; c = c->next)
                    if (c->op == SEND && c->peer == w->comm->rank) memcpy(mine->y, c->x, mine->count == c->count ? c->count : 0);
            break;
        case GATHER:
            for (int r = 0; r < t->size; r++) memcpy(result + r * bytes, t->calls[r].x, bytes);
            n = bytes * t->size;
            break;
        case SCATTER: sum(t, result, w->comm->rank * w->call.count, w->call.count, w->call.type); break;
        case REDUCE: sum(t, result, 0, w->call.count, w->call.type); break;
        }
        if (meet(t) && w->call.op != MESSAGES) memcpy(w->call.y, result, n);
    }
    pthread_mutex_unlock(&lock);
    free(result);
}
static int issue(Comm *c, uintptr_t stream, struct Call call) {
    struct Work w = {c, call};
    return fake_call(stream, work, &w, sizeof w) ? UNHANDLED : OK;
}
// Messages are those of a group, or of a group of one. A group is a thread's.
static __thread int depth;
static __thread struct Call *pending;
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
    *call = (struct Call){op, type, x, y, n, peer, pending};
    pending = call, pending_comm = c, pending_stream = s;
    return ncclGroupEnd();
}
int ncclSend(const void *x, size_t n, int type, int peer, Comm *c, uintptr_t s) { return message(SEND, x, NULL, n, type, peer, c, s); }
int ncclRecv(void *y, size_t n, int type, int peer, Comm *c, uintptr_t s) { return message(RECV, NULL, y, n, type, peer, c, s); }
int ncclAllGather(const void *x, void *y, size_t n, int type, Comm *c, uintptr_t s) { return issue(c, s, (struct Call){GATHER, type, x, y, n, 0, NULL}); }
int ncclReduceScatter(const void *x, void *y, size_t n, int type, int op, Comm *c, uintptr_t s) {
    return op != 0 ? INVALID_ARGUMENT : issue(c, s, (struct Call){SCATTER, type, x, y, n, 0, NULL});
}
int ncclAllReduce(const void *x, void *y, size_t n, int type, int op, Comm *c, uintptr_t s) {
    return op != 0 ? INVALID_ARGUMENT : issue(c, s, (struct Call){REDUCE, type, x, y, n, 0, NULL});
}

// fake_nccl_fail has the n-th poll from now report that a peer was lost; fake_nccl_live is the number of communicators.
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
