/* A libibverbs with NICs in memory, for LD_PRELOAD: tests of RDMA code where there is no NIC, and of faults on command.
 *
 * FAKEVERBS_NICS (default 2) devices fake0, fake1, ...; even ones are in subnet 10.78.0, odd ones in 10.78.1. All queue pairs
 * of ONE process can be connected with one another. An RDMA WRITE or READ is a memcpy, done inside ibv_post_send unless a fault
 * keeps it back; its completion waits in the completion queue. A queue pair keeps to the rules that matter to a
 * transport: states and their attributes (IB spec 10.3), packet sequence numbers, keys with bounds and rights, send queue and
 * completion queue sizes, one error and then flushes, a responder that goes to the error state with a refused request.
 *
 * Steered by the functions at the end (through ctypes). Does not know: receives, atomics, unreliable pairs, other processes.
 * One lock around everything: ctypes calls come without the GIL. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    MAX_NICS = 16, MAX_CONTEXTS = 256, MAX_QPS = 65536, MAX_SEND = 16384, MAX_SGE = 4, MAX_CQE = 1 << 20, MAX_EVENTS = 256
};
enum fault { NONE, ERROR, SILENCE };  /* requests end in "retries exceeded"; or get lost and never end */

struct context { struct verbs_context v; int nic, events, taken; struct ibv_async_event ring[MAX_EVENTS]; };
struct channel { struct ibv_comp_channel c; struct queue *ring[MAX_EVENTS]; unsigned head, tail; };
struct entry { struct ibv_wc wc; unsigned long serial; };
struct queue { struct ibv_cq cq; struct entry *ring; unsigned head, tail, size; int armed, users; };
struct domain { struct ibv_pd pd; int users; };
/* `delta`: from an address as the NIC knows it to where we reach the byte; other than 0 for a dmabuf, which is `mapped`. */
struct region {
    struct ibv_mr mr;
    int access;
    uint64_t delta;
    void *mapped;
    size_t mapped_length;
    struct region *next;
};
struct request { struct ibv_send_wr wr; struct ibv_sge sge[MAX_SGE]; };
struct pair {
    struct ibv_qp qp;
    struct ibv_qp_attr at;
    struct request *ring;                  /* posted and not executed, from `done` to `posted` */
    unsigned long posted, done, retired;   /* `retired`: a completion was polled, so the slots up to it are free */
    unsigned size;
    int nic, all_signaled;
};
struct nic { int down, fault; long after; unsigned long bytes, requests; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nic nics[MAX_NICS];
static struct pair *pairs[MAX_QPS];
static struct context *contexts[MAX_CONTEXTS];
static struct region *regions;
static unsigned next_qpn = 0x11, next_key = 0x100;
static long live;

#define LOCKED(type, call) \
    do { \
        pthread_mutex_lock(&lock); \
        type _r = (call); \
        pthread_mutex_unlock(&lock); \
        return _r; \
    } while (0)

static int nic_count(void) {
    const char *text = getenv("FAKEVERBS_NICS");
    int count = text ? atoi(text) : 2;
    return count < 0 ? 0 : count > MAX_NICS ? MAX_NICS : count;
}
static struct context *context_of(struct ibv_context *c) {
    return (struct context *)((char *)c - offsetof(struct context, v.context));
}
static void *none(int error) { errno = error; return NULL; }

/* --- devices ------------------------------------------------------------------------------------------------------- */

static struct ibv_device devices[MAX_NICS];

struct ibv_device **ibv_get_device_list(int *count) {
    int n = nic_count();
    struct ibv_device **list = calloc(n + 1, sizeof *list);
    for (int i = 0; i < n; i++) {
        devices[i].node_type = IBV_NODE_CA;
        devices[i].transport_type = IBV_TRANSPORT_IB;
        snprintf(devices[i].name, sizeof devices[i].name, "fake%d", i);
        snprintf(devices[i].dev_name, sizeof devices[i].dev_name, "uverbs%d", i);
        list[i] = &devices[i];
    }
    if (count) *count = n;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
int ibv_get_device_index(struct ibv_device *d) { return d - devices; }
__be64 ibv_get_device_guid(struct ibv_device *d) { return htobe64(0xfa4e000000000000ULL + (d - devices)); }

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *out) {
    *out = (struct ibv_device_attr){
        .node_guid = ibv_get_device_guid(c->device), .max_mr_size = ~0ULL, .page_size_cap = 4096, .max_qp = MAX_QPS,
        .max_qp_wr = MAX_SEND, .max_sge = MAX_SGE, .max_cq = 1024, .max_cqe = MAX_CQE, .max_mr = 1 << 20, .max_pd = 1024,
        .max_qp_rd_atom = 16, .max_qp_init_rd_atom = 16, .phys_port_cnt = 1,
    };
    return 0;
}

#undef ibv_query_port
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *compat) {
    struct ibv_port_attr *out = (void *)compat;
    if (port != 1) return EINVAL;
    out->state = nics[context_of(c)->nic].down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    out->max_mtu = out->active_mtu = IBV_MTU_4096;
    out->gid_tbl_len = 2;
    out->max_msg_sz = 1 << 30;
    out->pkey_tbl_len = 1;
    out->active_width = 1;
    out->active_speed = 8;
    out->phys_state = 5;
    out->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}
int ibv_query_pkey(struct ibv_context *c, uint8_t port, int index, __be16 *pkey) {
    *pkey = 0xffff;
    return index ? EINVAL : 0;
}

/* 0: link-local, 1: IPv4; both RoCE v2. */
static union ibv_gid gid_of(int nic, int index) {
    union ibv_gid gid = {{0}};
    if (index == 0) { gid.raw[0] = 0xfe; gid.raw[1] = 0x80; gid.raw[8] = 2; gid.raw[15] = nic + 1; return gid; }
    gid.raw[10] = gid.raw[11] = 0xff;
    gid.raw[12] = 10; gid.raw[13] = 78; gid.raw[14] = nic % 2; gid.raw[15] = nic + 1;
    return gid;
}
int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid) {
    if (port != 1 || index < 0 || index > 1) { errno = EINVAL; return -1; }
    *gid = gid_of(context_of(c)->nic, index);
    return 0;
}
int ibv_query_gid_type(struct ibv_context *c, uint8_t port, unsigned index, int *type) {
    *type = 1;
    return index > 1 ? EINVAL : 0;
}
int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index, struct ibv_gid_entry *out, uint32_t flags,
                      size_t size) {
    if (port != 1 || index > 1) return EINVAL;
    *out = (struct ibv_gid_entry){ .gid = gid_of(context_of(c)->nic, index), .gid_index = index, .port_num = 1,
                                   .gid_type = IBV_GID_TYPE_ROCE_V2 };
    return 0;
}
ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *out, size_t max, uint32_t flags,
                             size_t size) {
    size_t n = 0;
    for (; n < 2 && n < max; n++) _ibv_query_gid_ex(c, 1, n, &out[n], flags, size);
    return n;
}

/* --- events -------------------------------------------------------------------------------------------------------- */

static void ring_bell(int fd) { eventfd_write(fd, 1); }

static void raise_event(struct context *c, struct ibv_async_event event) {
    if (c->events - c->taken == MAX_EVENTS) return;
    c->ring[c->events++ % MAX_EVENTS] = event;
    ring_bell(c->v.context.async_fd);
}
int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *out) {
    eventfd_t one;
    if (eventfd_read(c->async_fd, &one)) return -1; /* blocks, as the real one does */
    struct context *mine = context_of(c);
    pthread_mutex_lock(&lock);
    *out = mine->ring[mine->taken++ % MAX_EVENTS];
    pthread_mutex_unlock(&lock);
    return 0;
}
void ibv_ack_async_event(struct ibv_async_event *event) {}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
    struct channel *made = calloc(1, sizeof *made);
    made->c.context = c;
    made->c.fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    __sync_fetch_and_add(&live, 1);
    return &made->c;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *c) {
    if (c->refcnt) return EBUSY;
    close(c->fd);
    free(c);
    __sync_fetch_and_sub(&live, 1);
    return 0;
}
int ibv_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **cq, void **user) {
    eventfd_t one;
    struct channel *mine = (void *)c;
    if (eventfd_read(c->fd, &one)) return -1;
    pthread_mutex_lock(&lock);
    *cq = &mine->ring[mine->head++ % MAX_EVENTS]->cq;
    pthread_mutex_unlock(&lock);
    *user = (*cq)->cq_context;
    return 0;
}
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) { cq->comp_events_completed += count; }

/* --- completions --------------------------------------------------------------------------------------------------- */

static int f_arm(struct ibv_cq *cq, int solicited) {
    pthread_mutex_lock(&lock);
    ((struct queue *)cq)->armed = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}
static void complete(struct pair *p, struct request *r, unsigned long serial, enum ibv_wc_status status) {
    struct queue *q = (void *)p->qp.send_cq;
    if (q->tail - q->head == q->size) {
        struct ibv_async_event event = { .element.cq = &q->cq, .event_type = IBV_EVENT_CQ_ERR };
        raise_event(context_of(q->cq.context), event);
        fprintf(stderr, "fakeverbs: completion queue of %u overrun\n", q->size);
        return;
    }
    q->ring[q->tail++ % q->size] = (struct entry){ .serial = serial, .wc = {
        .wr_id = r->wr.wr_id, .status = status, .qp_num = p->qp.qp_num,
        .opcode = r->wr.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE } };
    struct channel *c = (void *)q->cq.channel;
    if (!q->armed || !c) return;
    q->armed = 0;
    c->ring[c->tail++ % MAX_EVENTS] = q;
    ring_bell(c->c.fd);
}
static int poll_locked(struct queue *q, int max, struct ibv_wc *out) {
    int n = 0;
    for (; n < max && q->head != q->tail; n++) {
        struct entry *e = &q->ring[q->head++ % q->size];
        struct pair *p = pairs[e->wc.qp_num % MAX_QPS];
        if (p && p->qp.qp_num == e->wc.qp_num && p->retired < e->serial) p->retired = e->serial;
        out[n] = e->wc;
    }
    return n;
}
static int f_poll(struct ibv_cq *cq, int max, struct ibv_wc *out) {
    LOCKED(int, poll_locked((struct queue *)cq, max, out));
}

/* --- moving -------------------------------------------------------------------------------------------------------- */

static struct region *find(uint32_t key, struct ibv_pd *pd, uint64_t address, uint64_t length, int access) {
    for (struct region *r = regions; r; r = r->next)
        if (r->mr.rkey == key) {
            uint64_t base = (uint64_t)r->mr.addr;
            int inside = address >= base && length <= r->mr.length && address - base <= r->mr.length - length;
            return inside && r->mr.pd == pd && (r->access & access) == access ? r : NULL;
        }
    return NULL;
}
static struct pair *far_end(struct pair *p) {
    struct pair *q = pairs[p->at.dest_qp_num % MAX_QPS];
    if (!q || q->qp.qp_num != p->at.dest_qp_num || q->at.dest_qp_num != p->qp.qp_num) return NULL;
    if (q->qp.state != IBV_QPS_RTR && q->qp.state != IBV_QPS_RTS) return NULL;
    union ibv_gid gid = gid_of(q->nic, 1), local = gid_of(q->nic, 0);
    union ibv_gid *to = &p->at.ah_attr.grh.dgid;
    int addressed = !memcmp(to, &gid, sizeof gid) || !memcmp(to, &local, sizeof local);
    return addressed && q->at.rq_psn == p->at.sq_psn ? q : NULL;
}
static enum fault fault_of(int nic) {
    struct nic *n = &nics[nic];
    return n->fault != NONE && n->after <= 0 ? n->fault : NONE;
}
static uint64_t length_of(struct request *r) {
    uint64_t length = 0;
    for (int i = 0; i < r->wr.num_sge; i++) length += r->sge[i].length;
    return length;
}
static enum ibv_wc_status copy(struct pair *p, struct pair *far, struct request *r) {
    int reading = r->wr.opcode == IBV_WR_RDMA_READ;
    uint64_t remote = r->wr.wr.rdma.remote_addr, length = length_of(r);
    int right = reading ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    struct region *mine[MAX_SGE] = {0}, *theirs = NULL;
    for (int i = 0; i < r->wr.num_sge; i++) {
        struct ibv_sge *part = &r->sge[i];
        if (!part->length) continue;
        mine[i] = find(part->lkey, p->qp.pd, part->addr, part->length, reading ? IBV_ACCESS_LOCAL_WRITE : 0);
        if (!mine[i]) return IBV_WC_LOC_PROT_ERR;
    }
    if (length) {
        theirs = find(r->wr.wr.rdma.rkey, far->qp.pd, remote, length, right);
        if (!theirs || !(far->at.qp_access_flags & right)) return IBV_WC_REM_ACCESS_ERR;
    }
    for (int i = 0; i < r->wr.num_sge; remote += r->sge[i++].length) {
        if (!r->sge[i].length) continue;
        void *here = (void *)(r->sge[i].addr + mine[i]->delta), *there = (void *)(remote + theirs->delta);
        memcpy(reading ? here : there, reading ? there : here, r->sge[i].length);
    }
    nics[p->nic].bytes += length;
    return IBV_WC_SUCCESS;
}
/* SILENCE stands for "no answer yet": -1. */
static int execute(struct pair *p, struct request *r) {
    struct pair *far = far_end(p);
    if (nics[p->nic].down) return IBV_WC_LOC_QP_OP_ERR; /* as rxe says it */
    enum fault fault = fault_of(p->nic) ? fault_of(p->nic) : far ? fault_of(far->nic) : NONE;
    if (fault == SILENCE) return -1;
    if (fault == ERROR || !far || nics[far->nic].down) return IBV_WC_RETRY_EXC_ERR;
    nics[p->nic].requests++;
    if (nics[p->nic].fault) nics[p->nic].after--;
    if (far->nic != p->nic && nics[far->nic].fault) nics[far->nic].after--;
    int status = copy(p, far, r);
    if (status == IBV_WC_REM_ACCESS_ERR) {
        far->qp.state = IBV_QPS_ERR;
        struct ibv_async_event event = { .element.qp = &far->qp, .event_type = IBV_EVENT_QP_ACCESS_ERR };
        raise_event(context_of(far->qp.context), event);
    }
    return status;
}
/* Do what is posted, in order; after an error everything else comes back as flushed, signaled or not. */
static void run(struct pair *p) {
    while (p->done != p->posted) {
        struct request *r = &p->ring[p->done % p->size];
        int status = p->qp.state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : execute(p, r);
        if (status < 0) return;
        if (status != IBV_WC_SUCCESS) p->qp.state = IBV_QPS_ERR;
        p->done++;
        if (status != IBV_WC_SUCCESS || p->all_signaled || r->wr.send_flags & IBV_SEND_SIGNALED)
            complete(p, r, p->done, status);
    }
}
static int post_locked(struct pair *p, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    int error = 0;
    for (; wr; wr = wr->next) {
        if (p->qp.state != IBV_QPS_RTS && p->qp.state != IBV_QPS_ERR) error = EINVAL;
        else if (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_READ) error = EINVAL;
        else if (wr->num_sge > MAX_SGE) error = EINVAL;
        else if (p->posted - p->retired >= p->size) error = ENOMEM;
        if (error) break;
        struct request *r = &p->ring[p->posted++ % p->size];
        r->wr = *wr;
        memcpy(r->sge, wr->sg_list, wr->num_sge * sizeof *r->sge);
    }
    if (error) *bad = wr;
    run(p);
    return error;
}
static int f_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    LOCKED(int, post_locked((struct pair *)qp, wr, bad));
}
static int f_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    *bad = wr;
    return EOPNOTSUPP;
}

/* --- objects ------------------------------------------------------------------------------------------------------- */

struct ibv_context *ibv_open_device(struct ibv_device *d) {
    struct context *made = calloc(1, sizeof *made);
    struct ibv_context *c = &made->v.context;
    made->nic = d - devices;
    c->abi_compat = NULL; /* plain verbs only: no table of extended ones follows */
    c->device = d;
    c->cmd_fd = -1;
    c->async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    c->num_comp_vectors = 1;
    c->ops.poll_cq = f_poll;
    c->ops.req_notify_cq = f_arm;
    c->ops.post_send = f_post;
    c->ops.post_recv = f_receive;
    pthread_mutex_lock(&lock);
    int slot = 0;
    while (slot < MAX_CONTEXTS && contexts[slot]) slot++;
    if (slot < MAX_CONTEXTS) contexts[slot] = made, live++;
    pthread_mutex_unlock(&lock);
    if (slot < MAX_CONTEXTS) return c;
    close(c->async_fd);
    free(made);
    return none(ENOMEM);
}
int ibv_close_device(struct ibv_context *c) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i] == context_of(c)) contexts[i] = NULL, live--;
    pthread_mutex_unlock(&lock);
    close(c->async_fd);
    free(context_of(c));
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
    struct domain *made = calloc(1, sizeof *made);
    made->pd.context = c;
    __sync_fetch_and_add(&live, 1);
    return &made->pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd) {
    if (((struct domain *)pd)->users) return EBUSY;
    free(pd);
    __sync_fetch_and_sub(&live, 1);
    return 0;
}

/* What the CPU cannot touch, a NIC without peer memory cannot either. */
static int reachable(uint64_t address, size_t length) {
    uint64_t first = address & ~4095ULL, end = (address + length + 4095) & ~4095ULL;
    unsigned char *resident = malloc((end - first) / 4096 + 1), byte;
    int mapped = !mincore((void *)first, end - first, resident);
    free(resident);
    struct iovec to = {&byte, 1}, of = {(void *)address, 1};
    return mapped && process_vm_readv(getpid(), &to, 1, &of, 1, 0) == 1;
}
static struct ibv_mr *reg(struct ibv_pd *pd, void *address, size_t length, int access, uint64_t delta) {
    if (!reachable((uint64_t)address + delta, length)) return none(EFAULT);
    if (access & IBV_ACCESS_ON_DEMAND) return none(EINVAL);
    struct region *made = calloc(1, sizeof *made);
    made->mr.context = pd->context;
    made->mr.pd = pd;
    made->mr.addr = address;
    made->mr.length = length;
    made->access = access;
    made->delta = delta;
    pthread_mutex_lock(&lock);
    made->mr.lkey = made->mr.rkey = next_key += 0x11; /* never used again */
    made->next = regions;
    regions = made;
    ((struct domain *)pd)->users++;
    live++;
    pthread_mutex_unlock(&lock);
    return &made->mr;
}
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    return reg(pd, address, length, access, 0);
}
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access) {
    return reg(pd, address, length, access, 0);
}
/* Any file that can be mapped serves as a dmabuf. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    if ((offset ^ iova) & 4095) return none(EINVAL);
    size_t before = offset & 4095, whole = (before + length + 4095) & ~4095ULL;
    char *mapped = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset - before);
    if (mapped == MAP_FAILED) return none(EOPNOTSUPP);
    struct ibv_mr *made = reg(pd, (void *)iova, length, access, (uint64_t)mapped + before - iova);
    if (!made) return munmap(mapped, whole), NULL;
    ((struct region *)made)->mapped = mapped, ((struct region *)made)->mapped_length = whole;
    return made;
}
int ibv_dereg_mr(struct ibv_mr *mr) {
    pthread_mutex_lock(&lock);
    for (struct region **at = &regions; *at; at = &(*at)->next)
        if (&(*at)->mr == mr) { *at = (*at)->next; break; }
    ((struct domain *)mr->pd)->users--;
    live--;
    pthread_mutex_unlock(&lock);
    if (((struct region *)mr)->mapped) munmap(((struct region *)mr)->mapped, ((struct region *)mr)->mapped_length);
    free(mr);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int size, void *user, struct ibv_comp_channel *channel, int vector) {
    if (size < 1 || size > MAX_CQE) return none(EINVAL);
    struct queue *made = calloc(1, sizeof *made);
    made->cq.context = c;
    made->cq.cq_context = user;
    made->cq.channel = channel;
    made->cq.cqe = made->size = size;
    made->ring = calloc(size, sizeof *made->ring);
    if (channel) __sync_fetch_and_add(&channel->refcnt, 1);
    __sync_fetch_and_add(&live, 1);
    return &made->cq;
}
int ibv_destroy_cq(struct ibv_cq *cq) {
    struct queue *q = (void *)cq;
    if (q->users) return EBUSY;
    if (cq->channel) __sync_fetch_and_sub(&cq->channel->refcnt, 1);
    free(q->ring);
    free(q);
    __sync_fetch_and_sub(&live, 1);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a) {
    if (a->qp_type != IBV_QPT_RC || a->cap.max_send_wr > MAX_SEND || a->cap.max_send_sge > MAX_SGE) return none(EINVAL);
    struct pair *made = calloc(1, sizeof *made);
    made->qp = (struct ibv_qp){ .context = pd->context, .qp_context = a->qp_context, .pd = pd, .send_cq = a->send_cq,
                                .recv_cq = a->recv_cq, .qp_type = a->qp_type, .state = IBV_QPS_RESET };
    made->size = a->cap.max_send_wr ? a->cap.max_send_wr : 1;
    made->ring = calloc(made->size, sizeof *made->ring);
    made->all_signaled = a->sq_sig_all;
    made->nic = context_of(pd->context)->nic;
    pthread_mutex_lock(&lock);
    int tries = MAX_QPS;
    while (tries-- && pairs[++next_qpn % MAX_QPS]) {}
    made->qp.qp_num = next_qpn & 0xffffff;
    pairs[next_qpn % MAX_QPS] = made;
    ((struct domain *)pd)->users++;
    ((struct queue *)a->send_cq)->users++;
    live++;
    pthread_mutex_unlock(&lock);
    return &made->qp;
}

enum {
    FOR_RTR = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    FOR_RTS = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
};
static const struct { int from, to, needs; } steps[] = {
    { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS },
    { IBV_QPS_INIT, IBV_QPS_INIT, 0 },
    { IBV_QPS_INIT, IBV_QPS_RTR, FOR_RTR },
    { IBV_QPS_RTR, IBV_QPS_RTS, FOR_RTS },
    { IBV_QPS_RTS, IBV_QPS_RTS, 0 },
};
static int allowed(struct pair *p, int to, int mask) {
    if (to == IBV_QPS_ERR || to == IBV_QPS_RESET) return 1;
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (steps[i].from == (int)p->qp.state && steps[i].to == to) return (mask & steps[i].needs) == steps[i].needs;
    return 0;
}
static int modify_locked(struct pair *p, struct ibv_qp_attr *a, int mask) {
    int to = mask & IBV_QP_STATE ? a->qp_state : p->qp.state;
    if (!allowed(p, to, mask)) return EINVAL;
    if (mask & IBV_QP_PORT && a->port_num != 1) return EINVAL;
    if (mask & IBV_QP_AV && (!a->ah_attr.is_global || a->ah_attr.grh.sgid_index > 1)) return EINVAL;
    if (mask & IBV_QP_ACCESS_FLAGS) p->at.qp_access_flags = a->qp_access_flags;
    if (mask & IBV_QP_AV) p->at.ah_attr = a->ah_attr;
    if (mask & IBV_QP_DEST_QPN) p->at.dest_qp_num = a->dest_qp_num;
    if (mask & IBV_QP_RQ_PSN) p->at.rq_psn = a->rq_psn;
    if (mask & IBV_QP_SQ_PSN) p->at.sq_psn = a->sq_psn;
    if (mask & IBV_QP_PATH_MTU) p->at.path_mtu = a->path_mtu;
    p->qp.state = to;
    if (to == IBV_QPS_RESET) p->posted = p->done = p->retired = 0;
    else run(p);
    return 0;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) {
    LOCKED(int, modify_locked((struct pair *)qp, a, mask));
}
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *init) {
    *a = ((struct pair *)qp)->at;
    a->qp_state = a->cur_qp_state = qp->state;
    *init = (struct ibv_qp_init_attr){ .send_cq = qp->send_cq, .recv_cq = qp->recv_cq, .qp_type = qp->qp_type,
                                       .cap = { .max_send_wr = ((struct pair *)qp)->size, .max_send_sge = MAX_SGE } };
    return 0;
}
/* Its completions leave the queue with it. */
static void forget(struct queue *q, uint32_t number) {
    unsigned to = q->head;
    for (unsigned at = q->head; at != q->tail; at++)
        if (q->ring[at % q->size].wc.qp_num != number) q->ring[to++ % q->size] = q->ring[at % q->size];
    q->tail = to;
}
int ibv_destroy_qp(struct ibv_qp *qp) {
    struct pair *p = (void *)qp;
    pthread_mutex_lock(&lock);
    pairs[qp->qp_num % MAX_QPS] = NULL;
    forget((struct queue *)qp->send_cq, qp->qp_num);
    ((struct domain *)qp->pd)->users--;
    ((struct queue *)qp->send_cq)->users--;
    live--;
    pthread_mutex_unlock(&lock);
    free(p->ring);
    free(p);
    return 0;
}

/* --- steering ------------------------------------------------------------------------------------------------------ */

static void run_all(void) {
    for (int i = 0; i < MAX_QPS; i++)
        if (pairs[i]) run(pairs[i]);
}

/* From the NIC's `after`-th request on (0: at once), its requests and those to it end in an error (1) or get lost (2);
 * 0 mends: what was lost meanwhile is sent again and goes through. */
void fakeverbs_fault(int nic, int kind, long after) {
    pthread_mutex_lock(&lock);
    nics[nic].after = after;
    nics[nic].fault = kind;
    run_all();
    pthread_mutex_unlock(&lock);
}
/* Link up or down, with the event that a NIC raises. */
void fakeverbs_port(int nic, int up) {
    pthread_mutex_lock(&lock);
    nics[nic].down = !up;
    struct ibv_async_event event = { .element.port_num = 1, .event_type = up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR };
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i] && contexts[i]->nic == nic) raise_event(contexts[i], event);
    run_all();
    pthread_mutex_unlock(&lock);
}
/* Payload bytes that a NIC has moved as requester, and its requests. */
unsigned long fakeverbs_bytes(int nic) { LOCKED(unsigned long, nics[nic].bytes); }
unsigned long fakeverbs_requests(int nic) { LOCKED(unsigned long, nics[nic].requests); }
/* Objects of all kinds that were made and not destroyed. */
long fakeverbs_live(void) { LOCKED(long, live); }
