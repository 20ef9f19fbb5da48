/* Kernels: registered, checked as the hardware would, counted, skipped. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* While values are computed (computing.py), a kernel may run only for an operation that gets its values: anything else
 * would leave memory as it was. Products of cuBLAS count as kernels. */
static int num_computing;             /* modes that are entered, in all threads */
static __thread int num_with_values;  /* operations under way whose values are computed afterwards */
EXPORT void null_gpu_computing(int change) { __atomic_add_fetch(&num_computing, change, __ATOMIC_RELAXED); }
EXPORT void null_gpu_with_values(int change) { num_with_values += change; }

bool has_values(const char *kernel, const void *address) {
    Dl_info library = {0};
    char text[512];
    if (!num_computing || num_with_values)
        return true;
    if (address)
        dladdr(address, &library);
    snprintf(text, sizeof text, "%s of %s was launched outside of an operation whose values are computed",
             kernel ? kernel : library.dli_sname ? library.dli_sname : "a kernel", library.dli_fname ? library.dli_fname : "a module");
    refuse("launch", text);
    return false;
}

/* The handle of a kernel that was loaded at run time is its name. */
static const char *name_of(const void *function) { return function; }

/* CUDA's limits for a launch; anything else would be a kernel that fails. */
static cudaError_t launch(const char *name, const void *function, dim3 grid, dim3 block, size_t shared) {
    bool fits = grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.x <= 2147483647u && grid.y <= 65535 &&
                grid.z <= 65535 && block.z <= 64 && (uint64_t)block.x * block.y * block.z <= 1024 && shared <= 232448;
    if (!fits)
        return fail(cudaErrorInvalidConfiguration);
    if (!has_values(name, function))
        return cudaErrorNotSupported;
    COUNT(launches);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) { return launch(NULL, f, grid, block, shared); }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) { return launch(NULL, f, grid, block, shared); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) { return launch(NULL, f, grid, block, shared); }

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **a) {
    return launch(NULL, f, config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, CUstream stream, void **arguments, void **extra) {
    return (CUresult)launch(name_of(f), NULL, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, shared);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **arguments, void **extra) {
    return (CUresult)launch(name_of(f), NULL, (dim3){c->gridDimX, c->gridDimY, c->gridDimZ}, (dim3){c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes);
}

/* The <<<...>>> of a launch, kept between its two halves. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

/* Kernels that a library brings along. A kernel's handle is the address of its host function. */
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *registered[4];
    return registered;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t size, int constant, int global) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) { return __cudaGetKernel(kernel, function); }

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 90;
    a->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncSetCacheConfig(const void *function, enum cudaFuncCache wanted) { return cudaSuccess; }
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int value, int of) { return cudaSuccess; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int size, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *f, const cudaLaunchConfig_t *config) {
    *clusters = 2;
    return cudaSuccess;
}

/* Kernels that are compiled or loaded at run time. */

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values, unsigned n,
                                       enum cudaLibraryOption *library_options, void **library_values, unsigned m) {
    *library = malloc(1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (cudaKernel_t)strdup(name);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = malloc(1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
