// The calls that torch makes: checked, counted, put together in groups, given to the queue.
#include "null_nccl.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    ncclComm_t comm;
    cudaStream_t stream;
    Operation operation;
} Call;

static __thread int depth;  // of ncclGroupStart
static __thread Call *calls;
static __thread int num_calls, room_for_calls;
static __thread ncclResult_t group_error;

// One task for the calls on the same communicator and stream.
static ncclResult_t submit_calls(void) {
    ncclResult_t result = ncclSuccess;
    Task **tasks = calloc(num_calls, sizeof *tasks);
    bool *synchronous = calloc(num_calls, sizeof *synchronous);
    int num_tasks = 0;
    for (int first = 0; first < num_calls; first++) {
        if (!calls[first].comm) continue;
        Task *task = calloc(1, sizeof *task);
        task->comm = calls[first].comm;
        task->stream = calls[first].stream;
        task->operations = calloc(num_calls - first, sizeof *task->operations);
        for (int index = first; index < num_calls; index++) {
            if (calls[index].comm != task->comm || calls[index].stream != task->stream) continue;
            task->operations[task->num_operations++] = calls[index].operation;
            calls[index].comm = NULL;
        }
        ncclResult_t submitted = submit(task, &synchronous[num_tasks]);
        if (submitted) result = submitted;
        else tasks[num_tasks++] = task;
    }
    num_calls = 0;
    for (int index = 0; index < num_tasks; index++) {
        ncclResult_t finished = finish(tasks[index], synchronous[index]);
        if (!result) result = finished;
    }
    free(tasks);
    free(synchronous);
    return result;
}

static ncclResult_t check_buffer(ncclComm_t comm, const void *buffer, const char *what, const Agreement *agreement) {
    char call[128];
    describe(agreement, call, sizeof call);
    if (!buffer) return fail(comm, ncclInvalidArgument, "%s: the %s buffer is NULL", call, what);
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, buffer) != cudaSuccess) return fail(comm, ncclUnhandledCudaError, "%s: cudaPointerGetAttributes", call);
    if (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged) return ncclSuccess;
    return fail(comm, ncclInvalidArgument, "%s: the %s buffer %p is host memory, expected device memory", call, what, buffer);
}

static ncclResult_t check(ncclComm_t comm, const Operation *operation) {
    const Agreement *agreement = &operation->agreement;
    int scaled = agreement->op - ncclNumOps, kind = agreement->kind;
    char call[128];
    if (!type_size(agreement->type)) return fail(comm, ncclInvalidArgument, "%s: data type %d", kind_name(kind), agreement->type);
    describe(agreement, call, sizeof call);
    if (agreement->op >= 0 && !reducible(agreement->type)) return fail(comm, ncclInvalidArgument, "%s: no reduction of this type", call);
    if (scaled >= comm->num_scaled || (scaled >= 0 && comm->scaled[scaled].type != agreement->type))
        return fail(comm, ncclInvalidArgument, "%s: the reduction belongs to another type or communicator", call);
    if (agreement->root >= comm->size) return fail(comm, ncclInvalidArgument, "%s: %d ranks", call, comm->size);
    if (operation->peer >= comm->size) return fail(comm, ncclInvalidArgument, "%s: rank %d of %d", call, operation->peer, comm->size);
    if (agreement->count == 0) return ncclSuccess;
    bool is_root = agreement->root < 0 || agreement->root == comm->rank;
    bool has_source = kind != RECV && (is_root || (kind != BROADCAST && kind != SCATTER));
    bool has_target = kind != SEND && (is_root || (kind != REDUCE && kind != GATHER));
    ncclResult_t result = has_source ? check_buffer(comm, operation->source, "send", agreement) : ncclSuccess;
    return !result && has_target ? check_buffer(comm, operation->target, "receive", agreement) : result;
}

static ncclResult_t call(ncclComm_t comm, cudaStream_t stream, Operation operation) {
    if (!comm) return fail(NULL, ncclInvalidArgument, "%s: no communicator", kind_name(operation.agreement.kind));
    ncclResult_t result = check(comm, &operation);
    if (!result && atomic_load(&comm->error)) result = fail(comm, ncclRemoteError, "the communicator has failed before");
    if (result) {
        if (depth && !group_error) group_error = result;
        return result;
    }
    count(comm, &operation);
    if (num_calls == room_for_calls) calls = realloc(calls, (room_for_calls = 2 * room_for_calls + 16) * sizeof *calls);
    calls[num_calls++] = (Call){comm, stream, operation};
    return depth ? ncclSuccess : submit_calls();
}

EXPORT ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return fail(NULL, ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    if (--depth) return ncclSuccess;
    ncclResult_t result = group_error;
    group_error = ncclSuccess;
    if (!result) return num_calls ? submit_calls() : ncclSuccess;
    num_calls = 0;
    return result;
}

static Operation operation_of(Kind kind, const void *source, void *target, size_t count, int type, int op, int root, int peer) {
    Operation operation;
    memset(&operation, 0, sizeof operation);
    operation.agreement = (Agreement){kind, type, op, root, count};
    operation.source = source;
    operation.target = target;
    operation.peer = peer;
    return operation;
}

#define CALL(KIND, OP, ROOT, PEER) call(comm, stream, operation_of(KIND, source, target, count, type, OP, ROOT, PEER))

EXPORT ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return CALL(ALL_REDUCE, op, -1, -1);
}

EXPORT ncclResult_t ncclReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return CALL(REDUCE, op, root, -1);
}

EXPORT ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return CALL(BROADCAST, -1, root, -1);
}

EXPORT ncclResult_t ncclBcast(void *target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    const void *source = target;
    return CALL(BROADCAST, -1, root, -1);
}

EXPORT ncclResult_t ncclAllGather(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return CALL(ALL_GATHER, -1, -1, -1);
}

EXPORT ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return CALL(REDUCE_SCATTER, op, -1, -1);
}

EXPORT ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return CALL(ALL_TO_ALL, -1, -1, -1);
}

EXPORT ncclResult_t ncclGather(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return CALL(GATHER, -1, root, -1);
}

EXPORT ncclResult_t ncclScatter(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return CALL(SCATTER, -1, root, -1);
}

EXPORT ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    void *target = NULL;
    return CALL(SEND, -1, -1, peer);
}

EXPORT ncclResult_t ncclRecv(void *target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    const void *source = NULL;
    return CALL(RECV, -1, -1, peer);
}

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm) {
    (void)residence;  // the null device's memory can be read here
    for (int index = 0; index < MAX_SCALED; index++) {
        if (index < comm->num_scaled && comm->scaled[index].type >= 0) continue;
        comm->scaled[index] = (Scaled){scalar_of(scalar, type), type};
        if (index == comm->num_scaled) comm->num_scaled++;
        *op = (ncclRedOp_t)(ncclNumOps + index);
        return ncclSuccess;
    }
    return fail(comm, ncclInvalidUsage, "more than %d reductions with a factor", MAX_SCALED);
}

EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    int index = (int)op - ncclNumOps;
    if (index < 0 || index >= comm->num_scaled) return fail(comm, ncclInvalidArgument, "ncclRedOpDestroy: no such reduction");
    drain(comm);  // a call under way may use it
    comm->scaled[index].type = -1;
    return ncclSuccess;
}
