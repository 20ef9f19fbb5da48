/* Device memory: a sparse file, so that models of any size fit and other processes can map it. */
#define _GNU_SOURCE
#include "null_gpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_BLOCKS 65536

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct block *live[MAX_BLOCKS], *idle[MAX_BLOCKS];
static int num_live, num_idle;
static uint64_t top[MAX_DEVICES], used[MAX_DEVICES];
static int file = -1;

void lock_memory(void) { pthread_mutex_lock(&mutex); }
void unlock_memory(void) { pthread_mutex_unlock(&mutex); }

static void map_or_die(uint64_t address, uint64_t size, int protection, int flags, int descriptor) {
    void *wanted = (void *)address;
    if (mmap(wanted, size, protection, flags | MAP_NORESERVE | MAP_FIXED_NOREPLACE, descriptor, 0) != wanted) {
        perror("null GPU: cannot reserve addresses for device memory");
        abort();
    }
}

int memory_file(void) {
    if (file < 0) {
        file = memfd_create("null-gpu", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)(DEVICE_SPAN * MAX_DEVICES))) {
            perror("null GPU: cannot make the file of device memory");
            abort();
        }
        map_or_die(MEMORY_BASE, DEVICE_SPAN * MAX_DEVICES, PROT_READ | PROT_WRITE, MAP_SHARED, file);
        map_or_die(MAPPED_BASE, MAPPED_SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    }
    return file;
}

struct block *allocate_block(size_t size, int device) {
    size = size ? (size + GRANULE - 1) / GRANULE * GRANULE : GRANULE;
    memory_file();
    if (used[device] + size > device_bytes() || num_live == MAX_BLOCKS)
        return NULL;
    struct block *block = NULL;
    for (int i = 0; i < num_idle && !block; i++)
        if (idle[i]->size == size && idle[i]->device == device) {
            block = idle[i];
            idle[i] = idle[--num_idle];
        }
    if (!block) {
        if (top[device] + size > DEVICE_SPAN)
            return NULL; /* the next addresses are those of another device */
        block = malloc(sizeof *block);
        *block = (struct block){.offset = DEVICE_SPAN * (uint64_t)device + top[device], .size = size, .device = device};
        top[device] += size;
    }
    block->references = 1;
    block->is_physical = false;
    used[device] += size;
    return live[num_live++] = block;
}

void punch_hole(uint64_t offset, uint64_t size) {
    fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size);
}

void release_block(struct block *block) {
    for (int i = 0; i < num_live; i++)
        if (live[i] == block) {
            live[i] = live[--num_live];
            used[block->device] -= block->size;
            punch_hole(block->offset, block->size);
            idle[num_idle++] = block;
            return;
        }
}

struct block *block_at(uint64_t offset) {
    for (int i = 0; i < num_live; i++)
        if (offset >= live[i]->offset && offset < live[i]->offset + live[i]->size)
            return live[i];
    return NULL;
}

bool in_memory(uint64_t address) {
    return address >= MEMORY_BASE && address < MEMORY_BASE + DEVICE_SPAN * MAX_DEVICES;
}

bool is_device_pointer(const void *pointer) {
    uint64_t address = (uint64_t)pointer;
    return in_memory(address) || (address >= MAPPED_BASE && address < MAPPED_BASE + MAPPED_SPAN);
}

int device_of(const void *pointer, size_t size) {
    uint64_t address = (uint64_t)pointer;
    int device = -1;
    lock_memory();
    if (in_memory(address)) {
        struct block *block = block_at(address - MEMORY_BASE);
        if (block && !block->is_physical && address - MEMORY_BASE + size <= block->offset + block->size)
            device = block->device;
    } else if (is_device_pointer(pointer)) {
        device = mapped_device_of(address, size);
    }
    unlock_memory();
    return device;
}

size_t free_bytes(int device) {
    lock_memory();
    size_t bytes = device_bytes() - used[device];
    unlock_memory();
    return bytes;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
    lock_memory();
    struct block *block = allocate_block(size, current_device());
    unlock_memory();
    if (!block)
        return fail(cudaErrorMemoryAllocation);
    *pointer = (void *)(MEMORY_BASE + block->offset);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer) {
    if (!pointer)
        return cudaSuccess;
    uint64_t offset = (uint64_t)pointer - MEMORY_BASE;
    lock_memory();
    struct block *block = in_memory((uint64_t)pointer) ? block_at(offset) : NULL;
    bool is_known = block && block->offset == offset && !block->is_physical;
    if (is_known)
        release_block(block);
    unlock_memory();
    return is_known ? cudaSuccess : fail(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = device_bytes();
    *free = free_bytes(current_device());
    return cudaSuccess;
}
