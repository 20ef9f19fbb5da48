// NCCL between processes of one machine, for torch's real ProcessGroupNCCL on the null CUDA device.
//
//   shared.c        the memory that the ranks of a communicator share, waiting for each other, barriers
//   communicator.c  creation, splitting, abortion and errors of communicators
//   calls.c         collective calls, sends, receives and groups of them: checked, counted, given to the queue
//   queue.c         one thread per communicator runs its calls in order; CUDA streams and events wait for them
//   transfer.c      moves the data of a call through the shared memory
//   reduce.c        data types and reductions
//   counters.c      calls and bytes by kind, communicator and peer
//
// Environment: NULL_NCCL_TIMEOUT_S (default 300), after which a rank stops waiting for another. NULL_NCCL_ALONE=1: the
// other ranks do not exist; calls are checked and counted, and only this rank's own share moves.
#ifndef NULL_NCCL_H
#define NULL_NCCL_H
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_RANKS 64
#define AREA_BYTES (256 << 10)    // what one rank lays down in one round of a collective call
#define CHANNEL_BYTES (64 << 10)  // what a send has under way at a time
#define MAX_SCALED 64             // reductions with a factor per communicator
#define MESSAGE_BYTES 512
#define EXPORT __attribute__((visibility("default")))

typedef enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV, NUM_KINDS } Kind;

// What every rank has to agree on in a collective call.
typedef struct {
    int32_t kind, type, op, root;
    uint64_t count;
} Agreement;

typedef struct {
    _Atomic int32_t process, aborted, left;
    _Atomic uint64_t phase;  // barriers that the rank has reached
    uint64_t started;        // start time of the process: its number may be given again
    char device[32];
    int32_t color, key;
    Agreement agreement;
    char area[AREA_BYTES];
} SharedRank;

// From one rank to another: at most one piece under way.
typedef struct {
    _Atomic uint64_t written, read;
    _Atomic int32_t refused;
    Agreement sent, wanted;
    uint64_t piece;
    char data[CHANNEL_BYTES];
} Channel;

typedef struct {
    _Atomic int32_t size;
    _Atomic uint32_t bell;  // a futex; rung whenever a rank has done something another may wait for
    SharedRank ranks[];     // [size], then Channel [size * size]
} Shared;

typedef struct {
    double factor;
    int type;
} Scaled;

typedef struct Task Task;

struct ncclComm {
    Shared *shared;
    size_t shared_bytes;
    int rank, size, device, row, num_scaled;
    uint64_t phase, splits;
    char id[NCCL_UNIQUE_ID_BYTES], name[96], message[MESSAGE_BYTES];
    Scaled scaled[MAX_SCALED];
    _Atomic int error;  // ncclResult_t
    _Atomic bool aborted;
    pthread_t worker;
    bool has_worker, closing;
    Task *first, *last;
    pthread_cond_t filled;
};

typedef struct {
    Agreement agreement;
    const char *source;
    char *target;
    int peer;
    // progress of a send or receive
    bool begun, done;
    uint64_t moved;
} Operation;

// Calls of one group on one communicator, or one call alone.
struct Task {
    ncclComm_t comm;
    cudaStream_t stream;
    uint64_t ticket;
    int num_operations;
    Operation *operations;
    bool synchronous, done;
    ncclResult_t result;
    Task *next, *next_pending;
};

// A wait for other ranks: while (!reached) { if ((result = wait_more(...))) return result; }
typedef struct {
    uint32_t seen;
    double since;
} Wait;

// shared.c
bool alone(void);
ncclResult_t join(ncclComm_t comm);
void leave(ncclComm_t comm);
void ring(ncclComm_t comm);
Wait begin_wait(ncclComm_t comm);
ncclResult_t wait_more(ncclComm_t comm, Wait *wait, uint64_t waited_for, const char *what);
ncclResult_t barrier(ncclComm_t comm, const char *what);
Channel *channel(ncclComm_t comm, int from, int to);

// communicator.c
ncclResult_t fail(ncclComm_t comm, ncclResult_t result, const char *format, ...) __attribute__((format(printf, 3, 4)));
void repeat_message(ncclComm_t comm);

// queue.c
ncclResult_t submit(Task *task, bool *synchronous);
ncclResult_t finish(Task *task, bool synchronous);
void drain(ncclComm_t comm);
void stop_worker(ncclComm_t comm);
ncclResult_t check_preload_order(void);

// transfer.c
ncclResult_t run_operations(ncclComm_t comm, Operation *operations, int num);
const char *describe(const Agreement *agreement, char *text, size_t size);

// reduce.c
size_t type_size(int type);
const char *type_name(int type);
bool reducible(int type);
double scalar_of(const void *value, int type);
void reduce(void *target, const void *const *sources, int num, size_t count, int type, int op, const Scaled *scaled);

// counters.c
const char *kind_name(int kind);
int add_row(const char *name, const char *id, int size);
void count(ncclComm_t comm, const Operation *operation);
size_t traffic(ncclComm_t comm, const Agreement *agreement);
#endif
