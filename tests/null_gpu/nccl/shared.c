// The memory that the ranks of a communicator share, and how they wait for each other.
#include "null_nccl.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static double limit(void) {
    const char *seconds = getenv("NULL_NCCL_TIMEOUT_S");
    return seconds ? atof(seconds) : 300.0;
}

bool alone(void) {
    const char *value = getenv("NULL_NCCL_ALONE");
    return value && strcmp(value, "1") == 0;
}

Channel *channel(ncclComm_t comm, int from, int to) {
    Channel *channels = (Channel *)(comm->shared->ranks + comm->size);
    return channels + (size_t)from * comm->size + to;
}

void ring(ncclComm_t comm) {
    atomic_fetch_add(&comm->shared->bell, 1);
    syscall(SYS_futex, &comm->shared->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

// Start time of a process; 0 if it has ended, also if nobody has waited for it yet.
static uint64_t start_of(int process) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *rest = strrchr(text, ')');
    char state = 0;
    unsigned long long started = 0;
    if (!rest || sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

Wait begin_wait(ncclComm_t comm) {
    return (Wait){atomic_load(&comm->shared->bell), now()};
}

// Sleep until something happens; an error if one of the ranks waited for (a bit each) cannot come any more.
ncclResult_t wait_more(ncclComm_t comm, Wait *wait, uint64_t waited_for, const char *what) {
    if (atomic_load(&comm->aborted)) return fail(comm, ncclInternalError, "%s: the communicator was aborted", what);
    struct timespec nap = {0, 20 * 1000 * 1000};
    bool slept = syscall(SYS_futex, &comm->shared->bell, FUTEX_WAIT, wait->seen, &nap, NULL, 0) == -1 && errno == ETIMEDOUT;
    uint32_t bell = atomic_load(&comm->shared->bell);
    if (!slept || bell != wait->seen) {
        wait->seen = bell;
        return ncclSuccess;  // look again before judging the others
    }
    for (int rank = 0; rank < comm->size; rank++) {
        if (!(waited_for >> rank & 1) || rank == comm->rank) continue;
        SharedRank *other = &comm->shared->ranks[rank];
        int process = atomic_load(&other->process);
        if (atomic_load(&other->aborted)) return fail(comm, ncclRemoteError, "%s: rank %d has aborted", what, rank);
        if (atomic_load(&other->left)) return fail(comm, ncclRemoteError, "%s: rank %d has left the communicator", what, rank);
        if (process && start_of(process) != other->started)
            return fail(comm, ncclRemoteError, "%s: rank %d (process %d) has ended", what, rank, process);
    }
    if (now() - wait->since < limit()) return ncclSuccess;
    char ranks[256] = "";
    for (int rank = 0; rank < comm->size; rank++)
        if (waited_for >> rank & 1) snprintf(ranks + strlen(ranks), sizeof ranks - strlen(ranks), " %d", rank);
    return fail(comm, ncclRemoteError, "%s: waited %.0f s for rank%s", what, limit(), ranks);
}

ncclResult_t barrier(ncclComm_t comm, const char *what) {
    atomic_store(&comm->shared->ranks[comm->rank].phase, ++comm->phase);
    ring(comm);
    for (Wait wait = begin_wait(comm);;) {
        uint64_t behind = 0;
        for (int rank = 0; rank < comm->size; rank++)
            if (atomic_load(&comm->shared->ranks[rank].phase) < comm->phase) behind |= 1ull << rank;
        if (!behind) return ncclSuccess;
        ncclResult_t result = wait_more(comm, &wait, behind, what);
        if (result) return result;
    }
}

static ncclResult_t map(ncclComm_t comm) {
    char path[160];
    snprintf(path, sizeof path, "/dev/shm/%s", comm->id);
    comm->shared_bytes = sizeof(Shared) + comm->size * sizeof(SharedRank) + (size_t)comm->size * comm->size * sizeof(Channel);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, comm->shared_bytes)) {
        if (file >= 0) close(file);
        return fail(comm, ncclSystemError, "%s: %s", path, strerror(errno));
    }
    comm->shared = mmap(NULL, comm->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return fail(comm, ncclSystemError, "mmap of %s: %s", path, strerror(errno));
    return ncclSuccess;
}

static ncclResult_t enter(ncclComm_t comm) {
    int size = 0, none = 0, process = getpid();
    if (!atomic_compare_exchange_strong(&comm->shared->size, &size, comm->size) && size != comm->size)
        return fail(comm, ncclInvalidArgument, "a communicator of %d ranks here, of %d elsewhere", comm->size, size);
    SharedRank *mine = &comm->shared->ranks[comm->rank];
    mine->started = start_of(process);
    if (cudaDeviceGetPCIBusId(mine->device, sizeof mine->device, comm->device) != cudaSuccess)
        return fail(comm, ncclUnhandledCudaError, "device %d has no PCI bus id", comm->device);
    if (!atomic_compare_exchange_strong(&mine->process, &none, process))
        return fail(comm, ncclInvalidArgument, "rank %d is taken by process %d", comm->rank, none);
    ncclResult_t result = barrier(comm, "creation of a communicator");
    if (result) return result;
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank && strcmp(comm->shared->ranks[rank].device, mine->device) == 0)
            return fail(comm, ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", comm->rank, rank, mine->device);
    return ncclSuccess;
}

// Meet the other ranks; the name of the shared memory is gone afterwards, so nothing stays behind.
ncclResult_t join(ncclComm_t comm) {
    if (alone()) return ncclSuccess;
    ncclResult_t result = map(comm);
    if (result) return result;
    result = enter(comm);
    char path[160];
    snprintf(path, sizeof path, "/dev/shm/%s", comm->id);
    unlink(path);
    if (result) leave(comm);
    return result;
}

void leave(ncclComm_t comm) {
    if (!comm->shared) return;
    atomic_store(&comm->shared->ranks[comm->rank].left, 1);
    ring(comm);
    munmap(comm->shared, comm->shared_bytes);
    comm->shared = NULL;
}
