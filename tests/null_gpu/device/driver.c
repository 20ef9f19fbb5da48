/* The driver's functions that torch and Transformer Engine ask for by name. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int device_attribute(int attribute);

static const CUcontext CONTEXT = (CUcontext)0x10; /* of every device; nobody looks into it */

EXPORT CUresult cuInit(unsigned flags) { return num_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = num_devices();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number >= 0 && number < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetName(char *text, int length, CUdevice device) {
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "%s", properties.name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = device_attribute((int)attribute);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = cudaGetErrorString((cudaError_t)result);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult result, const char **text) {
    *text = cudaGetErrorName((cudaError_t)result);
    return CUDA_SUCCESS;
}

/* The driver's own log is empty. */
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback call, void *data, CUlogsCallbackHandle *handle) { return CUDA_SUCCESS; }
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { return CUDA_SUCCESS; }

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    int device = device_of((void *)pointer, 1);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = CONTEXT; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)value = device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)value = device >= 0 && pointer < MAPPED_BASE;
        return CUDA_SUCCESS;
    default: return (CUresult)refuse("cuPointerGetAttribute", "this attribute is not known");
    }
}

/* The function NAME, or its later version, as the driver would answer; NULL if there is none. */
static void *find(const char *name) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, versioned);
    return found ? found : dlsym(RTLD_DEFAULT, name);
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    *function = find(name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, result);
}
