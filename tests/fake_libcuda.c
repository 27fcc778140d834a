/* A libcuda that computes nothing and writes down every launch, for tests of the C export and of the launcher in Python.
 *
 * FAKE_LOG     file to which it appends a line for each call that tests look at
 * FAKE_PARAMS  file with a line for each kernel: its entry and the bytes of its parameters
 * FAKE_CC      compute capability, e.g. 90
 * FAKE_REFUSE  name of a function that fails with CUDA_ERROR_INVALID_VALUE
 *
 * Compiled with -DFAKE_OLD it lacks the libraries of CUDA 12.0.
 *
 * A tensor map is its arguments: a hash in the second word and the address in all others. There are 2 devices with 132
 * multiprocessors each.
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
typedef struct { Context *context; } Stream;
typedef struct { unsigned grid[3], block[3], shared; Stream *stream; void *attributes; unsigned attribute_count; } Config;

static Context primary[2] = {{0}, {1}};
static _Thread_local Context *stack[16];
static _Thread_local int depth;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(const char *format, ...)
{
    const char *path = getenv("FAKE_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
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
    (void)flags;
    *stream = malloc(sizeof **stream);
    (*stream)->context = current();
    return 0;
}
int cuStreamGetCtx(Stream *stream, Context **context) { *context = stream->context; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int capability = atoi(getenv("FAKE_CC") ? getenv("FAKE_CC") : "90");
    (void)device;
    *value = attribute == 16 ? 132 : attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
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

static int find(Function **function, const char *entry)
{
    FILE *file = fopen(getenv("FAKE_PARAMS"), "r");
    static char line[8192];
    int found = 0;
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

int cuLaunchKernelEx(const Config *config, Function *function, void **params, void **extra)
{
    char text[65536];
    size_t at = 0;
    int number;
    if (!current())
        return INVALID_CONTEXT;
    if (config->stream && config->stream->context != current())
        return INVALID_HANDLE;
    if (extra || config->attribute_count || refused("cuLaunchKernelEx"))
        return INVALID_VALUE;
    at += (size_t)sprintf(text, "launch %s %u,%u,%u %u,%u,%u %u", function->entry, config->grid[0], config->grid[1],
                          config->grid[2], config->block[0], config->block[1], config->block[2], config->shared);
    for (number = 0; number < function->count; number++) {
        unsigned byte;
        text[at++] = ' ';
        for (byte = 0; byte < function->bytes[number]; byte++)
            at += (size_t)sprintf(text + at, "%02x", ((const unsigned char *)params[number])[byte]);
        if (function->bytes[number] == 128 && !is_map((const uint64_t *)params[number]))
            return INVALID_VALUE;
    }
    note("%s\n", text);
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
