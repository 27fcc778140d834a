/* Tuned GPU kernels as C functions, written by `schedsearch records export --c`.
 *
 * Every function returns SCHEDSEARCH_OK, one of the negative codes below, or a positive CUresult of the driver;
 * schedsearch_error_text says what any of them means. No function ends the process, prints, or waits for the GPU.
 * Kernels run in the calling thread's current context. Any number of threads may call at once. No function allocates memory.
 */
#ifndef SCHEDSEARCH_H
#define SCHEDSEARCH_H

#include <stddef.h>
#include <stdint.h>

typedef struct CUstream_st *CUstream; /* as in cuda.h; a cudaStream_t is the same. NULL is the default stream */

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SCHEDSEARCH_OK = 0,
    SCHEDSEARCH_NULL_POINTER = -1,  /* an array that the kernel reads or writes is NULL */
    SCHEDSEARCH_MISALIGNED = -2,    /* an array or workspace lacks the alignment that the description names */
    SCHEDSEARCH_NO_WORKSPACE = -3,  /* the kernel needs a workspace or prepared memory, and got NULL */
    SCHEDSEARCH_BAD_SCALAR = -4,    /* a scalar is not a number that the kernel takes */
    SCHEDSEARCH_NO_CONTEXT = -5,    /* the calling thread has no current CUDA context */
    SCHEDSEARCH_OTHER_CONTEXT = -6, /* the stream belongs to a context that is not the current one */
    SCHEDSEARCH_OTHER_GPU = -7,     /* the machine code does not run on the GPU of the current context */
    SCHEDSEARCH_OLD_DRIVER = -8,    /* the driver is older than CUDA 12.0 */
    SCHEDSEARCH_NOT_PREPARED = -9,  /* schedsearch_prepare for a kernel that repacks nothing */
    SCHEDSEARCH_NO_KERNEL = -10     /* the kernel is NULL, e.g. from a schedsearch_find that found none */
};

/* A number that a kernel takes at call time; which member counts is the dtype in the description. */
typedef union schedsearch_scalar {
    uint64_t bits;
    int64_t int64;
    uint64_t uint64;
    int32_t int32;
    uint32_t uint32;
    int16_t int16;
    uint16_t uint16;
    int8_t int8;
    uint8_t uint8;
    uint8_t boolean; /* 0 or 1 */
    float float32;
    double float64;
} schedsearch_scalar;

/* One kernel: what a function NAME of this export runs. */
typedef struct schedsearch_kernel {
    const char *name;        /* of the function */
    const char *workload_id; /* sha256 of `workload`, 64 hex digits */
    const char *workload;    /* what it computes: canonical JSON, as Workload.json of schedsearch */
    const char *description; /* JSON: arguments with shapes, dtypes and alignments, device, time, origin */
    size_t pointers;         /* how many arrays it takes: arguments, then outputs */
    const size_t *pointer_bytes; /* of each array, from its address to the end of its last element */
    size_t scalars;          /* how many scalars it takes */
    size_t workspace_bytes;  /* scratch memory on the device that a call needs, in a multiple of 256 bytes */
    size_t prepared_bytes;   /* memory that schedsearch_prepare fills; 0: the kernel repacks nothing */
    size_t prepared_workspace_bytes; /* scratch memory that a call with prepared memory needs */
    const struct schedsearch_code *code;
} schedsearch_kernel;

/* All kernels of this export; those of one workload stand together, the fastest first. */
extern const schedsearch_kernel *const schedsearch_kernels[];
extern const size_t schedsearch_kernel_count;

/* The kernel for a workload, which is given by its id or its canonical JSON; NULL if there is none.
 *
 * If there are several, for different GPUs, it is the fastest among those that run on the GPU of the current context.
 * Without a current context it is the first one.
 */
const schedsearch_kernel *schedsearch_find(const char *workload);

/* Enqueues a kernel, as NAME does with named arguments.
 *
 * pointers: kernel->pointers addresses on the device, in the order of the description.
 * scalars: kernel->scalars numbers; NULL if there are none.
 * workspace: kernel->workspace_bytes of memory on the device; NULL if that is 0. Calls that may run at the same time need
 *     workspaces of their own.
 */
int schedsearch_run(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers,
                    const schedsearch_scalar *scalars, void *workspace);

/* Enqueues the steps that only repack constant arguments (weights). Calls with the result leave these steps out.
 *
 * pointers: as above; only those of the constants count, the others may be NULL.
 * prepared: kernel->prepared_bytes of memory on the device.
 */
int schedsearch_prepare(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers, void *prepared);

/* As schedsearch_run, with memory that schedsearch_prepare has filled; repacked constants may be NULL. */
int schedsearch_run_prepared(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers,
                             const schedsearch_scalar *scalars, void *workspace, const void *prepared);

/* Loads the machine code into the current context. The first call there does that otherwise. Call it before a stream is
 * captured, because loading is not allowed then.
 */
int schedsearch_load(const schedsearch_kernel *kernel);

/* Unloads the machine code. No thread may use the kernel meanwhile, and no graph that has captured it afterwards. */
int schedsearch_unload(const schedsearch_kernel *kernel);

/* What a code means. Never NULL; valid for ever. */
const char *schedsearch_error_text(int code);

#ifdef __cplusplus
}
#endif

#endif
