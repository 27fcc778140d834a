/* A libcuda that computes nothing and writes down every launch, for tests of the C export, of the launcher in Python and of
 * graphs, and for benchmarks of the host's time (benchmarks/idle_host.py), which let it take no notes.
 *
 * FAKE_LOG     file to which it appends a line for each call that tests look at
 * FAKE_PARAMS  file with a line for each kernel: its entry and the bytes of its parameters; without it they are not noted
 * FAKE_CC      compute capability, e.g. 90
 * FAKE_REFUSE  name of a function that fails with CUDA_ERROR_INVALID_VALUE
 *
 * Compiled with -DFAKE_OLD it lacks the libraries of CUDA 12.0.
 *
 * A tensor map is its arguments: a hash in the second word and the address in all others. There are 2 devices like an H200,
 * whose memory is the host's. What is enqueued is done at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500 };

typedef struct { int device; } Context;
typedef struct { char entry[256]; int count; unsigned bytes[512]; } Function;
typedef struct { Context *context; int number; } Stream;
typedef struct { unsigned grid[3], block[3], shared; Stream *stream; void *attributes; unsigned attribute_count; } Config;
typedef struct { Function *function; unsigned grid[3], block[3], shared; void **params, **extra, *kernel, *context; } NodeParams;
typedef struct { int number; char *launch; } Node;
typedef struct { int count; Node *nodes[256]; Context *context; } Graph;

static Context primary[2] = {{0}, {1}};
static _Thread_local Context *stack[16];
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *log_path; /* NULL: no notes */

__attribute__((constructor)) static void look_for_log(void) { log_path = getenv("FAKE_LOG"); }

static void note(const char *format, ...)
{
    FILE *file = log_path ? fopen(log_path, "a") : NULL;
    va_list values;
    if (!file)
        return;
    va_start(values, format);
    vfprintf(file, format, values);
    va_end(values);
    fclose(file);
}

static int refused(const char *name)
{
    const char *wanted = getenv("FAKE_REFUSE");
    return wanted && strcmp(wanted, name) == 0;
}

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(Context **context, int device) { *context = &primary[device]; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device * 0; }
int cuCtxPushCurrent_v2(Context *context) { stack[depth++] = context; return 0; }
int cuCtxPopCurrent_v2(Context **context) { *context = stack[--depth]; return 0; }
int cuCtxSetCurrent(Context *context) { depth = 0; if (context) stack[depth++] = context; return 0; }
int cuCtxGetCurrent(Context **context) { *context = current(); return 0; }
int cuCtxCreate_v2(Context **context, unsigned flags, int device)
{
    *context = malloc(sizeof **context);
    (*context)->device = device;
    return (int)flags;
}
int cuCtxGetDevice(int *device)
{
    if (!current())
        return INVALID_CONTEXT;
    *device = current()->device;
    return 0;
}
int cuStreamCreate(Stream **stream, unsigned flags)
{
    static int count;
    (void)flags;
    *stream = malloc(sizeof **stream);
    (*stream)->context = current();
    (*stream)->number = ++count;
    return 0;
}
int cuStreamDestroy_v2(Stream *stream) { free(stream); return 0; }
int cuStreamGetCtx(Stream *stream, Context **context) { *context = stream->context; return 0; }
int cuStreamIsCapturing(Stream *stream, int *status) { (void)stream; *status = 0; return 0; }
int cuCtxSynchronize(void) { return current() ? 0 : INVALID_CONTEXT; }
int cuDeviceGetName(char *name, int bytes, int device)
{
    (void)device;
    snprintf(name, (size_t)bytes, "NVIDIA H200");
    return 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device + 1, 16); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)141 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int capability = atoi(getenv("FAKE_CC") ? getenv("FAKE_CC") : "90");
    (void)device;
    switch (attribute) {
    case 13: *value = 1980000; break;           /* clock rate, kHz */
    case 16: *value = 132; break;               /* multiprocessors */
    case 38: *value = 60 << 20; break;          /* L2 cache */
    case 39: *value = 2048; break;              /* threads per multiprocessor */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 81: *value = 228 << 10; break;         /* shared memory per multiprocessor */
    case 82: *value = 65536; break;             /* registers per multiprocessor */
    case 97: *value = 227 << 10; break;         /* shared memory per block, opt-in */
    default: *value = 0;
    }
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes))
        return 2;
    *address = (uint64_t)(uintptr_t)memory;
    return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t bytes)
{
    memset((void *)(uintptr_t)address, byte, bytes);
    return 0;
}
int cuStreamSynchronize(Stream *stream) { (void)stream; return current() ? 0 : INVALID_CONTEXT; }
int cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)(uintptr_t)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (const void *)(uintptr_t)from, bytes); return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *stream)
{
    (void)stream;
    note("copy %zu\n", bytes);
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

static int find(Function **function, const char *entry)
{
    const char *path = getenv("FAKE_PARAMS");
    FILE *file = path ? fopen(path, "r") : NULL;
    static char line[8192];
    int found = 0;
    if (!path) {
        *function = calloc(1, sizeof **function);
        return 0;
    }
    pthread_mutex_lock(&lock);
    while (file && !found && fgets(line, sizeof line, file)) {
        char *word = strtok(line, " \n");
        if (!word || strcmp(word, entry) != 0)
            continue;
        *function = calloc(1, sizeof **function);
        snprintf((*function)->entry, sizeof (*function)->entry, "%s", entry);
        while ((word = strtok(NULL, " \n")))
            (*function)->bytes[(*function)->count++] = (unsigned)atoi(word);
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    if (file)
        fclose(file);
    return found ? 0 : NOT_FOUND;
}

static int loaded(void **handle, const void *code)
{
    if (memcmp(code, "\177ELF", 4) != 0)
        return NO_BINARY;
    *handle = malloc(1);
    return 0;
}

int cuModuleLoadData(void **module, const void *code) { return loaded(module, code); }
int cuModuleUnload(void *module) { free(module); return 0; }
int cuModuleGetFunction(Function **function, void *module, const char *entry) { (void)module; return find(function, entry); }
int cuFuncSetAttribute(Function *function, int attribute, int value)
{
    note("attribute %s %d %d\n", function->entry, attribute, value);
    return 0;
}
#ifndef FAKE_OLD
int cuLibraryLoadData(void **library, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f)
{
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    note("load\n");
    return refused("cuLibraryLoadData") ? INVALID_VALUE : loaded(library, code);
}
int cuLibraryUnload(void *library) { note("unload\n"); free(library); return 0; }
int cuLibraryGetKernel(Function **kernel, void *library, const char *entry) { (void)library; return find(kernel, entry); }
int cuKernelSetAttribute(int attribute, int value, Function *kernel, int device)
{
    (void)device;
    note("attribute %s %d %d\n", kernel->entry, attribute, value);
    return refused("cuKernelSetAttribute") ? INVALID_VALUE : 0;
}
int cuKernelGetFunction(Function **function, Function *kernel)
{
    *function = kernel;
    note("into context %s\n", kernel->entry);
    return current() ? 0 : INVALID_CONTEXT;
}

#endif

/* Fewer clusters than multiprocessors would fit, as on a card with parts switched off. */
int cuOccupancyMaxActiveClusters(int *clusters, Function *function, const Config *config)
{
    note("clusters %s %u %u %u\n", function->entry, config->grid[0], config->block[0], config->shared);
    *clusters = 31;
    return 0;
}

/* Whether a tensor map is aligned and made of words that belong together. */
static int is_map(const uint64_t *map)
{
    int word, whole = (uintptr_t)map % 64 == 0;
    for (word = 2; word < 16; word++)
        whole = whole && map[word] == map[0];
    return whole;
}

static int is_refused(Function *function, void **params)
{
    int number;
    for (number = 0; number < function->count; number++)
        if (function->bytes[number] == 128 && !is_map((const uint64_t *)params[number]))
            return 1;
    return 0;
}

/* What the driver reads of a launch, as text; the caller frees it. NULL if nobody reads it. */
static char *described(const Function *function, const unsigned *grid, const unsigned *block, unsigned shared, void **params)
{
    size_t at = 0;
    int number;
    char *text;
    if (!log_path)
        return NULL;
    text = malloc(65536);
    at += (size_t)sprintf(text, "%s %u,%u,%u %u,%u,%u %u", function->entry, grid[0], grid[1], grid[2], block[0], block[1],
                          block[2], shared);
    for (number = 0; number < function->count; number++) {
        unsigned byte;
        text[at++] = ' ';
        for (byte = 0; byte < function->bytes[number]; byte++)
            at += (size_t)sprintf(text + at, "%02x", ((const unsigned char *)params[number])[byte]);
    }
    text[at] = 0;
    return text;
}

int cuLaunchKernelEx(const Config *config, Function *function, void **params, void **extra)
{
    char *text;
    if (!current())
        return INVALID_CONTEXT;
    if (config->stream && config->stream->context != current())
        return INVALID_HANDLE;
    if (extra || config->attribute_count || refused("cuLaunchKernelEx") || is_refused(function, params))
        return INVALID_VALUE;
    text = described(function, config->grid, config->block, config->shared, params);
    note("launch %s\n", text);
    free(text);
    return 0;
}

/* Graphs of kernels. A node keeps what its parameters were when they were set. */
int cuGraphCreate(Graph **graph, unsigned flags)
{
    *graph = calloc(1, sizeof **graph);
    return (int)flags;
}
int cuGraphDestroy(Graph *graph) { (void)graph; return 0; } /* its nodes are those of its executable graph */

static int set(Node *node, const NodeParams *params)
{
    if (is_refused(params->function, params->params))
        return INVALID_VALUE;
    free(node->launch);
    node->launch = described(params->function, params->grid, params->block, params->shared, params->params);
    return 0;
}

int cuGraphAddKernelNode_v2(Node **node, Graph *graph, Node **before, size_t count, const NodeParams *params)
{
    (void)before, (void)count;
    if (graph->count == 256)
        return INVALID_VALUE;
    *node = calloc(1, sizeof **node);
    (*node)->number = graph->count;
    graph->nodes[graph->count++] = *node;
    return set(*node, params);
}
int cuGraphAddDependencies_v2(Graph *graph, Node **from, Node **to, const void *edges, size_t count)
{
    (void)graph, (void)from, (void)to, (void)edges, (void)count;
    return 0;
}
int cuGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long flags)
{
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    (*executable)->context = current();
    return (int)flags;
}
int cuGraphExecDestroy(Graph *executable)
{
    int number;
    for (number = 0; number < executable->count; number++) {
        free(executable->nodes[number]->launch);
        free(executable->nodes[number]);
    }
    free(executable);
    return 0;
}
int cuGraphExecKernelNodeSetParams_v2(Graph *executable, Node *node, const NodeParams *params)
{
    (void)executable;
    note("update %d\n", node->number);
    return refused("cuGraphExecKernelNodeSetParams") ? INVALID_VALUE : set(node, params);
}
int cuGraphLaunch(const Graph *executable, Stream *stream)
{
    int number;
    if (!stream && !current())
        return INVALID_CONTEXT;
    if (stream && stream->context != executable->context)
        return INVALID_HANDLE;
    if (refused("cuGraphLaunch"))
        return INVALID_VALUE;
    if (!log_path)
        return 0;
    note("graph on %d%s\n", stream ? stream->number : 0, stream || current() == executable->context ? "" : " of another context");
    for (number = 0; number < executable->count; number++)
        note("node %s\n", executable->nodes[number]->launch);
    return 0;
}

int cuTensorMapReplaceAddress(uint64_t *map, void *address)
{
    int word;
    for (word = 0; word < 16; word++)
        if (word != 1)
            map[word] = (uint64_t)(uintptr_t)address;
    return 0;
}

static void hash(uint64_t *value, const void *data, size_t bytes)
{
    size_t at;
    for (at = 0; at < bytes; at++)
        *value = (*value ^ ((const unsigned char *)data)[at]) * 1099511628211u;
}

static uint64_t common(int dtype, uint32_t rank, const uint64_t *dims, const uint64_t *strides, const uint32_t *steps,
                       const int *modes)
{
    uint64_t value = 14695981039346656037u;
    hash(&value, &dtype, 4);
    hash(&value, dims, 8 * rank);
    hash(&value, strides, 8 * (rank - 1));
    hash(&value, steps, 4 * rank);
    hash(&value, modes, 16);
    return value;
}

static int encoded(uint64_t *map, void *address, uint64_t value)
{
    cuTensorMapReplaceAddress(map, address);
    map[1] = value;
    note("encode\n");
    return refused("cuTensorMapEncode") ? INVALID_VALUE : 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle,
                           int promotion, int fill)
{
    int modes[] = {interleave, swizzle, promotion, fill};
    uint64_t value = common(dtype, rank, dims, strides, steps, modes);
    hash(&value, box, 4 * rank);
    return encoded(map, address, value);
}

int cuTensorMapEncodeIm2col(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const int *lower, const int *upper, uint32_t channels, uint32_t pixels,
                            const uint32_t *steps, int interleave, int swizzle, int promotion, int fill)
{
    int modes[] = {interleave, swizzle, promotion, fill};
    uint64_t value = common(dtype, rank, dims, strides, steps, modes);
    hash(&value, lower, 4 * (rank - 2));
    hash(&value, upper, 4 * (rank - 2));
    hash(&value, &channels, 4);
    hash(&value, &pixels, 4);
    return encoded(map, address, value);
}

int cuGetErrorName(int code, const char **text) { *text = code ? "CUDA_ERROR" : "CUDA_SUCCESS"; return 0; }
int cuGetErrorString(int code, const char **text)
{
    *text = code == INVALID_VALUE ? "invalid argument" : code == NOT_FOUND ? "named symbol not found" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

/* How CUDA's Python bindings find the functions. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    char versioned[128];
    (void)version, (void)flags;
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, versioned);
    if (!*function)
        *function = dlsym(RTLD_DEFAULT, name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}
