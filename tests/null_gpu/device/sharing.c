/* Memory at addresses of choice (cuMem*, torch's expandable segments) and memory of other processes (CUDA IPC). */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_MAPPINGS 65536

/* Memory as another process finds it: in file FILE of process PROCESS. The content of an IPC handle, and of the file
 * descriptor that cuMemExportToShareableHandle gives. */
struct shared_memory {
    char magic[8];
    int32_t process, file, device; /* the device's physical number */
    uint64_t offset, size;
};
static const char MAGIC[8] = "nullgpu";

struct CUmemGenericAllocation { /* what a CUmemGenericAllocationHandle points to */
    struct block *block;        /* of this process, or NULL */
    struct shared_memory where;
    int references;
};

static struct mapping {
    uint64_t start, size;
    struct CUmemGenericAllocation *memory;
    uint64_t offset; /* into that memory */
    int opened;      /* how often cudaIpcOpenMemHandle gave it; 0 for cuMemMap */
} mappings[MAX_MAPPINGS];
static int num_mappings;
static uint64_t next_address = MAPPED_BASE;

static struct mapping *mapping_at(uint64_t address) {
    for (int i = 0; i < num_mappings; i++)
        if (address - mappings[i].start < mappings[i].size)
            return &mappings[i];
    return NULL;
}

int mapped_device_of(uint64_t address, size_t size) {
    struct mapping *mapping = mapping_at(address);
    int device = mapping ? visible_device(mapping->memory->where.device) : -1;
    for (uint64_t end = address + size; mapping && mapping->start + mapping->size < end;)
        if (!(mapping = mapping_at(mapping->start + mapping->size)))
            device = -1;
    return device;
}

struct block *mapped_block(uint64_t address, uint64_t *start) {
    struct mapping *mapping = mapping_at(address);
    if (!mapping || !mapping->memory->block)
        return NULL;
    *start = mapping->start - mapping->offset;
    return mapping->memory->block;
}

static uint64_t reserve(uint64_t size) {
    memory_file();
    uint64_t address = next_address;
    size = (size + GRANULE - 1) / GRANULE * GRANULE;
    if (address + size > MAPPED_BASE + MAPPED_SPAN)
        return 0;
    next_address += size;
    return address;
}

static void drop(struct CUmemGenericAllocation *memory) {
    if (--memory->references == 0) {
        if (memory->block)
            release_block(memory->block);
        free(memory);
    }
}

/* Map part of MEMORY at ADDRESS, with the lock held. */
static CUresult map(uint64_t address, uint64_t size, uint64_t offset, struct CUmemGenericAllocation *memory) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", memory->where.process, memory->where.file);
    int file = memory->block ? memory_file() : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || num_mappings == MAX_MAPPINGS)
        return CUDA_ERROR_INVALID_HANDLE;
    void *at = mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file,
                    (off_t)(memory->where.offset + offset));
    if (!memory->block)
        close(file);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->references++;
    mappings[num_mappings++] = (struct mapping){address, size, memory, offset, 0};
    return CUDA_SUCCESS;
}

static void unmap(struct mapping *mapping) {
    mmap((void *)mapping->start, mapping->size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    drop(mapping->memory);
    *mapping = mappings[--num_mappings];
}

/* The driver's functions for virtual memory. */

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted, CUmemAllocationGranularity_flags option) {
    *size = GRANULE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    lock_memory();
    *address = reserve(size);
    unlock_memory();
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) { return CUDA_SUCCESS; /* 8 TiB are never used up */ }

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wanted, unsigned long long flags) {
    if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || size % GRANULE || wanted->location.id >= num_devices())
        return CUDA_ERROR_INVALID_VALUE;
    if (wanted->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED; /* fabric handles need NVLink switches */
    lock_memory();
    struct block *block = allocate_block(size, wanted->location.id);
    if (block) {
        block->is_physical = true;
        struct CUmemGenericAllocation *memory = malloc(sizeof *memory);
        struct shared_memory where = {.process = getpid(), .file = memory_file(), .device = physical_device(block->device),
                                      .offset = block->offset, .size = block->size};
        memcpy(where.magic, MAGIC, sizeof MAGIC);
        *memory = (struct CUmemGenericAllocation){block, where, 1};
        *handle = (CUmemGenericAllocationHandle)memory;
    }
    unlock_memory();
    return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    lock_memory();
    drop((struct CUmemGenericAllocation *)handle);
    unlock_memory();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct CUmemGenericAllocation *memory = (struct CUmemGenericAllocation *)handle;
    lock_memory();
    CUresult result = offset + size > memory->where.size || mapped_device_of(address, 1) >= 0
                          ? CUDA_ERROR_INVALID_VALUE
                          : map(address, size, offset, memory);
    unlock_memory();
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    lock_memory();
    for (int i = num_mappings - 1; i >= 0; i--)
        if (mappings[i].start >= address && mappings[i].start + mappings[i].size <= address + size)
            unmap(&mappings[i]);
    unlock_memory();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    return device_of((void *)address, size) < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    lock_memory();
    struct mapping *mapping = mapping_at((uint64_t)address);
    if (mapping) {
        mapping->memory->references++;
        *handle = (CUmemGenericAllocationHandle)mapping->memory;
    }
    unlock_memory();
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found, CUmemGenericAllocationHandle handle) {
    memset(found, 0, sizeof *found);
    found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    found->location.id = visible_device(((struct CUmemGenericAllocation *)handle)->where.device);
    found->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
    lock_memory();
    bool is_mapped = address >= MAPPED_BASE;
    struct mapping *mapping = is_mapped ? mapping_at(address) : NULL;
    struct block *block = is_mapped ? NULL : block_at(address - MEMORY_BASE);
    if (start && (mapping || block))
        *start = mapping ? mapping->start : MEMORY_BASE + block->offset;
    if (size && (mapping || block))
        *size = mapping ? mapping->size : block->size;
    unlock_memory();
    return mapping || block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    struct CUmemGenericAllocation *memory = (struct CUmemGenericAllocation *)handle;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    int file = memfd_create("null-gpu-shared", MFD_CLOEXEC);
    if (file < 0 || write(file, &memory->where, sizeof memory->where) != sizeof memory->where)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)descriptor = file;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, CUmemAllocationHandleType type) {
    struct shared_memory where;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        pread((int)(intptr_t)descriptor, &where, sizeof where, 0) != sizeof where || memcmp(where.magic, MAGIC, sizeof MAGIC))
        return CUDA_ERROR_INVALID_HANDLE;
    struct CUmemGenericAllocation *memory = malloc(sizeof *memory);
    *memory = (struct CUmemGenericAllocation){NULL, where, 1};
    *handle = (CUmemGenericAllocationHandle)memory;
    return CUDA_SUCCESS;
}

/* CUDA IPC of memory from cudaMalloc. */

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    struct shared_memory where = {.process = getpid(), .file = memory_file()};
    memcpy(where.magic, MAGIC, sizeof MAGIC);
    uint64_t offset = (uint64_t)pointer - MEMORY_BASE;
    lock_memory();
    struct block *block = (uint64_t)pointer < MAPPED_BASE ? block_at(offset) : NULL;
    bool is_known = block && !block->is_physical;
    if (is_known) {
        where.offset = block->offset;
        where.size = block->size;
        where.device = physical_device(block->device);
    }
    unlock_memory();
    if (!is_known)
        return fail(cudaErrorInvalidValue);
    _Static_assert(sizeof where <= sizeof *handle, "an IPC handle has 64 bytes");
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &where, sizeof where);
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    struct shared_memory where;
    memcpy(&where, &handle, sizeof where);
    if (memcmp(where.magic, MAGIC, sizeof MAGIC) || visible_device(where.device) < 0)
        return fail(cudaErrorInvalidResourceHandle);
    if (where.process == getpid())
        return fail(cudaErrorDeviceUninitialized); /* as CUDA says to the process that owns the memory */
    lock_memory();
    struct mapping *mapping = NULL;
    for (int i = 0; i < num_mappings && !mapping; i++)
        if (mappings[i].opened && !memcmp(&mappings[i].memory->where, &where, sizeof where))
            mapping = &mappings[i];
    if (!mapping) {
        struct CUmemGenericAllocation *memory = malloc(sizeof *memory);
        *memory = (struct CUmemGenericAllocation){NULL, where, 1};
        uint64_t address = reserve(where.size);
        if (address && !map(address, where.size, 0, memory))
            mapping = &mappings[num_mappings - 1];
        drop(memory);
    }
    if (mapping) {
        mapping->opened++;
        *pointer = (void *)mapping->start;
    }
    unlock_memory();
    return mapping ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    lock_memory();
    struct mapping *mapping = mapping_at((uint64_t)pointer);
    bool is_known = mapping && mapping->opened;
    if (is_known && --mapping->opened == 0)
        unmap(mapping);
    unlock_memory();
    return is_known ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}
