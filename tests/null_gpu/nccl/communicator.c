// Creation, splitting and errors of communicators.
#include "null_nccl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static __thread char last[MESSAGE_BYTES];

// The caller asks for the error of its own thread, and the communicator's has met it.
void repeat_message(ncclComm_t comm) { snprintf(last, sizeof last, "%s", comm->message); }

ncclResult_t fail(ncclComm_t comm, ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last, sizeof last, format, arguments);
    va_end(arguments);
    if (!comm) {
        fprintf(stderr, "null NCCL: %s\n", last);
        return result;
    }
    snprintf(comm->message, sizeof comm->message, "%s", last);
    fprintf(stderr, "null NCCL, rank %d of %d%s%s: %s\n", comm->rank, comm->size, *comm->name ? " in " : "", comm->name, last);
    return result;
}

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random) return fail(NULL, ncclSystemError, "no random numbers");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "null-nccl-%016llx%016llx", (unsigned long long)random[0], (unsigned long long)random[1]);
    return ncclSuccess;
}

static ncclResult_t create(ncclComm_t *created, int size, const char *id, int rank, const ncclConfig_t *config) {
    *created = NULL;
    if (size < 1 || size > MAX_RANKS) return fail(NULL, ncclInvalidArgument, "%d ranks, expected 1 to %d", size, MAX_RANKS);
    if (rank < 0 || rank >= size) return fail(NULL, ncclInvalidArgument, "rank %d of %d", rank, size);
    ncclResult_t result = check_preload_order();
    if (result) return result;
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    snprintf(comm->id, sizeof comm->id, "%s", id);
    if (config && config->commName) snprintf(comm->name, sizeof comm->name, "%s", config->commName);
    if (cudaGetDevice(&comm->device) != cudaSuccess) result = fail(comm, ncclUnhandledCudaError, "no current device");
    if (!result) result = join(comm);
    if (result) {
        free(comm);
        return result;
    }
    comm->row = add_row(comm->name, comm->id, size);
    *created = comm;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return create(comm, size, id.internal, rank, config);
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return create(comm, size, id.internal, rank, NULL);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int num_ids, ncclUniqueId *ids, ncclConfig_t *config) {
    if (num_ids < 1) return fail(NULL, ncclInvalidArgument, "%d unique ids", num_ids);
    return create(comm, size, ids[0].internal, rank, config);
}

// Ranks of the same color become a communicator, ordered by key, then by rank.
EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *created, ncclConfig_t *config) {
    *created = NULL;
    if (alone()) return fail(comm, ncclInvalidUsage, "a rank alone cannot split a communicator: it does not know the colors of the others");
    drain(comm);
    if (atomic_load(&comm->error)) return fail(comm, ncclInvalidUsage, "split of a communicator that has failed");
    SharedRank *ranks = comm->shared->ranks;
    ranks[comm->rank].color = color;
    ranks[comm->rank].key = key;
    ncclResult_t result = barrier(comm, "split");
    if (result) return result;
    int size = 0, rank = 0;
    for (int other = 0; other < comm->size; other++) {
        if (ranks[other].color != color) continue;
        size++;
        rank += ranks[other].key < key || (ranks[other].key == key && other < comm->rank);
    }
    if ((result = barrier(comm, "split"))) return result;
    char id[NCCL_UNIQUE_ID_BYTES + 32];
    snprintf(id, sizeof id, "%s.%llu.%d", comm->id, (unsigned long long)++comm->splits, color);
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    if (strlen(id) >= NCCL_UNIQUE_ID_BYTES) return fail(comm, ncclInternalError, "too many splits of splits");
    return create(created, size, id, rank, config);
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    drain(comm);
    return ncclSuccess;
}

// The record itself is kept: another thread may still ask for its error.
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    drain(comm);
    stop_worker(comm);
    leave(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    atomic_store(&comm->aborted, true);
    if (comm->shared) {
        atomic_store(&comm->shared->ranks[comm->rank].aborted, 1);
        ring(comm);
    }
    stop_worker(comm);
    leave(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = atomic_load(&comm->error);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    *device = comm->device;
    return ncclSuccess;
}

EXPORT const char *ncclGetLastError(ncclComm_t comm) { return comm ? comm->message : last; }

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    static const char *words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "operation in progress", "timeout"};
    return (unsigned)result < sizeof words / sizeof *words ? words[result] : "unknown result code";
}

EXPORT ncclResult_t ncclMemAlloc(void **memory, size_t size) { return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

EXPORT ncclResult_t ncclMemFree(void *memory) { return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

// Registration only makes transfers of GPUs faster.
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t size, void **handle) {
    (void)comm, (void)size;
    *handle = buffer;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    (void)comm, (void)handle;
    return ncclSuccess;
}
