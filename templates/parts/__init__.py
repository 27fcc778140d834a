"""The parts of kernels that templates share.

Most parts are factories: they take numbers of a plan and return plain functions, which a kernel captures and which become
part of its machine code. `ptx` and `cluster` are device operations, `hopper` and `machine` facts of the hardware.

Words, as they are used in all kernels:

stage
    One buffer of a ring in shared memory, and the operands of one k step in it (`pipeline`).
full, empty
    A stage's two mbarriers: its bytes have landed; every consumer has read it.
producer, consumer
    The warps that load; the warpgroups that multiply and store.
warpgroup
    Four warps, 128 threads, which execute a wgmma together and hold 64 rows of its result.
fragment
    What one thread holds of a wgmma's result, in registers.
octet
    Eight neighbouring columns of a fragment or eight 16-bit values, 16 bytes in memory: the unit of TMA and of swizzles.
tile
    What a block computes at a time. A tile scheduler says which tile a block takes next (`walk`).
k step
    The part of the reduction that one stage holds.
cluster
    Blocks that run at the same time and reach each other's shared memory (`sharing`).
peer
    A block of the same cluster that a block sends to.
swizzle
    How rows of a matrix are laid out in shared memory without bank conflicts: 16-byte chunks of a row are exchanged by XOR.
plan
    A configuration with the sizes that follow from it: a frozen dataclass, made by `evaluate` of a template's sizes.
patch, halo
    In conv2d_halo and conv2d_stem, the part of x that a tile depends on; what of it lies around the tile's own pixels.
"""
