/* The part of the CUDA driver API that the runtime calls, declared here so that no CUDA toolkit is needed to compile.
 *
 * Names, values and layouts are those of cuda.h of CUDA 12.4 and later; they are part of libcuda's ABI.
 */
#ifndef SCHEDSEARCH_DRIVER_H
#define SCHEDSEARCH_DRIVER_H

#include "schedsearch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0
};

typedef struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ;
    unsigned blockDimX, blockDimY, blockDimZ;
    unsigned sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

/* cuda.h of CUDA 12 aligns it to 64 bytes, that of CUDA 13 to 128. */
#if defined(__cplusplus)
typedef struct alignas(128) CUtensorMap { uint64_t opaque[16]; } CUtensorMap;
#else
typedef struct CUtensorMap { _Alignas(128) uint64_t opaque[16]; } CUtensorMap;
#endif

/* Since CUDA 12.0. They are weak, so that a program starts with an older driver too and gets SCHEDSEARCH_OLD_DRIVER. */
#define SCHEDSEARCH_SINCE_12 __attribute__((weak))

CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit_options, void **jit_values, unsigned jit_count,
                           int *options, void **values, unsigned count) SCHEDSEARCH_SINCE_12;
CUresult cuLibraryUnload(CUlibrary library) SCHEDSEARCH_SINCE_12;
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) SCHEDSEARCH_SINCE_12;
CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) SCHEDSEARCH_SINCE_12;
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) SCHEDSEARCH_SINCE_12;
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) SCHEDSEARCH_SINCE_12;
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) SCHEDSEARCH_SINCE_12;
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                                const uint64_t *strides_bytes, const uint32_t *box, const uint32_t *element_strides,
                                int interleave, int swizzle, int l2_promotion, int fill) SCHEDSEARCH_SINCE_12;
CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                                 const uint64_t *strides_bytes, const int *lower, const int *upper,
                                 uint32_t channels_per_pixel, uint32_t pixels_per_column, const uint32_t *element_strides,
                                 int interleave, int swizzle, int l2_promotion, int fill) SCHEDSEARCH_SINCE_12;
CUresult cuGetErrorString(CUresult code, const char **text);

#ifdef __cplusplus
}
#endif

#endif
