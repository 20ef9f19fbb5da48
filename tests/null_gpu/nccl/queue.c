// Runs calls in order, one thread per communicator, and makes CUDA streams and events wait for them.
//
// The null device computes at once, so a call on torch's current stream has to be finished when it returns. A call on
// any other stream goes on by itself until something waits for it: an event recorded behind it, a synchronisation, or
// work on the same stream. The CUDA functions for that are defined here, before those of the device (RTLD_NEXT).
#include "null_nccl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FAILURES 256

// A place in a stream: behind the calls up to a ticket. For an event, or a call that has failed.
typedef struct {
    cudaEvent_t event;
    cudaStream_t stream;
    uint64_t ticket;
} Mark;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static Task *pending;
static uint64_t last_ticket;
static Mark *marks, failures[MAX_FAILURES];
static char first_failure[MESSAGE_BYTES];
static int num_marks, room_for_marks, num_failures;
static _Atomic int num_busy;  // pending calls and failures: nothing to wait for while it is 0

static void forget_pending(Task *task) {
    for (Task **link = &pending; *link; link = &(*link)->next_pending)
        if (*link == task) {
            *link = task->next_pending;
            break;
        }
    atomic_fetch_sub(&num_busy, 1);
}

static void free_task(Task *task) {
    free(task->operations);
    free(task);
}

static void *work(void *argument) {
    ncclComm_t comm = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!comm->first && !comm->closing) pthread_cond_wait(&comm->filled, &lock);
        Task *task = comm->first;
        if (!task) break;
        pthread_mutex_unlock(&lock);
        ncclResult_t result = atomic_load(&comm->error);
        if (!result) result = run_operations(comm, task->operations, task->num_operations);
        pthread_mutex_lock(&lock);
        comm->first = task->next;
        if (result) atomic_store(&comm->error, result);
        if (result && !task->synchronous) {
            if (!num_failures) snprintf(first_failure, sizeof first_failure, "%s", comm->message);
            failures[num_failures < MAX_FAILURES ? num_failures++ : MAX_FAILURES - 1] = (Mark){NULL, task->stream, task->ticket};
            atomic_fetch_add(&num_busy, 1);
        }
        forget_pending(task);
        task->result = result;
        task->done = true;
        if (!task->synchronous) free_task(task);
        pthread_cond_broadcast(&finished);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

// torch's current stream of the calling thread; the default stream in a program without torch.
static cudaStream_t current_stream(void) {
    typedef struct {
        int64_t device, id;
    } Stream;  // c10::cuda::CUDAStream
    static Stream (*get)(int8_t);
    static cudaStream_t (*handle)(const Stream *);
    if (!get) {
        void *library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!library) return NULL;
        handle = dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
        get = dlsym(library, "_ZN3c104cuda20getCurrentCUDAStreamEa");
        if (!get || !handle) {
            fprintf(stderr, "null NCCL: this torch has another way to ask for the current CUDA stream\n");
            abort();
        }
    }
    Stream stream = get(-1);
    return handle(&stream);
}

// Queue the calls of a group; ``finish`` has to follow.
ncclResult_t submit(Task *task, bool *synchronous) {
    ncclComm_t comm = task->comm;
    *synchronous = task->synchronous = task->stream == current_stream();
    pthread_mutex_lock(&lock);
    if (!comm->has_worker) {
        pthread_cond_init(&comm->filled, NULL);
        comm->has_worker = pthread_create(&comm->worker, NULL, work, comm) == 0;
    }
    if (!comm->has_worker) {
        pthread_mutex_unlock(&lock);
        return fail(comm, ncclSystemError, "no thread for the communicator");
    }
    task->ticket = ++last_ticket;
    task->next_pending = pending;
    pending = task;
    atomic_fetch_add(&num_busy, 1);
    if (comm->first) comm->last->next = task;
    else comm->first = task;
    comm->last = task;
    pthread_cond_signal(&comm->filled);
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

// The result of a call on the current stream. Others report theirs to whatever waits for them.
ncclResult_t finish(Task *task, bool synchronous) {
    if (!synchronous) return ncclSuccess;
    pthread_mutex_lock(&lock);
    while (!task->done) pthread_cond_wait(&finished, &lock);
    ncclResult_t result = task->result;
    pthread_mutex_unlock(&lock);
    if (result) repeat_message(task->comm);
    free_task(task);
    return result;
}

void drain(ncclComm_t comm) {
    pthread_mutex_lock(&lock);
    while (comm->first) pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
}

void stop_worker(ncclComm_t comm) {
    if (!comm->has_worker) return;
    pthread_mutex_lock(&lock);
    comm->closing = true;
    pthread_cond_signal(&comm->filled);
    pthread_mutex_unlock(&lock);
    pthread_join(comm->worker, NULL);
    comm->has_worker = false;
}

// Whether calls on a stream (on any, if all) up to a ticket are under way; *failed: whether one has failed.
static bool under_way(cudaStream_t stream, bool all, uint64_t ticket, bool *failed) {
    for (int index = 0; index < num_failures; index++)
        if ((all || failures[index].stream == stream) && failures[index].ticket <= ticket) *failed = true;
    for (Task *task = pending; task; task = task->next_pending)
        if ((all || task->stream == stream) && task->ticket <= ticket) return true;
    return false;
}

static cudaError_t wait_for(cudaStream_t stream, bool all, uint64_t ticket) {
    if (!atomic_load(&num_busy)) return cudaSuccess;
    bool failed = false;
    pthread_mutex_lock(&lock);
    while (under_way(stream, all, ticket, &failed)) pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

static cudaError_t ask(cudaStream_t stream, uint64_t ticket) {
    bool failed = false;
    pthread_mutex_lock(&lock);
    bool busy = under_way(stream, false, ticket, &failed);
    pthread_mutex_unlock(&lock);
    return busy ? cudaErrorNotReady : cudaSuccess;
}

static Mark mark_of(cudaEvent_t event) {
    Mark found = {event, NULL, 0};
    pthread_mutex_lock(&lock);
    for (int index = 0; index < num_marks; index++)
        if (marks[index].event == event) found = marks[index];
    pthread_mutex_unlock(&lock);
    return found;
}

static void record(cudaEvent_t event, cudaStream_t stream) {
    bool failed = false;
    pthread_mutex_lock(&lock);
    int kept = 0;
    for (int index = 0; index < num_marks; index++)  // forget what the event stood for, and what is over
        if (marks[index].event != event && (under_way(marks[index].stream, false, marks[index].ticket, &failed) || num_failures))
            marks[kept++] = marks[index];
    num_marks = kept;
    if (under_way(stream, false, last_ticket, &failed) || num_failures) {
        if (num_marks == room_for_marks) marks = realloc(marks, (room_for_marks = 2 * room_for_marks + 64) * sizeof *marks);
        marks[num_marks++] = (Mark){event, stream, last_ticket};
    }
    pthread_mutex_unlock(&lock);
}

static void *device_function(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found) return found;
    fprintf(stderr, "null NCCL: no %s behind it; preload it before the null device\n", name);
    abort();
}

// A function of the CUDA runtime that first does BEFORE.
#define IN_FRONT_OF(NAME, PARAMETERS, ARGUMENTS, BEFORE)               \
    EXPORT cudaError_t NAME PARAMETERS {                               \
        static cudaError_t(*device) PARAMETERS;                        \
        if (!device) device = device_function(#NAME);                  \
        cudaError_t result = cudaSuccess;                              \
        BEFORE;                                                        \
        return result ? result : device ARGUMENTS;                     \
    }
#define WAIT_FOR_STREAM result = wait_for(stream, false, UINT64_MAX)
#define WAIT_FOR_ALL result = wait_for(NULL, true, UINT64_MAX)
#define WAIT_FOR_EVENT                                                 \
    if (num_marks) {                                                   \
        Mark mark = mark_of(event);                                    \
        result = wait_for(mark.stream, false, mark.ticket);            \
    }
#define ASK_EVENT                                                      \
    if (num_marks) {                                                   \
        Mark mark = mark_of(event);                                    \
        result = ask(mark.stream, mark.ticket);                        \
    }

#undef cudaEventRecord
IN_FRONT_OF(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream), record(event, stream))
IN_FRONT_OF(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned flags), (event, stream, flags), record(event, stream))
IN_FRONT_OF(cudaEventQuery, (cudaEvent_t event), (event), ASK_EVENT)
IN_FRONT_OF(cudaEventSynchronize, (cudaEvent_t event), (event), WAIT_FOR_EVENT)
IN_FRONT_OF(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), (stream, event, flags), WAIT_FOR_EVENT)
IN_FRONT_OF(cudaStreamQuery, (cudaStream_t stream), (stream), result = ask(stream, UINT64_MAX))
IN_FRONT_OF(cudaStreamSynchronize, (cudaStream_t stream), (stream), WAIT_FOR_STREAM)
IN_FRONT_OF(cudaDeviceSynchronize, (void), (), WAIT_FOR_ALL)
IN_FRONT_OF(cudaFree, (void *memory), (memory), WAIT_FOR_ALL)
IN_FRONT_OF(cudaMemcpyAsync, (void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream), (to, from, size, kind, stream), WAIT_FOR_STREAM)
IN_FRONT_OF(cudaMemsetAsync, (void *to, int value, size_t size, cudaStream_t stream), (to, value, size, stream), WAIT_FOR_STREAM)
IN_FRONT_OF(cudaLaunchKernel, (const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream), (kernel, grid, block, arguments, shared, stream), WAIT_FOR_STREAM)

// A call that has failed is reported as CUDA reports a failed kernel, by whatever waits for it.
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    static const char *(*device)(cudaError_t);
    if (!device) device = device_function("cudaGetErrorString");
    return error == cudaErrorLaunchFailure && num_failures ? first_failure : device(error);
}

// What is in front of the device is in front of it for the whole process.
ncclResult_t check_preload_order(void) {
    if (dlsym(RTLD_DEFAULT, "cudaStreamWaitEvent") == (void *)cudaStreamWaitEvent) return ncclSuccess;
    return fail(NULL, ncclSystemError, "preload the null NCCL before the null device, or nothing waits for its calls");
}
