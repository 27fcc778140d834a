/* Runs every kernel of an export once, on zeros, and prints what it took. See docs/c.md for how to build it. */
#include <stdio.h>
#include <stdlib.h>

#include "schedsearch_kernels.h"

/* What the program itself uses of the driver, as in cuda.h. */
int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t), cuMemsetD8_v2(uint64_t, unsigned char, size_t);
int cuStreamSynchronize(CUstream);

static void check(int code)
{
    if (code != SCHEDSEARCH_OK) {
        fprintf(stderr, "error %d: %s\n", code, schedsearch_error_text(code));
        exit(1);
    }
}

static void *allocate(size_t bytes)
{
    uint64_t address = 0;
    check(cuMemAlloc_v2(&address, bytes ? bytes : 1));
    check(cuMemsetD8_v2(address, 0, bytes));
    return (void *)(uintptr_t)address;
}

int main(void)
{
    int device;
    void *context;
    check(cuInit(0));
    check(cuDeviceGet(&device, 0));
    check(cuDevicePrimaryCtxRetain(&context, device));
    check(cuCtxSetCurrent(context));
    for (size_t n = 0; n < schedsearch_kernel_count; n++) {
        const schedsearch_kernel *kernel = schedsearch_kernels[n];
        schedsearch_scalar scalars[64] = {{0}};
        void *arrays[64], *workspace = allocate(kernel->workspace_bytes);
        for (size_t i = 0; i < kernel->pointers; i++)
            arrays[i] = allocate(kernel->pointer_bytes[i]);
        check(schedsearch_run(kernel, NULL, (const void *const *)arrays, scalars, workspace));
        check(cuStreamSynchronize(NULL));
        printf("%s: %zu arrays, %zu bytes of workspace\n", kernel->name, kernel->pointers, kernel->workspace_bytes);
        for (size_t i = 0; i < kernel->pointers; i++)
            check(cuMemFree_v2((uint64_t)(uintptr_t)arrays[i]));
        check(cuMemFree_v2((uint64_t)(uintptr_t)workspace));
    }
    return 0;
}
