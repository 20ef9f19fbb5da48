/* A CUDA device that computes nothing, for tests of code that needs a GPU on machines without one.
 *
 * The object built from these files stands for libcuda, libcudart, libcublas, libcublasLt and libnvidia-ml at once, and
 * is loaded before them (LD_PRELOAD). Device memory is a sparse file of the process, mapped into a range of addresses of
 * its own; copies move bytes; kernels and matrix products are checked, counted and skipped. Everything is done when a
 * call returns, so streams and events only keep the books. Functions that are not here fail and say their name
 * (the script `build` makes those).
 *
 *   memory.c    allocations                    copies.c   copies, fills, pinned memory
 *   sharing.c   CUDA IPC, the cuMem* functions  streams.c  streams and events
 *   runtime.c   devices, errors, counters      launches.c kernels: checked, counted, skipped
 *   driver.c    the driver's functions         cublas.c   handles and skipped products
 *   nvml.c      what torch asks the management library
 *
 * Environment: NULL_GPU_DEVICES (1 of them, at most 8), NULL_GPU_GB (79.1 GiB each), CUDA_VISIBLE_DEVICES (numbers).
 */
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 8

/* What null_gpu_counters() points to; tests/null_gpu/computing.py reads it by position. */
struct counters {
    uint64_t launches, synchronizations, host_to_device, device_to_host, device_to_device, pageable;
};
extern struct counters counters;
#define COUNT(field) __atomic_add_fetch(&counters.field, 1, __ATOMIC_RELAXED)

/* Say on stderr that NAME cannot be done here; the codes of CUDA's "not supported". */
cudaError_t refuse(const char *name, const char *why);
/* Keep an error for cudaGetLastError, and return it. */
cudaError_t fail(cudaError_t error);

/* Whether what this kernel leaves out is computed otherwise; refuses it if not. */
bool has_values(const char *kernel, const void *address);

int num_machine_devices(void);      /* of the machine; a number among these is called physical */
int num_devices(void);              /* that CUDA_VISIBLE_DEVICES leaves */
int physical_device(int device);    /* of a visible one */
int visible_device(int physical);   /* its number for this process, or -1 */
int current_device(void);
size_t device_bytes(void);
size_t free_bytes(int device);

/* memory.c */
struct block { /* one allocation */
    uint64_t offset, size;
    int device;
    int references; /* of cuMem* handles and their mappings; 1 for cudaMalloc */
    bool is_physical; /* made by cuMemCreate: reached through mappings only */
};
#define MEMORY_BASE 0x200000000000ull /* allocations of device d begin at MEMORY_BASE + d * DEVICE_SPAN */
#define DEVICE_SPAN (1ull << 40)
#define MAPPED_BASE 0x300000000000ull /* addresses reserved by cuMemAddressReserve or opened from other processes */
#define MAPPED_SPAN (1ull << 43)
#define GRANULE (2ull << 20)

int memory_file(void);
void lock_memory(void);
void unlock_memory(void);
struct block *allocate_block(size_t size, int device); /* with the lock held; NULL: out of memory */
void release_block(struct block *block);               /* with the lock held */
struct block *block_at(uint64_t offset);               /* the live block that contains this offset */
void punch_hole(uint64_t offset, uint64_t size);       /* zero this part of the file, and free its memory */
bool in_memory(uint64_t address);                      /* in the range of cudaMalloc's addresses */
bool is_device_pointer(const void *address);
/* The device of live memory [address, address + size), or -1. */
int device_of(const void *address, size_t size);
bool is_pinned(const void *address);

/* sharing.c */
int mapped_device_of(uint64_t address, size_t size);                 /* in the range of mapped addresses */
struct block *mapped_block(uint64_t address, uint64_t *start);       /* what is mapped there, and from which address */
