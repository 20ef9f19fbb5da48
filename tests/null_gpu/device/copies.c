/* Copies and fills, which are real, and pinned host memory, which they are faster from. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SMALL (64ull << 10) /* from here on copies and fills leave holes of the file as holes */
#define MAX_PINNED 65536

/* Where these bytes lie in the file, or -1 if they are of another process; *rest: how many follow there. */
static int64_t file_offset(const void *pointer, uint64_t *rest) {
    uint64_t address = (uint64_t)pointer, start;
    lock_memory();
    struct block *block = in_memory(address) ? block_at(address - MEMORY_BASE) : mapped_block(address, &start);
    if (in_memory(address))
        start = MEMORY_BASE + (block ? block->offset : 0);
    int64_t offset = block ? (int64_t)(block->offset + (address - start)) : -1;
    *rest = block ? block->size - (address - start) : 0;
    unlock_memory();
    return offset;
}

/* Zero SIZE bytes; whole pages become holes. */
static void clear(void *pointer, size_t size) {
    for (uint64_t rest; size; size -= rest, pointer = (char *)pointer + rest) {
        int64_t offset = file_offset(pointer, &rest);
        rest = offset < 0 || rest > size ? size : rest;
        if (offset < 0 || rest < SMALL)
            memset(pointer, 0, rest);
        else
            punch_hole((uint64_t)offset, rest); /* the kernel zeroes what is no whole page */
    }
}

/* A copy within the device that does not fill holes of the file. */
static void copy_sparse(char *to, const char *from, size_t size) {
    for (size_t n; size; size -= n, to += n, from += n) {
        uint64_t rest, room;
        int64_t offset = file_offset(from, &rest), target = file_offset(to, &room);
        n = size < GRANULE ? size : GRANULE;
        if (offset >= 0 && target >= 0) {
            n = n < rest ? n : rest;
            n = n < room ? n : room;
            off_t data = lseek(memory_file(), offset, SEEK_DATA);
            if (data < 0 || (uint64_t)data >= (uint64_t)offset + n) {
                punch_hole((uint64_t)target, n);
                continue;
            }
        }
        memmove(to, from, n);
    }
}

static cudaError_t copy(void *to, const void *from, size_t size) {
    bool into = is_device_pointer(to), out_of = is_device_pointer(from);
    if (!size)
        return cudaSuccess;
    if ((into && device_of(to, size) < 0) || (out_of && device_of(from, size) < 0)) {
        fprintf(stderr, "null GPU: copy of %zu bytes from %p to %p: not within one allocation\n", size, from, to);
        return fail(cudaErrorIllegalAddress);
    }
    if (into && out_of)
        COUNT(device_to_device);
    else if (into)
        COUNT(host_to_device);
    else if (out_of)
        COUNT(device_to_host);
    if ((into && !out_of && !is_pinned(from)) || (out_of && !into && !is_pinned(to)))
        COUNT(pageable);
    if (into && out_of && size >= SMALL)
        copy_sparse(to, from, size);
    else
        memmove(to, from, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    COUNT(synchronizations);
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) {
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t s) {
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return error;
}

EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t size) {
    if (size && device_of(pointer, size) < 0)
        return fail(cudaErrorIllegalAddress);
    if (value == 0 && size >= SMALL)
        clear(pointer, size);
    else
        memset(pointer, value, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    return cudaMemset(pointer, value, size);
}

/* Constants of kernels: nobody reads them, as no kernel runs. */
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static void *constants;
    if (!constants && cudaMalloc(&constants, GRANULE))
        return fail(cudaErrorMemoryAllocation);
    *pointer = constants;
    return cudaSuccess;
}

/* Pinned host memory. */

static struct range { uint64_t start, size; } pinned[MAX_PINNED];
static int num_pinned;

static cudaError_t pin(void *pointer, size_t size) {
    lock_memory();
    bool fits = num_pinned < MAX_PINNED;
    if (fits)
        pinned[num_pinned++] = (struct range){(uint64_t)pointer, size};
    unlock_memory();
    return fits ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

static cudaError_t unpin(void *pointer) {
    cudaError_t error = cudaErrorHostMemoryNotRegistered;
    lock_memory();
    for (int i = 0; i < num_pinned && error; i++)
        if (pinned[i].start == (uint64_t)pointer) {
            pinned[i] = pinned[--num_pinned];
            error = cudaSuccess;
        }
    unlock_memory();
    return error ? fail(error) : error;
}

bool is_pinned(const void *pointer) {
    bool found = false;
    lock_memory();
    for (int i = 0; i < num_pinned && !found; i++)
        found = (uint64_t)pointer - pinned[i].start < pinned[i].size;
    unlock_memory();
    return found;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = NULL;
    if (posix_memalign(pointer, 4096, size ? size : 1))
        return fail(cudaErrorMemoryAllocation);
    return pin(*pointer, size);
}

EXPORT cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

EXPORT cudaError_t cudaFreeHost(void *pointer) {
    cudaError_t error = pointer ? unpin(pointer) : cudaSuccess;
    if (!error)
        free(pointer);
    return error;
}

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    return is_pinned(pointer) ? fail(cudaErrorHostMemoryAlreadyRegistered) : pin(pointer, size);
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) { return unpin(pointer); }

EXPORT cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned flags) {
    *device_pointer = pointer;
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    int device = is_device_pointer(pointer) ? device_of(pointer, 1) : -1;
    attributes->device = device >= 0 ? device : -2;
    if (device >= 0) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
    } else {
        attributes->type = is_pinned(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        attributes->hostPointer = (void *)pointer;
        attributes->devicePointer = is_pinned(pointer) ? (void *)pointer : NULL;
    }
    return cudaSuccess;
}
