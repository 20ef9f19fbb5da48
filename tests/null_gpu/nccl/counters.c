// Calls and bytes by kind, by communicator, and by peer for sends and receives.
//
// A call's bytes are those of its larger buffer on this rank: AllGather counts what it receives, ReduceScatter and
// AlltoAll what they give, AllReduce, Broadcast, Reduce, Send and Recv their one buffer.
#include "null_nccl.h"

#include <stdio.h>
#include <string.h>

#define MAX_ROWS 4096
typedef struct {
    char name[96], id[32];
    int size;
    long calls[NUM_KINDS], bytes[NUM_KINDS], sent[MAX_RANKS], received[MAX_RANKS];
} Row;
static Row rows[MAX_ROWS];
static int num_rows;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *kind_name(int kind) {
    static const char *names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter", "Send", "Recv"};
    return names[kind];
}

int add_row(const char *name, const char *id, int size) {
    pthread_mutex_lock(&lock);
    int index = num_rows < MAX_ROWS ? num_rows++ : MAX_ROWS - 1;
    snprintf(rows[index].name, sizeof rows[index].name, "%s", name);
    snprintf(rows[index].id, sizeof rows[index].id, "%.31s", id);
    rows[index].size = size;
    pthread_mutex_unlock(&lock);
    return index;
}

size_t traffic(ncclComm_t comm, const Agreement *agreement) {
    bool wide = agreement->kind >= ALL_GATHER && agreement->kind <= SCATTER;
    return agreement->count * type_size(agreement->type) * (wide ? comm->size : 1);
}

void count(ncclComm_t comm, const Operation *operation) {
    int kind = operation->agreement.kind;
    long bytes = traffic(comm, &operation->agreement);
    pthread_mutex_lock(&lock);
    Row *row = &rows[comm->row];
    row->calls[kind]++;
    row->bytes[kind] += bytes;
    if (kind == SEND) row->sent[operation->peer] += bytes;
    if (kind == RECV) row->received[operation->peer] += bytes;
    pthread_mutex_unlock(&lock);
}

static long total(const char *kind, size_t field) {
    for (int index = 0; index < NUM_KINDS; index++) {
        if (strcmp(kind, kind_name(index))) continue;
        long sum = 0;
        for (int row = 0; row < num_rows; row++) sum += ((const long *)((const char *)&rows[row] + field))[index];
        return sum;
    }
    return -1;  // no such kind
}

EXPORT long null_nccl_calls(const char *kind) { return total(kind, offsetof(Row, calls)); }
EXPORT long null_nccl_bytes(const char *kind) { return total(kind, offsetof(Row, bytes)); }

EXPORT void null_nccl_reset(void) {
    pthread_mutex_lock(&lock);
    for (Row *row = rows; row < rows + num_rows; row++)
        memset(row->calls, 0, sizeof *row - offsetof(Row, calls));
    pthread_mutex_unlock(&lock);
}

// Lines "name id size kind peer calls bytes" separated by tabs (peer -1: all; then one line per peer, with calls -1).
// Returns the length needed, like snprintf.
EXPORT long null_nccl_table(char *text, long size) {
    long length = 0;
#define LINE(...) length += snprintf(length < size ? text + length : NULL, length < size ? size - length : 0, __VA_ARGS__)
    for (Row *row = rows; row < rows + num_rows; row++)
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            if (!row->calls[kind]) continue;
            LINE("%s\t%s\t%d\t%s\t-1\t%ld\t%ld\n", row->name, row->id, row->size, kind_name(kind), row->calls[kind], row->bytes[kind]);
            const long *peers = kind == SEND ? row->sent : kind == RECV ? row->received : NULL;
            for (int peer = 0; peers && peer < row->size; peer++)
                if (peers[peer]) LINE("%s\t%s\t%d\t%s\t%d\t-1\t%ld\n", row->name, row->id, row->size, kind_name(kind), peer, peers[peer]);
        }
    return length;
}
