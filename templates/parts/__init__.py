"""The parts of kernels that templates share.

Most parts are factories: they take numbers of a plan and return plain functions. A kernel captures these, and they become
part of its machine code. `ptx` and `cluster` are device operations; `hopper` and `machine` have facts of the hardware.

All kernels use these words:

stage
    One buffer of a ring in shared memory, and the operands of one k step in it (`pipeline`).
full, empty
    A stage's two mbarriers. `full`: its bytes have arrived. `empty`: every consumer has read it.
producer, consumer
    Producers are the warps that load. Consumers are the warpgroups that multiply and store.
warpgroup
    Four warps, 128 threads, which execute a wgmma together and hold 64 rows of its result.
fragment
    The part of a wgmma's result that one thread holds in registers.
octet
    Eight neighbouring columns of a fragment or eight 16-bit values, 16 bytes in memory: the unit of TMA and of swizzles.
tile
    The part of the output that a block computes at a time. A tile scheduler chooses a block's next tile (`walk`).
k step
    The part of the reduction that one stage holds.
cluster
    Blocks that run at the same time and reach each other's shared memory (`sharing`).
peer
    A block of the same cluster that a block sends to.
swizzle
    A layout of matrix rows in shared memory that avoids bank conflicts: XOR permutes the 16-byte chunks of a row.
plan
    A configuration with its sizes: a frozen dataclass, made by `evaluate` of a template's sizes.
patch, halo
    In conv2d_halo and conv2d_stem, the patch is the part of x that a tile depends on, and the halo is the part of the patch
    around the tile's own pixels.
"""
