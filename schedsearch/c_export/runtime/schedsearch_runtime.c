/* Loads and launches exported kernels: the launcher of schedsearch (schedsearch/device/cuda_kernel.py) in C.
 *
 * Machine code is loaded once for the process, as a CUDA library; the driver brings it into each context. What depends on the
 * GPU (grids of persistent kernels, the limit of shared memory) is kept for each device, under a lock when it is made.
 */
#include <pthread.h>
#include <string.h>

#include "schedsearch_code.h"
#include "schedsearch_driver.h"

enum { MAX_GRID_X = 2147483647, WAYS = 4 /* places that a kept tensor map may have */ };

/* Which steps of a plan run. */
enum { ALL_STEPS, CONSTANT_STEPS, OTHER_STEPS };

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static int runs_on(const struct schedsearch_code *code, CUdevice device, int *runs)
{
    int major = 0, minor = 0;
    CUresult result = cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (result == CUDA_SUCCESS)
        result = cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    *runs = major == code->major && (code->exactly ? minor == code->minor : minor >= code->minor);
    return result;
}

static int current_device(CUdevice *device)
{
    CUresult result = cuCtxGetDevice(device);
    if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED)
        return SCHEDSEARCH_NO_CONTEXT;
    return result;
}

/* Blocks along x: Grid.blocks and CudaBoundKernel._pack of schedsearch. */
static int count_blocks(const schedsearch_step *step, CUfunction function, int sms, unsigned *blocks)
{
    uint64_t cluster = step->cluster, wanted = (step->work_items + cluster - 1) / cluster * cluster;
    if (!step->blocks_per_sm) {
        *blocks = step->grid[0];
        return SCHEDSEARCH_OK;
    }
    uint64_t most = (uint64_t)sms * step->blocks_per_sm / cluster;
    if (most < 1)
        most = 1;
    if (wanted > most * cluster)
        wanted = most * cluster;
    if (wanted > MAX_GRID_X)
        wanted = MAX_GRID_X / cluster * cluster;
    if (cluster > 1) {
        CUlaunchConfig config;
        int clusters = 0;
        memset(&config, 0, sizeof config);
        config.gridDimX = (unsigned)wanted;
        config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = step->block[0];
        config.blockDimY = step->block[1];
        config.blockDimZ = step->block[2];
        config.sharedMemBytes = step->shared_bytes;
        CUresult result = cuOccupancyMaxActiveClusters(&clusters, function, &config);
        if (result != CUDA_SUCCESS)
            return result;
        if (clusters < 1) /* none fits; the launch says why */
            clusters = 1;
        if (wanted > (uint64_t)clusters * cluster)
            wanted = (uint64_t)clusters * cluster;
    }
    *blocks = (unsigned)wanted;
    return SCHEDSEARCH_OK;
}

static int load_step(const schedsearch_step *step, CUlibrary library, CUdevice device, int sms, schedsearch_loaded_step *made)
{
    CUkernel kernel = NULL;
    CUresult result = cuLibraryGetKernel(&kernel, library, step->entry);
    if (result != CUDA_SUCCESS)
        return result;
    result = cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)step->shared_bytes, kernel, device);
    if (result != CUDA_SUCCESS)
        return result;
    made->function = (CUfunction)(void *)kernel;
    return count_blocks(step, made->function, sms, &made->blocks);
}

static int load_library(const struct schedsearch_code *code)
{
    CUlibrary library = NULL;
    int result;
    if (code->state->library)
        return SCHEDSEARCH_OK;
    if (!cuLibraryLoadData)
        return SCHEDSEARCH_OLD_DRIVER;
    result = cuLibraryLoadData(&library, code->image, NULL, NULL, 0, NULL, NULL, 0);
    if (result == CUDA_SUCCESS)
        code->state->library = library;
    return result == CUDA_ERROR_NO_BINARY_FOR_GPU ? SCHEDSEARCH_OTHER_GPU : result;
}

static int load_locked(const struct schedsearch_code *code, CUdevice device)
{
    int runs = 0, sms = 0;
    size_t i;
    int result = runs_on(code, device, &runs);
    if (result == CUDA_SUCCESS && !runs)
        return SCHEDSEARCH_OTHER_GPU;
    if (result == CUDA_SUCCESS)
        result = cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (result == CUDA_SUCCESS)
        result = load_library(code);
    for (i = 0; result == CUDA_SUCCESS && i < code->step_count; i++)
        result = load_step(&code->steps[i], (CUlibrary)code->state->library, device, sms,
                           &code->loaded[(size_t)device * code->step_count + i]);
    return result;
}

/* The steps on the device of the current context, loaded at the first call. */
static int load(const struct schedsearch_code *code, const schedsearch_loaded_step **found)
{
    CUdevice device = -1;
    int result = current_device(&device);
    if (result != SCHEDSEARCH_OK)
        return result;
    if (device < 0 || device >= SCHEDSEARCH_MAX_DEVICES)
        return SCHEDSEARCH_OTHER_GPU;
    int *loaded = &code->state->loaded[device];
    if (!__atomic_load_n(loaded, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&loading);
        if (!__atomic_load_n(loaded, __ATOMIC_RELAXED)) {
            result = load_locked(code, device);
            if (result == SCHEDSEARCH_OK)
                __atomic_store_n(loaded, 1, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&loading);
    }
    *found = code->loaded + (size_t)device * code->step_count;
    return result;
}

static int encode(const schedsearch_map *map, uint64_t address, CUtensorMap *encoded)
{
    void *start = (void *)(uintptr_t)address;
    if (map->channels_per_pixel)
        return cuTensorMapEncodeIm2col(encoded, map->dtype, map->rank, start, map->dims, map->strides_bytes, map->lower,
                                       map->upper, map->channels_per_pixel, map->pixels_per_column, map->element_strides,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle, map->l2_promotion,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return cuTensorMapEncodeTiled(encoded, map->dtype, map->rank, start, map->dims, map->strides_bytes, map->box,
                                  map->element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle, map->l2_promotion,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Copies a kept map if it is for this address.
 *
 * The version tells whether another thread changed the map meanwhile (a sequence lock). Whoever sees a word of the change sees
 * the odd version too, because words are written with release and read with acquire order: Boehm, "Can seqlocks get along with
 * programming language memory models?", MSPC 2012.
 */
static int recall(const schedsearch_kept_map *kept, uint64_t address, CUtensorMap *map)
{
    uint64_t version = __atomic_load_n(&kept->version, __ATOMIC_ACQUIRE);
    int i;
    if (version & 1 || __atomic_load_n(&kept->address, __ATOMIC_ACQUIRE) != address)
        return 0;
    for (i = 0; i < 16; i++)
        map->opaque[i] = __atomic_load_n(&kept->words[i], __ATOMIC_ACQUIRE);
    return __atomic_load_n(&kept->version, __ATOMIC_RELAXED) == version;
}

/* Keeps an encoded map in the place of another one, unless another thread is doing that. */
static void keep(schedsearch_kept_map *kept, uint64_t address, const CUtensorMap *map)
{
    uint64_t version = __atomic_load_n(&kept->version, __ATOMIC_RELAXED);
    int i;
    if (version & 1
        || !__atomic_compare_exchange_n(&kept->version, &version, version + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    __atomic_store_n(&kept->address, address, __ATOMIC_RELEASE);
    for (i = 0; i < 16; i++)
        __atomic_store_n(&kept->words[i], map->opaque[i], __ATOMIC_RELEASE);
    __atomic_store_n(&kept->version, version + 2, __ATOMIC_RELEASE);
}

/* The tensor map for an address. Encoding takes the driver about a microsecond, so the last ones are kept: layers of the same
 * shape share a kernel and have a weight each. A map depends on nothing but the address, which belongs to one GPU.
 */
static int find_map(const schedsearch_map *map, schedsearch_kept_map *kept, uint64_t address, CUtensorMap *found)
{
    uint64_t hash = address * 0x9e3779b97f4a7c15u >> 32; /* Fibonacci hashing */
    schedsearch_kept_map *oldest = kept += hash % (SCHEDSEARCH_KEPT_MAPS / WAYS) * WAYS;
    int result, i;
    for (i = 0; i < WAYS; i++) {
        if (recall(&kept[i], address, found))
            return CUDA_SUCCESS;
        if (__atomic_load_n(&kept[i].version, __ATOMIC_RELAXED) < __atomic_load_n(&oldest->version, __ATOMIC_RELAXED))
            oldest = &kept[i];
    }
    result = encode(map, address, found);
    if (result == CUDA_SUCCESS)
        keep(oldest, address, found);
    return result;
}

static int launch_step(const schedsearch_step *step, const schedsearch_loaded_step *loaded, CUstream stream, uint64_t *addresses,
                       const schedsearch_scalar *scalars)
{
    CUtensorMap maps[SCHEDSEARCH_MAX_MAPS];
    void *params[SCHEDSEARCH_MAX_PARAMS];
    size_t i;
    for (i = 0; i < step->map_count; i++) {
        int result = find_map(&step->maps[i], step->kept[i], addresses[step->maps[i].address], &maps[i]);
        if (result != CUDA_SUCCESS)
            return result;
    }
    for (i = 0; i < step->param_count; i++) {
        const schedsearch_param *param = &step->params[i];
        if (param->kind == SCHEDSEARCH_ADDRESS)
            params[i] = &addresses[param->index];
        else if (param->kind == SCHEDSEARCH_MAP)
            params[i] = &maps[param->index];
        else if (param->kind == SCHEDSEARCH_SCALAR)
            params[i] = (void *)(uintptr_t)&scalars[param->index];
        else
            params[i] = (void *)(uintptr_t)&param->value;
    }
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = loaded->blocks;
    config.gridDimY = step->grid[1];
    config.gridDimZ = step->grid[2];
    config.blockDimX = step->block[0];
    config.blockDimY = step->block[1];
    config.blockDimZ = step->block[2];
    config.sharedMemBytes = step->shared_bytes;
    config.hStream = stream;
    return cuLaunchKernelEx(&config, loaded->function, params, NULL);
}

/* A clearer code for a launch that the driver refused because of the stream. */
static int explain_failure(int result, CUstream stream)
{
    CUcontext current = NULL, owner = NULL;
    if (stream && cuCtxGetCurrent(&current) == CUDA_SUCCESS && cuStreamGetCtx(stream, &owner) == CUDA_SUCCESS
        && current != owner)
        return SCHEDSEARCH_OTHER_CONTEXT;
    return result;
}

static int check_pointers(const schedsearch_kernel *kernel, uint64_t needed, const void *const *pointers, uint64_t *addresses)
{
    size_t i;
    if (!pointers && kernel->pointers)
        return SCHEDSEARCH_NULL_POINTER;
    for (i = 0; i < kernel->pointers; i++) {
        addresses[i] = (uint64_t)(uintptr_t)pointers[i];
        if (!addresses[i] && (needed >> i & 1))
            return SCHEDSEARCH_NULL_POINTER;
        if (addresses[i] & (kernel->code->alignments[i] - 1))
            return SCHEDSEARCH_MISALIGNED;
    }
    return SCHEDSEARCH_OK;
}

static int check_scalars(const schedsearch_kernel *kernel, const schedsearch_scalar *scalars)
{
    size_t i;
    if (kernel->scalars && !scalars)
        return SCHEDSEARCH_BAD_SCALAR;
    for (i = 0; i < kernel->scalars; i++) {
        const schedsearch_range *range = &kernel->code->ranges[i];
        double value = scalars[i].float32;
        if (range->low <= range->high
            && !(value >= range->low && value <= range->high && (double)(long long)value == value))
            return SCHEDSEARCH_BAD_SCALAR;
    }
    return SCHEDSEARCH_OK;
}

static int place_workspaces(const schedsearch_kernel *kernel, int which, const void *workspace, const void *prepared,
                            uint64_t *addresses)
{
    const struct schedsearch_code *code = kernel->code;
    uint64_t scratch = (uint64_t)(uintptr_t)workspace, constant = (uint64_t)(uintptr_t)prepared;
    size_t i;
    if (which == ALL_STEPS) { /* prepared memory follows the scratch memory */
        if (kernel->workspace_bytes && !workspace)
            return SCHEDSEARCH_NO_WORKSPACE;
        constant = scratch + kernel->prepared_workspace_bytes;
    } else {
        if (which == CONSTANT_STEPS)
            scratch = 0;
        else if (kernel->prepared_workspace_bytes && !workspace)
            return SCHEDSEARCH_NO_WORKSPACE;
        if (kernel->prepared_bytes && !prepared)
            return SCHEDSEARCH_NO_WORKSPACE;
    }
    if (code->workspace_count && ((scratch | constant) & (code->workspace_alignment - 1)))
        return SCHEDSEARCH_MISALIGNED;
    for (i = 0; i < code->workspace_count; i++)
        addresses[i] = (code->workspaces[i].prepared ? constant : scratch) + code->workspaces[i].offset;
    return SCHEDSEARCH_OK;
}

static int run(const schedsearch_kernel *kernel, int which, CUstream stream, const void *const *pointers,
               const schedsearch_scalar *scalars, const void *workspace, const void *prepared)
{
    static const schedsearch_scalar none = {0};
    uint64_t addresses[SCHEDSEARCH_MAX_ADDRESSES];
    const schedsearch_loaded_step *loaded = NULL;
    size_t i;
    int result;
    if (!kernel)
        return SCHEDSEARCH_NO_KERNEL;
    const struct schedsearch_code *code = kernel->code;
    const uint64_t needed[] = {code->needed, code->needed_to_prepare, code->needed_prepared};
    result = check_pointers(kernel, needed[which], pointers, addresses);
    if (result == SCHEDSEARCH_OK && which != CONSTANT_STEPS)
        result = check_scalars(kernel, scalars);
    if (result == SCHEDSEARCH_OK)
        result = place_workspaces(kernel, which, workspace, prepared, addresses + kernel->pointers);
    if (result == SCHEDSEARCH_OK)
        result = load(code, &loaded);
    for (i = 0; result == SCHEDSEARCH_OK && i < code->step_count; i++) {
        const schedsearch_step *step = &code->steps[i];
        if (which != ALL_STEPS && step->constant != (which == CONSTANT_STEPS))
            continue;
        if (step->restored >= 0 && addresses[step->restored] == addresses[step->restores])
            continue;
        result = launch_step(step, &loaded[i], stream, addresses, scalars ? scalars : &none);
        if (result != CUDA_SUCCESS)
            result = explain_failure(result, stream);
    }
    return result;
}

int schedsearch_run(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers,
                    const schedsearch_scalar *scalars, void *workspace)
{
    return run(kernel, ALL_STEPS, stream, pointers, scalars, workspace, NULL);
}

int schedsearch_prepare(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers, void *prepared)
{
    if (kernel && !kernel->prepared_bytes)
        return SCHEDSEARCH_NOT_PREPARED;
    return run(kernel, CONSTANT_STEPS, stream, pointers, NULL, NULL, prepared);
}

int schedsearch_run_prepared(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers,
                             const schedsearch_scalar *scalars, void *workspace, const void *prepared)
{
    return run(kernel, OTHER_STEPS, stream, pointers, scalars, workspace, prepared);
}

int schedsearch_load(const schedsearch_kernel *kernel)
{
    const schedsearch_loaded_step *loaded = NULL;
    size_t i;
    int result = kernel ? load(kernel->code, &loaded) : SCHEDSEARCH_NO_KERNEL;
    for (i = 0; result == SCHEDSEARCH_OK && i < kernel->code->step_count; i++) {
        CUfunction in_this_context = NULL; /* the driver would load it at the first launch in this context */
        result = cuKernelGetFunction(&in_this_context, (CUkernel)(void *)loaded[i].function);
    }
    return result;
}

int schedsearch_unload(const schedsearch_kernel *kernel)
{
    int result = SCHEDSEARCH_OK;
    if (!kernel)
        return SCHEDSEARCH_NO_KERNEL;
    schedsearch_state *state = kernel->code->state;
    pthread_mutex_lock(&loading);
    if (state->library)
        result = cuLibraryUnload((CUlibrary)state->library);
    memset(state, 0, sizeof *state);
    pthread_mutex_unlock(&loading);
    return result;
}

const schedsearch_kernel *schedsearch_find(const char *workload)
{
    CUdevice device = -1;
    const schedsearch_kernel *found = NULL;
    size_t i;
    int has_device = current_device(&device) == SCHEDSEARCH_OK;
    for (i = 0; workload && !found && i < schedsearch_kernel_count; i++) {
        const schedsearch_kernel *kernel = schedsearch_kernels[i];
        int runs = 1;
        if (strcmp(kernel->workload_id, workload) != 0 && strcmp(kernel->workload, workload) != 0)
            continue;
        if (has_device && (runs_on(kernel->code, device, &runs) != CUDA_SUCCESS || !runs))
            continue;
        found = kernel;
    }
    return found;
}

const char *schedsearch_error_text(int code)
{
    const char *text = NULL;
    switch (code) {
    case SCHEDSEARCH_OK:
        return "no error";
    case SCHEDSEARCH_NULL_POINTER:
        return "an array is NULL; pass the address of its memory on the GPU";
    case SCHEDSEARCH_MISALIGNED:
        return "an array or the workspace lacks the alignment that the kernel's description names; pass memory as "
               "cuMemAlloc returns it";
    case SCHEDSEARCH_NO_WORKSPACE:
        return "the kernel needs a workspace or prepared memory and got NULL; allocate as many bytes as it names";
    case SCHEDSEARCH_BAD_SCALAR:
        return "a scalar is missing or is not a whole number in the range that the kernel's description names";
    case SCHEDSEARCH_NO_CONTEXT:
        return "the calling thread has no current CUDA context; call cuCtxSetCurrent, or cudaSetDevice, in this thread";
    case SCHEDSEARCH_OTHER_CONTEXT:
        return "the stream belongs to a context that is not the calling thread's current one";
    case SCHEDSEARCH_OTHER_GPU:
        return "the kernel's machine code does not run on this GPU; its description names the one that it is for; tune and "
               "export on a GPU of this kind";
    case SCHEDSEARCH_OLD_DRIVER:
        return "the NVIDIA driver is older than CUDA 12.0; install a newer one";
    case SCHEDSEARCH_NOT_PREPARED:
        return "the kernel repacks no constants, so there is nothing to prepare; use the plain call";
    case SCHEDSEARCH_NO_KERNEL:
        return "the kernel is NULL; this export has none for the workload that was looked up, or none for this GPU";
    default:
        if (code > 0 && cuGetErrorString(code, &text) == CUDA_SUCCESS && text)
            return text;
        return "an unknown code";
    }
}
