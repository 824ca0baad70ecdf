/* Fails, shortens or stops at the Nth system call of a kind: an LD_PRELOAD library for the robustness tests.
 *
 * Knows: the calls below, only on internet sockets (and, for memory, on shared maps and other processes' memory), so that the test's own
 * pipes work on. A test arms it in the process itself through the shim_* functions. Does not know: what the calls are for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
    SOCKET, CONNECT, BIND, LISTEN, ACCEPT, SETSOCKOPT, GETSOCKOPT, SHUTDOWN, CLOSE, SEND, RECV, POLL, /* sockets */
    IOCTL, GETSOCKNAME, MMAP, MEMFD, FTRUNCATE, VM_READ, VM_WRITE, THREAD, KINDS
};
enum action { FAIL, SHORT, SIGNAL_BEFORE, SIGNAL_AFTER };

static struct {
    atomic_long nth;   /* fires at this count of calls of `kind` (or of bytes moved, when `bytes`); 0: disarmed */
    atomic_long times; /* that many calls in a row, once it has begun */
    int kind, action, value, bytes;
} armed;
static atomic_long seen[KINDS], moved, fired;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void shim_arm(int kind, int action, int value, long nth, long times, int bytes) {
    atomic_store(&armed.nth, 0);
    for (int k = 0; k < KINDS; k++) atomic_store(&seen[k], 0);
    atomic_store(&moved, 0);
    atomic_store(&fired, 0);
    armed.kind = kind; armed.action = action; armed.value = value; armed.bytes = bytes;
    atomic_store(&armed.times, times);
    atomic_store(&armed.nth, nth);
}
void shim_disarm(void) { atomic_store(&armed.nth, 0); }
long shim_seen(int kind) { return atomic_load(&seen[kind]); }
long shim_fired(void) { return atomic_load(&fired); }
long shim_moved(void) { return atomic_load(&moved); }

static int internet(int fd) {
    int domain = 0, keep = errno;
    socklen_t size = sizeof domain;
    static int (*real)(int, int, int, void *, socklen_t *);
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "getsockopt");
    int bad = real(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    errno = keep;
    return !bad && (domain == AF_INET || domain == AF_INET6);
}

/* Whether this call is the one; counts it. */
static int hit(int kind) {
    long count = atomic_fetch_add(&seen[kind], 1) + 1, nth = atomic_load(&armed.nth);
    if (!nth || armed.bytes || armed.kind != kind || count < nth) return 0;
    if (count >= nth + atomic_load(&armed.times)) return 0;
    atomic_fetch_add(&fired, 1);
    return 1;
}
static void strike(void) { kill(getpid(), armed.value); }

/* Before a call that may fail: 1 when it must, with errno set. */
static int fails(int kind) {
    if (!hit(kind)) return 0;
    if (armed.action == SIGNAL_BEFORE) strike();
    if (armed.action != FAIL) return 0;
    errno = armed.value;
    return 1;
}

/* How many bytes a data call may move: all, or fewer when it is the one. Sets *after when a signal is due then. */
static size_t allowed(int kind, size_t wanted, int *after, int *failed) {
    long nth = atomic_load(&armed.nth);
    *after = *failed = 0;
    if (armed.bytes && nth && armed.kind == kind) {
        long left = nth - atomic_load(&moved);
        atomic_fetch_add(&seen[kind], 1);
        if (left <= 0 || (size_t)left > wanted) return wanted;
        *after = 1;
        return left;
    }
    if (!hit(kind)) return wanted;
    switch (armed.action) {
    case FAIL: errno = armed.value; *failed = 1; return wanted;
    case SHORT: return wanted > (size_t)armed.value ? (size_t)armed.value : wanted;
    case SIGNAL_BEFORE: strike(); return wanted;
    default: *after = 1; return wanted;
    }
}
static ssize_t done(int kind, ssize_t count, int after) {
    int keep = errno;
    if (armed.bytes && kind == armed.kind && count > 0) {
        long total = atomic_fetch_add(&moved, count) + count, nth = atomic_load(&armed.nth);
        after = nth && total >= nth && total - count < nth;
        if (after) atomic_fetch_add(&fired, 1);
    }
    if (after) strike();
    errno = keep;
    return count;
}

#define MAX_IOV 1024
static size_t length_of(const struct iovec *iov, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) total += iov[i].iov_len;
    return total;
}
/* A copy of iov that holds only the first `limit` bytes. */
static size_t cut(const struct iovec *iov, size_t count, struct iovec *out, size_t limit) {
    size_t n = 0;
    for (; n < count && n < MAX_IOV && limit; n++) {
        out[n] = iov[n];
        if (out[n].iov_len > limit) out[n].iov_len = limit;
        limit -= out[n].iov_len;
    }
    return n;
}

int socket(int domain, int type, int protocol) {
    REAL(socket);
    if ((domain == AF_INET || domain == AF_INET6) && fails(SOCKET)) return -1;
    return real(domain, type, protocol);
}
int connect(int fd, const struct sockaddr *to, socklen_t size) {
    REAL(connect);
    return internet(fd) && fails(CONNECT) ? -1 : real(fd, to, size);
}
int bind(int fd, const struct sockaddr *at, socklen_t size) {
    REAL(bind);
    return internet(fd) && fails(BIND) ? -1 : real(fd, at, size);
}
int listen(int fd, int backlog) {
    REAL(listen);
    return internet(fd) && fails(LISTEN) ? -1 : real(fd, backlog);
}
int accept(int fd, struct sockaddr *from, socklen_t *size) {
    REAL(accept);
    return internet(fd) && fails(ACCEPT) ? -1 : real(fd, from, size);
}
int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
    REAL(accept4);
    return internet(fd) && fails(ACCEPT) ? -1 : real(fd, from, size, flags);
}
int setsockopt(int fd, int level, int name, const void *value, socklen_t size) {
    REAL(setsockopt);
    return internet(fd) && fails(SETSOCKOPT) ? -1 : real(fd, level, name, value, size);
}
int getsockopt(int fd, int level, int name, void *value, socklen_t *size) {
    REAL(getsockopt);
    return internet(fd) && fails(GETSOCKOPT) ? -1 : real(fd, level, name, value, size);
}
int shutdown(int fd, int how) {
    REAL(shutdown);
    return internet(fd) && fails(SHUTDOWN) ? -1 : real(fd, how);
}
int close(int fd) {
    REAL(close);
    if (internet(fd) && fails(CLOSE)) { /* as Linux does it: the descriptor is gone whatever is said */
        int keep = errno;
        real(fd);
        errno = keep;
        return -1;
    }
    return real(fd);
}
int poll(struct pollfd *fds, nfds_t count, int timeout) {
    REAL(poll);
    return count && internet(fds[0].fd) && fails(POLL) ? -1 : real(fds, count, timeout);
}
int epoll_wait(int fd, struct epoll_event *events, int count, int timeout) {
    REAL(epoll_wait);
    return fails(POLL) ? -1 : real(fd, events, count, timeout);
}

#define MOVE(kind, fd, wanted, call) do { \
        int after, failed; \
        size_t limit = (wanted); \
        if (!internet(fd)) return call; \
        limit = allowed(kind, limit, &after, &failed); \
        return failed ? -1 : done(kind, call, after); \
    } while (0)

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    MOVE(SEND, fd, size, real(fd, data, limit, flags));
}
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    MOVE(SEND, fd, size, real(fd, data, limit));
}
ssize_t recv(int fd, void *data, size_t size, int flags) {
    REAL(recv);
    MOVE(RECV, fd, size, real(fd, data, limit, flags));
}
ssize_t read(int fd, void *data, size_t size) {
    REAL(read);
    MOVE(RECV, fd, size, real(fd, data, limit));
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    struct iovec some[MAX_IOV];
    struct msghdr less = *message;
    int after, failed;
    if (!internet(fd)) return real(fd, message, flags);
    size_t wanted = length_of(message->msg_iov, message->msg_iovlen), limit = allowed(SEND, wanted, &after, &failed);
    if (failed) return -1;
    less.msg_iov = some;
    less.msg_iovlen = cut(message->msg_iov, message->msg_iovlen, some, limit);
    return done(SEND, real(fd, limit < wanted ? &less : message, flags), after);
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    struct iovec some[MAX_IOV];
    struct msghdr less = *message;
    int after, failed;
    if (!internet(fd)) return real(fd, message, flags);
    size_t wanted = length_of(message->msg_iov, message->msg_iovlen), limit = allowed(RECV, wanted, &after, &failed);
    if (failed) return -1;
    less.msg_iov = some;
    less.msg_iovlen = cut(message->msg_iov, message->msg_iovlen, some, limit);
    return done(RECV, real(fd, limit < wanted ? &less : message, flags), after);
}

#define CROSS(name, kind) \
    ssize_t name(pid_t pid, const struct iovec *a, unsigned long n, const struct iovec *b, unsigned long m, unsigned long flags) { \
        REAL(name); \
        struct iovec some[MAX_IOV]; \
        int after, failed; \
        size_t wanted = length_of(a, n), limit = allowed(kind, wanted, &after, &failed); \
        if (failed) return -1; \
        if (limit < wanted) { n = cut(a, n, some, limit); a = some; } \
        return done(kind, real(pid, a, n, b, m, flags), after); \
    }
CROSS(process_vm_readv, VM_READ)
CROSS(process_vm_writev, VM_WRITE)

#define MAP(name) \
    void *name(void *at, size_t size, int protection, int flags, int fd, off_t offset) { \
        REAL(name); \
        if ((flags & MAP_SHARED) && fd >= 0 && fails(MMAP)) return MAP_FAILED; \
        return real(at, size, protection, flags, fd, offset); \
    }
MAP(mmap)
MAP(mmap64)
int memfd_create(const char *name, unsigned flags) {
    REAL(memfd_create);
    return fails(MEMFD) ? -1 : real(name, flags);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return fails(FTRUNCATE) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off_t size) {
    REAL(ftruncate64);
    return fails(FTRUNCATE) ? -1 : real(fd, size);
}
int ioctl(int fd, unsigned long request, ...) { /* FIONBIO: blocking or not */
    REAL(ioctl);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return internet(fd) && fails(IOCTL) ? -1 : real(fd, request, argument);
}
int getsockname(int fd, struct sockaddr *at, socklen_t *size) {
    REAL(getsockname);
    return internet(fd) && fails(GETSOCKNAME) ? -1 : real(fd, at, size);
}
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *with) {
    REAL(pthread_create);
    return fails(THREAD) ? EAGAIN : real(thread, how, body, with);
}
