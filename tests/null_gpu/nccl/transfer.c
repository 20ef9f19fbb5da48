// Moves the data of calls through the shared memory of a communicator.
#include "null_nccl.h"

#include <stdio.h>
#include <string.h>

const char *describe(const Agreement *agreement, char *text, size_t size) {
    static const char *ops[] = {"sum", "prod", "max", "min", "avg"};
    int used = snprintf(text, size, "%s of %llu %s", kind_name(agreement->kind), (unsigned long long)agreement->count, type_name(agreement->type));
    if (agreement->op >= 0) used += snprintf(text + used, size - used, ", %s", agreement->op < ncclNumOps ? ops[agreement->op] : "scaled sum");
    if (agreement->root >= 0) snprintf(text + used, size - used, ", root %d", agreement->root);
    return text;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t own_bytes(const Operation *operation) { return operation->agreement.count * type_size(operation->agreement.type); }

// Bytes that one rank lays down for the others.
static size_t given_bytes(ncclComm_t comm, const Operation *operation) {
    int kind = operation->agreement.kind;
    return own_bytes(operation) * (kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER ? comm->size : 1);
}

static bool gives(ncclComm_t comm, const Operation *operation) {
    int kind = operation->agreement.kind;
    return (kind != BROADCAST && kind != SCATTER) || comm->rank == operation->agreement.root;
}

// The same call with the same arguments on all ranks.
static ncclResult_t check_agreement(ncclComm_t comm, const Operation *operation) {
    for (int rank = 0; rank < comm->size; rank++) {
        const Agreement *other = &comm->shared->ranks[rank].agreement, *mine = &operation->agreement;
        if (memcmp(other, mine, sizeof *mine) == 0) continue;
        char here[128], there[128];
        return fail(comm, ncclInvalidUsage, "ranks disagree: %s on rank %d, %s on rank %d", describe(mine, here, sizeof here), comm->rank,
                    describe(other, there, sizeof there), rank);
    }
    return ncclSuccess;
}

static void reduce_areas(ncclComm_t comm, const Operation *operation, char *target, size_t skip, size_t bytes) {
    const void *sources[MAX_RANKS];
    for (int rank = 0; rank < comm->size; rank++) sources[rank] = comm->shared->ranks[rank].area + skip;
    const Agreement *agreement = &operation->agreement;
    const Scaled *scaled = agreement->op >= ncclNumOps ? &comm->scaled[agreement->op - ncclNumOps] : NULL;
    reduce(target, sources, comm->size, bytes / type_size(agreement->type), agreement->type, agreement->op, scaled);
}

// Take what this rank needs of bytes [first, first + length) of what all have laid down.
static void take(ncclComm_t comm, const Operation *operation, size_t first, size_t length) {
    SharedRank *ranks = comm->shared->ranks;
    size_t own = own_bytes(operation), start = own * comm->rank, from = first, to = first + length;
    int kind = operation->agreement.kind, root = operation->agreement.root;
    char *target = operation->target;
    if (kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER) {  // of each rank's bytes, those for this one
        from = from > start ? from : start;
        to = smaller(to, start + own);
        if (from >= to) return;
    }
    switch (kind) {
        case ALL_REDUCE: reduce_areas(comm, operation, target + first, 0, length); break;
        case REDUCE: if (comm->rank == root) reduce_areas(comm, operation, target + first, 0, length); break;
        case BROADCAST: memcpy(target + first, ranks[root].area, length); break;
        case SCATTER: memcpy(target + from - start, ranks[root].area + from - first, to - from); break;
        case REDUCE_SCATTER: reduce_areas(comm, operation, target + from - start, from - first, to - from); break;
        case ALL_TO_ALL:
            for (int rank = 0; rank < comm->size; rank++)
                memcpy(target + rank * own + from - start, ranks[rank].area + from - first, to - from);
            break;
        case GATHER: if (comm->rank != root) break;  // fall through
        case ALL_GATHER:
            for (int rank = 0; rank < comm->size; rank++) memcpy(target + rank * own + first, ranks[rank].area, length);
    }
}

static ncclResult_t run_collective(ncclComm_t comm, Operation *operation) {
    SharedRank *mine = &comm->shared->ranks[comm->rank];
    size_t all = given_bytes(comm, operation);
    char what[128];
    describe(&operation->agreement, what, sizeof what);
    mine->agreement = operation->agreement;
    for (size_t first = 0; first == 0 || first < all; first += AREA_BYTES) {
        size_t length = smaller(AREA_BYTES, all - first);
        if (length && gives(comm, operation)) memcpy(mine->area, operation->source + first, length);
        ncclResult_t result = barrier(comm, what);
        if (!result && first == 0) result = check_agreement(comm, operation);
        if (result) return result;
        if (length) take(comm, operation, first, length);
        if ((result = barrier(comm, what))) return result;
    }
    return ncclSuccess;
}

static ncclResult_t refuse(ncclComm_t comm, const Agreement *sent, int from, const Agreement *wanted, int to) {
    return fail(comm, ncclInvalidUsage, "rank %d sends %llu %s, rank %d receives %llu %s", from, (unsigned long long)sent->count,
                type_name(sent->type), to, (unsigned long long)wanted->count, type_name(wanted->type));
}

// Give the next piece if the receiver has taken the last one. Sets *moved if something happened.
static ncclResult_t advance_send(ncclComm_t comm, Operation *operation, bool *moved) {
    Channel *to = channel(comm, comm->rank, operation->peer);
    if (atomic_load(&to->written) != atomic_load(&to->read)) return ncclSuccess;
    if (atomic_load(&to->refused)) return refuse(comm, &to->sent, comm->rank, &to->wanted, operation->peer);
    *moved = true;
    if (operation->begun && operation->moved == own_bytes(operation)) {
        operation->done = true;
        return ncclSuccess;
    }
    to->sent = operation->agreement;
    to->piece = smaller(CHANNEL_BYTES, own_bytes(operation) - operation->moved);
    if (to->piece) memcpy(to->data, operation->source + operation->moved, to->piece);
    operation->moved += to->piece;
    operation->begun = true;
    atomic_fetch_add(&to->written, 1);
    ring(comm);
    return ncclSuccess;
}

static ncclResult_t advance_recv(ncclComm_t comm, Operation *operation, bool *moved) {
    Channel *from = channel(comm, operation->peer, comm->rank);
    const Agreement *wanted = &operation->agreement;
    if (atomic_load(&from->written) == atomic_load(&from->read)) return ncclSuccess;
    *moved = true;
    bool equal = from->sent.count == wanted->count && from->sent.type == wanted->type;
    if (equal) {
        if (from->piece) memcpy(operation->target + operation->moved, from->data, from->piece);
        operation->moved += from->piece;
        operation->done = operation->moved == own_bytes(operation);
    } else {
        from->wanted = *wanted;
        atomic_store(&from->refused, 1);
    }
    atomic_fetch_add(&from->read, 1);
    ring(comm);
    return equal ? ncclSuccess : refuse(comm, &from->sent, operation->peer, wanted, comm->rank);
}

// All sends and receives of a group at once; those between the same two ranks one after the other, in their order.
static ncclResult_t run_messages(ncclComm_t comm, Operation *operations, int num) {
    for (Wait wait = begin_wait(comm);;) {
        uint64_t sending = 0, receiving = 0;
        const Operation *first = NULL;
        bool moved = false;
        for (Operation *operation = operations; operation < operations + num; operation++) {
            bool is_send = operation->agreement.kind == SEND;
            uint64_t peer = 1ull << operation->peer, *busy = is_send ? &sending : &receiving;
            if (operation->done || (!is_send && operation->agreement.kind != RECV) || *busy & peer) continue;
            ncclResult_t result = is_send ? advance_send(comm, operation, &moved) : advance_recv(comm, operation, &moved);
            if (result) return result;
            if (operation->done) continue;
            *busy |= peer;
            if (!first) first = operation;
        }
        if (!first && !moved) return ncclSuccess;
        if (moved) {
            wait = begin_wait(comm);
            continue;
        }
        char what[128], whole[160];
        describe(&first->agreement, what, sizeof what);
        snprintf(whole, sizeof whole, "%s %s rank %d", what, first->agreement.kind == SEND ? "to" : "from", first->peer);
        ncclResult_t result = wait_more(comm, &wait, sending | receiving, whole);
        if (result) return result;
    }
}

// Without other ranks: as if each of them had this rank's data.
static void run_alone(ncclComm_t comm, const Operation *operation) {
    size_t own = own_bytes(operation);
    int kind = operation->agreement.kind;
    if (kind == SEND || kind == RECV || own == 0 || traffic(comm, &operation->agreement) > 64 << 20) return;
    size_t offset = kind == REDUCE_SCATTER || kind == SCATTER ? own * comm->rank : 0;
    if (kind == ALL_TO_ALL) memmove(operation->target, operation->source, own * comm->size);
    else if (kind == ALL_GATHER || (kind == GATHER && comm->rank == operation->agreement.root))
        for (int rank = 0; rank < comm->size; rank++) memmove(operation->target + rank * own, operation->source, own);
    else if (gives(comm, operation) && operation->target) memmove(operation->target, operation->source + offset, own);
}

ncclResult_t run_operations(ncclComm_t comm, Operation *operations, int num) {
    for (int index = 0; index < num; index++) {
        if (alone()) {
            run_alone(comm, &operations[index]);
        } else if (operations[index].agreement.kind < SEND) {
            ncclResult_t result = run_collective(comm, &operations[index]);
            if (result) return result;
        }
    }
    return alone() ? ncclSuccess : run_messages(comm, operations, num);
}
