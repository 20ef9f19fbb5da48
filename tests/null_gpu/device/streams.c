/* Streams and events: everything is done when a call returns, so they only keep the books. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct CUstream_st { int device, priority; };

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = malloc(sizeof **stream);
    **stream = (struct CUstream_st){current_device(), priority};
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

static bool is_default(cudaStream_t stream) { return (uintptr_t)stream <= 2; }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = is_default(stream) ? 0 : stream->priority;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *of) {
    *of = is_default(stream) ? current_device() : stream->device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaDeviceSynchronize(); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                            size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    call(data);
    return cudaSuccess;
}

/* Events: the time of the host when they are recorded. */

struct CUevent_st { unsigned flags; bool is_recorded; struct timespec when; };

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    event->is_recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaDeviceSynchronize(); }

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    if ((a->flags | b->flags) & cudaEventDisableTiming || !a->is_recorded || !b->is_recorded)
        return fail(cudaErrorInvalidResourceHandle);
    *ms = (float)(b->when.tv_sec - a->when.tv_sec) * 1e3f + (float)(b->when.tv_nsec - a->when.tv_nsec) * 1e-6f;
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    if (!(event->flags & cudaEventInterprocess))
        return fail(cudaErrorInvalidResourceHandle);
    memset(handle, 0, sizeof *handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    return cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventInterprocess);
}
