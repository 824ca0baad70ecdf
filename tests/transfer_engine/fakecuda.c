/* A CUDA driver without a GPU, for tests: the entry points that transfer_engine/device/cuda_driver.py uses, and those that a
 * test needs to own device memory (cuMemAlloc, cuMemFree, synchronous copies), with the real names and signatures.
 *
 * Device memory is a PROT_NONE mapping of a memfd: any touch by the CPU faults, and a system call on it fails with EFAULT. Only
 * the copies below reach it, through a second mapping. Each stream is a thread; three tempers (fake_temper) make wrong
 * orders show: EAGER copies as soon as it can, LAZY not before somebody synchronises, MOODY after a random while.
 * What CUDA demands is demanded: a current context, the stream's own one, ranges inside one allocation.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { EAGER, LAZY, MOODY };
enum { DEVICES = 2, PAGE = 4096, MAX_RANGES = 4096, MAX_DEPTH = 16 };

typedef struct { int device; } Context;
typedef struct { char *start, *shadow; size_t length; int device, fd; } Range; /* device -1: pinned host memory */
typedef struct Work { struct Work *next; char *to; const char *from; size_t length; } Work;
typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    Work *first, **last;
    int device, pending, wanted, ending, error;
} Stream;

static Context contexts[DEVICES] = {{0}, {1}};
static _Thread_local Context *stack[MAX_DEPTH];
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[MAX_RANGES];
static int count, initialised, temper = EAGER, dmabuf_ok = 1;
static atomic_long live_pinned, live_streams, copies;
static struct { char name[64]; long nth; int code; } failure;
static long failures_met;

/* --- steering ----------------------------------------------------------------------------------------------------- */

void fake_temper(int which) { temper = which; }
void fake_dmabuf(int able) { dmabuf_ok = able; }
long fake_pinned_bytes(void) { return live_pinned; }
long fake_streams(void) { return live_streams; }
long fake_copies(void) { return copies; }
long fake_failures(void) { pthread_mutex_lock(&lock); long n = failures_met; pthread_mutex_unlock(&lock); return n; }

/* The nth call of `name` from now on returns `code`; "copy": the nth copy fails on its stream, as synchronising tells. */
void fake_fail(const char *name, long nth, int code) {
    pthread_mutex_lock(&lock);
    snprintf(failure.name, sizeof failure.name, "%s", name);
    failure.nth = nth, failure.code = code, failures_met = 0;
    pthread_mutex_unlock(&lock);
}

static int fails(const char *name) {
    int code = OK;
    pthread_mutex_lock(&lock);
    if (failure.nth && !strcmp(failure.name, name) && --failure.nth == 0) code = failure.code, failures_met++;
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER                                               \
    do {                                                    \
        int code_ = fails(__func__);                        \
        if (code_) return code_;                            \
        if (!initialised) return NOT_INITIALIZED;           \
    } while (0)
#define CURRENT                                             \
    do {                                                    \
        if (!depth) return INVALID_CONTEXT;                 \
    } while (0)

/* --- start-up and contexts ---------------------------------------------------------------------------------------- */

int cuInit(unsigned flags) { initialised = 1; return flags ? INVALID_VALUE : fails("cuInit"); }

int cuGetErrorString(int code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == INVALID_VALUE ? "invalid argument"
          : code == INVALID_CONTEXT ? "invalid device context" : code == INVALID_HANDLE ? "invalid resource handle"
          : code == 700 ? "an illegal memory access was encountered" : NULL;
    return *text ? OK : INVALID_VALUE;
}

int cuDeviceGetCount(int *n) { ENTER; *n = DEVICES; return OK; }
int cuDeviceGet(int *handle, int ordinal) { ENTER; *handle = ordinal; return ordinal >= 0 && ordinal < DEVICES ? OK : INVALID_DEVICE; }
int cuDeviceGetAttribute(int *value, int attribute, int handle) { ENTER; (void)handle; *value = attribute == 124 && dmabuf_ok; return OK; }
int cuDevicePrimaryCtxRetain(Context **made, int handle) { ENTER; *made = &contexts[handle]; return OK; }
int cuCtxPushCurrent_v2(Context *context) { ENTER; if (depth == MAX_DEPTH || !context) return INVALID_CONTEXT; stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(Context **context) { ENTER; CURRENT; *context = stack[--depth]; return OK; }
static int here(void) { return stack[depth - 1]->device; }

/* --- memory ------------------------------------------------------------------------------------------------------- */

static Range *find(uint64_t address) {
    for (int i = 0; i < count; i++)
        if (ranges[i].start && (char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].length) return &ranges[i];
    return NULL;
}

static int add(Range range) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < count && ranges[at].start) at++;
    int full = at == MAX_RANGES;
    if (!full) ranges[at] = range, count += at == count;
    pthread_mutex_unlock(&lock);
    return full ? OUT_OF_MEMORY : OK;
}

static int take(uint64_t address, Range *taken) {
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    int found = range && range->start == (char *)address;
    if (found) *taken = *range, range->start = NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

static size_t whole(size_t length) { return (length + PAGE - 1) / PAGE * PAGE; }

int cuMemAlloc_v2(uint64_t *address, size_t length) {
    ENTER; CURRENT;
    Range r = {.length = length, .device = here(), .fd = memfd_create("fakecuda", MFD_CLOEXEC)};
    if (r.fd < 0 || ftruncate(r.fd, whole(length))) return OUT_OF_MEMORY;
    r.start = mmap(NULL, whole(length), PROT_NONE, MAP_SHARED, r.fd, 0);
    r.shadow = mmap(NULL, whole(length), PROT_READ | PROT_WRITE, MAP_SHARED, r.fd, 0);
    *address = (uint64_t)r.start;
    return add(r);
}

int cuMemFree_v2(uint64_t address) {
    ENTER; CURRENT;
    Range r;
    if (!take(address, &r)) return INVALID_VALUE;
    munmap(r.start, whole(r.length)), munmap(r.shadow, whole(r.length)), close(r.fd);
    return OK;
}

int cuMemHostAlloc(void **address, size_t length, unsigned flags) {
    ENTER; CURRENT;
    if (flags != 1) return INVALID_VALUE;
    Range r = {.length = length, .device = -1};
    r.start = r.shadow = mmap(NULL, whole(length), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r.start == MAP_FAILED) return OUT_OF_MEMORY;
    live_pinned += length;
    *address = r.start;
    return add(r);
}

int cuMemFreeHost(void *address) {
    ENTER; CURRENT;
    Range r;
    if (!take((uint64_t)address, &r)) return INVALID_VALUE;
    live_pinned -= r.length;
    munmap(r.start, whole(r.length));
    return OK;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    ENTER;
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    int device = range ? range->device : -2;
    pthread_mutex_unlock(&lock);
    if (device == -2) return INVALID_VALUE;
    if (attribute == 2) *(unsigned *)value = device < 0 ? 1 : 2;
    else if (attribute == 9) *(int *)value = device < 0 ? 0 : device;
    else return INVALID_VALUE;
    return OK;
}

int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
    ENTER;
    pthread_mutex_lock(&lock);
    int known = find(address) != NULL;
    pthread_mutex_unlock(&lock);
    return known && attribute == 6 && *(const unsigned *)value == 1 ? OK : INVALID_VALUE;
}

int cuMemGetHandleForAddressRange(int *fd, uint64_t address, size_t length, int kind, uint64_t flags) {
    ENTER; CURRENT;
    if (kind != 1 || flags || address % PAGE || length % PAGE) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    int good = range && range->start == (char *)address && range->device == here() && length <= whole(range->length);
    *fd = good ? dup(range->fd) : -1;
    pthread_mutex_unlock(&lock);
    return good ? OK : INVALID_VALUE;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Where the fake itself reaches a range; NULL for one that leaves its allocation. Unknown memory is the host's. */
static char *reach(uint64_t address, size_t length) {
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    char *at = (char *)address;
    if (range) {
        size_t offset = at - range->start;
        at = offset + length <= range->length ? range->shadow + offset : NULL;
    }
    pthread_mutex_unlock(&lock);
    return at;
}

static void *run(void *argument) {
    Stream *stream = argument;
    unsigned seed = (unsigned)(uintptr_t)stream;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->ending && (!stream->first || (temper == LAZY && !stream->wanted))) pthread_cond_wait(&stream->moved, &stream->lock);
        Work *work = stream->first;
        if (!work) break;
        if (!(stream->first = work->next)) stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        if (temper == MOODY) usleep(rand_r(&seed) % 400);
        int code = fails("copy");
        if (!code) memcpy(work->to, work->from, work->length);
        free(work);
        copies++;
        pthread_mutex_lock(&stream->lock);
        if (code) stream->error = code;
        stream->pending--;
        pthread_cond_broadcast(&stream->moved);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

int cuStreamCreate(Stream **made, unsigned flags) {
    ENTER; CURRENT;
    if (flags != 1) return INVALID_VALUE;
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first, stream->device = here();
    pthread_mutex_init(&stream->lock, NULL), pthread_cond_init(&stream->moved, NULL);
    live_streams++;
    *made = stream;
    return pthread_create(&stream->thread, NULL, run, stream) ? OUT_OF_MEMORY : OK;
}

int cuStreamDestroy_v2(Stream *stream) {
    ENTER; CURRENT;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->moved);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    live_streams--;
    return OK;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t length, Stream *stream) {
    ENTER; CURRENT;
    if (stream->device != here()) return INVALID_HANDLE;
    Work *work = malloc(sizeof *work);
    *work = (Work){NULL, reach(to, length), reach(from, length), length};
    if (!work->to || !work->from) return free(work), INVALID_VALUE;
    pthread_mutex_lock(&stream->lock);
    *stream->last = work, stream->last = &work->next, stream->pending++;
    pthread_cond_broadcast(&stream->moved);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

int cuStreamSynchronize(Stream *stream) {
    ENTER; CURRENT;
    if (stream->device != here()) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->lock);
    stream->wanted++;
    pthread_cond_broadcast(&stream->moved);
    while (stream->pending) pthread_cond_wait(&stream->moved, &stream->lock);
    stream->wanted--;
    int code = stream->error;
    stream->error = OK;
    pthread_mutex_unlock(&stream->lock);
    return code;
}

static int now(uint64_t to, uint64_t from, size_t length) {
    char *a = reach(to, length), *b = reach(from, length);
    if (!a || !b) return INVALID_VALUE;
    memcpy(a, b, length);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t length) { ENTER; CURRENT; return now(to, (uint64_t)from, length); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t length) { ENTER; CURRENT; return now((uint64_t)to, from, length); }
