/* Devices, errors and counters: what torch and Transformer Engine call of the CUDA runtime. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct counters counters;
EXPORT struct counters *null_gpu_counters(void) { return &counters; }

static __thread int device;
static __thread cudaError_t last_error;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t refuse(const char *name, const char *why) {
    fprintf(stderr, "null GPU: %s: %s\n", name, why);
    return fail(cudaErrorNotSupported);
}

/* Devices. */

static const char NAME[] = "NVIDIA H100 80GB HBM3 (null)";

static int visible_devices[MAX_DEVICES], num_visible = -1;

int num_machine_devices(void) {
    const char *wanted = getenv("NULL_GPU_DEVICES");
    int all = wanted ? atoi(wanted) : 1;
    return all < 0 ? 0 : all > MAX_DEVICES ? MAX_DEVICES : all;
}

int num_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int all = num_machine_devices(), found = 0;
    if (num_visible >= 0)
        return num_visible;
    for (; !visible && found < all; found++)
        visible_devices[found] = found;
    for (char *end; visible && found < MAX_DEVICES; visible = *end == ',' ? end + 1 : NULL) {
        long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= all)
            break;
        visible_devices[found++] = (int)number;
    }
    return num_visible = found;
}

int physical_device(int of) { return of >= 0 && of < num_devices() ? visible_devices[of] : -1; }

int visible_device(int physical) {
    for (int i = 0; i < num_devices(); i++)
        if (visible_devices[i] == physical)
            return i;
    return -1;
}

size_t device_bytes(void) {
    const char *gib = getenv("NULL_GPU_GB");
    size_t bytes = (size_t)((gib ? atof(gib) : 79.1) * (double)(1ull << 30));
    return bytes < DEVICE_SPAN ? bytes : DEVICE_SPAN;
}

int current_device(void) { return device; }

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_devices();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int *found) {
    *found = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int wanted) {
    if (wanted < 0 || wanted >= num_devices())
        return fail(cudaErrorInvalidDevice);
    device = wanted;
    return cudaSuccess;
}

/* Of an H100 with 80 GB (SXM5). */
int device_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case cudaDevAttrUnifiedAddressing: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    default: return 0; /* an ability that this device lacks */
    }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int of) {
    *value = device_attribute(attribute);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int of) {
    if (of < 0 || of >= num_devices())
        return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, NAME);
    p->uuid.bytes[15] = (char)(physical_device(of) + 1);
    p->totalGlobalMem = device_bytes();
    p->sharedMemPerBlock = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->sharedMemPerBlockOptin = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->sharedMemPerMultiprocessor = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 9;
    p->textureAlignment = 512;
    p->multiProcessorCount = 132;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->l2CacheSize = 52428800;
    p->memoryBusWidth = 5120;
    p->pciBusID = physical_device(of) + 1;
    p->asyncEngineCount = 3;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int of) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", physical_device(of) + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    COUNT(synchronizations);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
    *can = a != b;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) { return cudaSuccess; }

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* Errors. */

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

static const struct { cudaError_t error; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the null GPU (stderr says which)"},
};

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].name;
    return "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].text;
    return "unrecognized error code";
}

/* Memory pools of cudaMallocAsync: the books are empty. */

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int of) {
    *pool = (cudaMemPool_t)8;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t n) { return cudaSuccess; }
