// A profiler for tests. Like Nsight Systems, it receives ranges through tables of functions (NVTX 3,
// nvtxTypes.h). It records one line per call.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void (*Function)(void);
struct Callbacks {
    size_t size;
    int (*table)(int module, Function ***out, unsigned *count);
};
struct Version {
    size_t size;
    uint32_t number, unused;
    void (*injection)(uint32_t);
};
enum { CALLBACKS = 1, VERSION = 3, CORE = 1, RANGE_PUSH = 9, RANGE_POP = 11 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char heard[1 << 20];
static size_t length;

static void hear(const char *what, const char *name) {
    pthread_mutex_lock(&lock);
    int n = snprintf(heard + length, sizeof heard - length, "%s%s\n", what, name);
    if (length + n < sizeof heard) length += n; // otherwise the buffer is full
    heard[length] = 0;
    pthread_mutex_unlock(&lock);
}
static int push(const char *name) {
    hear("+", name);
    return 0;
}
static int pop(void) {
    hear("-", "");
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
    const struct Callbacks *callbacks = export(CALLBACKS);
    const struct Version *version = export(VERSION);
    Function **table;
    unsigned count;
    if (!callbacks || callbacks->size != sizeof *callbacks || !version || version->number != 3 || export(2)) return 0;
    version->injection(1);
    if (callbacks->table(0, &table, &count) || callbacks->table(7, &table, &count)) return 0;
    for (int module = CORE; module <= 6; module++)
        if (!callbacks->table(module, &table, &count) || !count || table[count]) return 0; // null-terminated
    callbacks->table(CORE, &table, &count);
    if (count <= RANGE_POP) return 0;
    *table[RANGE_PUSH] = (Function)push;
    *table[RANGE_POP] = (Function)pop;
    return 1;
}

// fake_heard returns the recorded lines to tests; fake_forget clears them.
const char *fake_heard(void) { return heard; }
void fake_forget(void) {
    pthread_mutex_lock(&lock);
    length = heard[0] = 0;
    pthread_mutex_unlock(&lock);
}
