/* All devices of the machine, whatever CUDA_VISIBLE_DEVICES says. What torch asks NVIDIA's management library: how many devices, which, and who uses them. */
#include "null_gpu.h"
#include <stdio.h>

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3 };
typedef intptr_t nvml_device; /* number + 1 */
struct nvml_memory { unsigned long long total, free, used; };

EXPORT int nvmlInit_v2(void) { return NVML_SUCCESS; }
EXPORT int nvmlInit(void) { return NVML_SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return NVML_SUCCESS; }
EXPORT int nvmlShutdown(void) { return NVML_SUCCESS; }
EXPORT const char *nvmlErrorString(int error) { return error == NVML_NOT_SUPPORTED ? "Not Supported" : error ? "Invalid Argument" : "Success"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)num_machine_devices();
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned number, nvml_device *device) {
    *device = (nvml_device)number + 1;
    return (int)number < num_machine_devices() ? NVML_SUCCESS : NVML_INVALID;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvml_device *device) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || !number)
        return NVML_INVALID;
    return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}

EXPORT int nvmlDeviceGetUUID(nvml_device device, char *text, unsigned length) {
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012x", (unsigned)device);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetName(nvml_device device, char *text, unsigned length) {
    return cuDeviceGetName(text, (int)length, 0) ? NVML_INVALID : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(nvml_device device, int *major, int *minor) {
    cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, (CUdevice)device - 1);
    cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, (CUdevice)device - 1);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory) {
    memory->total = device_bytes();
    int visible = visible_device((int)device - 1);
    memory->free = visible < 0 ? memory->total : free_bytes(visible);
    memory->used = memory->total - memory->free;
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "580.0 (null)");
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cudaDriverGetVersion(version); }

EXPORT int nvmlDeviceGetComputeRunningProcesses(nvml_device device, unsigned *count, void *processes) {
    *count = 0;
    return NVML_SUCCESS;
}

/* There is no fabric between these devices. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(nvml_device device, void *information) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(nvml_device device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_device device, unsigned link, void *bus) { return NVML_NOT_SUPPORTED; }
