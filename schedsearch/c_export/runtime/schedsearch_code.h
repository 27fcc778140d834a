/* The data of an exported kernel: machine code and launch plan. Private to the files of an export. */
#ifndef SCHEDSEARCH_CODE_H
#define SCHEDSEARCH_CODE_H

#include "schedsearch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SCHEDSEARCH_MAX_DEVICES = 64,
    SCHEDSEARCH_MAX_POINTERS = 64,  /* arguments and outputs */
    SCHEDSEARCH_MAX_ADDRESSES = 128, /* with workspaces */
    SCHEDSEARCH_MAX_PARAMS = 512,   /* of a step */
    SCHEDSEARCH_MAX_MAPS = 16,      /* of a step */
    SCHEDSEARCH_KEPT_MAPS = 32      /* encoded ones of each map, for as many addresses; a power of two */
};

/* What a parameter of a step is. */
enum {
    SCHEDSEARCH_VALUE,   /* `value`; the driver reads as many bytes as the kernel declares */
    SCHEDSEARCH_ADDRESS, /* an address, by its index */
    SCHEDSEARCH_SCALAR,  /* a scalar of the call, by its index */
    SCHEDSEARCH_MAP      /* a tensor map, by its index in the step */
};

typedef struct schedsearch_param {
    int kind;
    unsigned index;
    uint64_t value;
} schedsearch_param;

/* A tensor map; the arguments of cuTensorMapEncodeTiled or, with channels_per_pixel, of cuTensorMapEncodeIm2col. */
typedef struct schedsearch_map {
    unsigned address;
    int dtype;
    uint32_t rank;
    uint64_t dims[5];
    uint64_t strides_bytes[5];
    uint32_t element_strides[5];
    uint32_t box[5];
    int lower[3];
    int upper[3];
    uint32_t channels_per_pixel;
    uint32_t pixels_per_column;
    int swizzle;
    int l2_promotion;
} schedsearch_map;

/* An encoded tensor map, for one address. Threads read it without a lock: see `recall` in schedsearch_runtime.c. */
typedef struct schedsearch_kept_map {
    uint64_t version; /* how often it changed, twice; odd while it changes */
    uint64_t address; /* 0: none yet */
    uint64_t words[16];
} schedsearch_kept_map;

/* One launch. A persistent grid has blocks_per_sm; its blocks loop over `work_items`. */
typedef struct schedsearch_step {
    const char *entry;
    const schedsearch_param *params;
    size_t param_count;
    const schedsearch_map *maps;
    size_t map_count;
    schedsearch_kept_map (*kept)[SCHEDSEARCH_KEPT_MAPS]; /* of each map */
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    unsigned cluster;
    unsigned blocks_per_sm;
    uint64_t work_items;
    int constant;   /* it reads constants and other constant steps' workspaces only */
    int restored;   /* if >= 0: it copies this address to `restores`, which is left out where both are the same */
    int restores;
} schedsearch_step;

typedef struct schedsearch_workspace {
    size_t offset;
    int prepared; /* whether the offset is in the prepared memory */
} schedsearch_workspace;

/* The whole numbers that a scalar may have; anything if low > high. */
typedef struct schedsearch_range {
    double low;
    double high;
} schedsearch_range;

/* A step on one device. */
typedef struct schedsearch_loaded_step {
    struct CUfunc_st *function; /* a CUkernel, which the driver takes in its place in any context */
    unsigned blocks;            /* along x */
} schedsearch_loaded_step;

typedef struct schedsearch_state {
    void *library;
    int loaded[SCHEDSEARCH_MAX_DEVICES]; /* whether the steps of a device are there */
} schedsearch_state;

struct schedsearch_code {
    const void *image;
    size_t image_bytes;
    int major, minor; /* compute capability that the code is for */
    int exactly;      /* it runs on no later minor version */
    const schedsearch_step *steps;
    size_t step_count;
    const uint64_t *alignments; /* of the pointers, each a power of two */
    uint64_t needed;            /* bit i: pointer i must not be NULL in a plain call */
    uint64_t needed_to_prepare;
    uint64_t needed_prepared;
    const schedsearch_workspace *workspaces;
    size_t workspace_count;
    uint64_t workspace_alignment;
    const schedsearch_range *ranges; /* of the scalars */
    schedsearch_state *state;
    schedsearch_loaded_step *loaded; /* step_count for each device */
};

#ifdef __cplusplus
}
#endif

#endif
