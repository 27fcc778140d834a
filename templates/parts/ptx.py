"""Device operations as data: each is one line of PTX. Section names refer to the PTX ISA.

Addresses called `shared` are 32-bit shared-window addresses, all others are generic or global 64-bit ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.backend.ops import wait_for_predecessor as wait_for_predecessor

F16 = "float16"
BF16 = "bfloat16"
_PTX_TYPE = {F16: "f16", BF16: "bf16"}
REGISTER = {"float32": "f32", "int32": "i32"}  # accumulator -> type of its operand in a device operation

# --- Global memory, 128 bits at a time ------------------------------------------------------------------------------
store_global_v4 = device_op(
    "store_global_v4",
    "st.global.v4.b32 [$address], {$a, $b, $c, $d};",
    ins={"address": "u64", "a": "u32", "b": "u32", "c": "u32", "d": "u32"},
)
load_global_u32 = device_op(
    "load_global_u32", "ld.global.nc.b32 $value, [$address];", ins={"address": "u64"}, outs={"value": "u32"}
)
store_global_u32 = device_op("store_global_u32", "st.global.b32 [$address], $value;", ins={"address": "u64", "value": "u32"})
store_global_u16 = device_op(
    "store_global_u16",
    "{ .reg .b16 h; cvt.u16.u32 h, $value; st.global.b16 [$address], h; }",
    ins={"address": "u64", "value": "u32"},
)
store_global_u8 = device_op(
    "store_global_u8",
    "{ .reg .b16 h; cvt.u16.u32 h, $value; st.global.b8 [$address], h; }",
    ins={"address": "u64", "value": "u32"},
)
store_global_f32 = device_op("store_global_f32", "st.global.f32 [$address], $value;", ins={"address": "u64", "value": "f32"})
store_global_f32x2 = device_op(
    "store_global_f32x2", "st.global.v2.f32 [$address], {$a, $b};", ins={"address": "u64", "a": "f32", "b": "f32"}
)
store_global_b32x2 = device_op(
    "store_global_b32x2", "st.global.v2.b32 [$address], {$a, $b};", ins={"address": "u64", "a": "i32", "b": "i32"}
)

# Two words in which the first wrong index is noted: (address, place, index); see `schedsearch.ops.wrong_index`.
note_index = device_op(
    "note_index",
    "{ .reg .pred p; .reg .b64 old; atom.global.cas.b64 old, [$address], 0, $place; setp.eq.b64 p, old, 0; "
    "@p st.global.b64 [$address+8], $index; }",
    ins={"address": "u64", "place": "i64", "index": "i64"},
)


@functools.cache
def copy_global(nbytes: int) -> Callable[..., Any]:
    """Copies an element of 1, 2 or 4 bytes: (to, address, inside); zero, and nothing is read, if `inside` is 0."""
    register = "b32" if nbytes == 4 else "b16"
    return device_op(
        "copy_global",
        f"{{ .reg .pred p; .reg .{register} v; setp.ne.s32 p, $inside, 0; mov.{register} v, 0; "
        f"@p ld.global.nc.b{8 * nbytes} v, [$address]; st.global.b{8 * nbytes} [$to], v; }}",
        ins={"to": "u64", "address": "u64", "inside": "i32"},
    )


store_shared_v4 = device_op(
    "store_shared_v4",
    "st.shared.v4.b32 [$shared], {$a, $b, $c, $d};",
    ins={"shared": "u32", "a": "u32", "b": "u32", "c": "u32", "d": "u32"},
)

store_shared_i32 = device_op("store_shared_i32", "st.shared.b32 [$shared], $value;", ins={"shared": "u32", "value": "i32"})
load_shared_i32 = device_op("load_shared_i32", "ld.shared.b32 $a, [$shared];", ins={"shared": "u32"}, outs={"a": "i32"})
multiply_f32 = device_op(  # with a rounding: the compiler fuses no addition with it
    "multiply_f32", "mul.rn.f32 $y, $a, $b;", ins={"a": "f32", "b": "f32"}, outs={"y": "f32"}, pure=True
)
store_shared_f32 = device_op("store_shared_f32", "st.shared.f32 [$shared], $value;", ins={"shared": "u32", "value": "f32"})
load_shared_f32 = device_op("load_shared_f32", "ld.shared.f32 $a, [$shared];", ins={"shared": "u32"}, outs={"a": "f32"})
load_shared_f32x2 = device_op(
    "load_shared_f32x2", "ld.shared.v2.f32 {$a, $b}, [$shared];", ins={"shared": "u32"}, outs={"a": "f32", "b": "f32"}
)

load_shared_u16 = device_op(
    "load_shared_u16",
    "{ .reg .b16 h; ld.shared.b16 h, [$shared]; cvt.u32.u16 $a, h; }",
    ins={"shared": "u32"},
    outs={"a": "u32"},
)
load_shared_i32x2 = device_op(
    "load_shared_i32x2", "ld.shared.v2.b32 {$a, $b}, [$shared];", ins={"shared": "u32"}, outs={"a": "i32", "b": "i32"}
)
load_shared_i32x4 = device_op(
    "load_shared_i32x4",
    "ld.shared.v4.b32 {$a, $b, $c, $d}, [$shared];",
    ins={"shared": "u32"},
    outs=dict.fromkeys("abcd", "i32"),
)

# --- Asynchronous copies, sm_80 ("Data Movement: cp.async") ----------------------------------------------------------
cp_async_16 = device_op(  # copies the first `bytes` of 16 and zero-fills the rest; 0 reads nothing
    "cp_async_16",
    "cp.async.cg.shared.global.L2::128B [$shared], [$address], 16, $bytes;",
    ins={"shared": "u32", "address": "u64", "bytes": "i32"},
)
cp_async_8 = device_op(
    "cp_async_8",
    "cp.async.ca.shared.global [$shared], [$address], 8, $bytes;",
    ins={"shared": "u32", "address": "u64", "bytes": "i32"},
)
cp_async_4 = device_op(
    "cp_async_4",
    "cp.async.ca.shared.global [$shared], [$address], 4, $bytes;",
    ins={"shared": "u32", "address": "u64", "bytes": "i32"},
)
copy_2 = device_op(  # like cp_async_*, which copies at least 4 bytes, but through a register and done at its return
    "copy_2",
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $bytes, 0; mov.b16 h, 0; "
    "@p ld.global.nc.b16 h, [$address]; st.shared.b16 [$shared], h; }",
    ins={"shared": "u32", "address": "u64", "bytes": "i32"},
)
copy_1 = device_op(
    "copy_1",
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $bytes, 0; mov.b16 h, 0; "
    "@p ld.global.nc.b8 h, [$address]; st.shared.b8 [$shared], h; }",
    ins={"shared": "u32", "address": "u64", "bytes": "i32"},
)
cp_async_commit = device_op("cp_async_commit", "cp.async.commit_group;")


def cp_async(nbytes: int) -> Callable[..., Any]:
    """The copy of 1, 2, 4, 8 or 16 bytes: (shared, address, bytes), where bytes is 0 or all of them."""
    return {1: copy_1, 2: copy_2, 4: cp_async_4, 8: cp_async_8, 16: cp_async_16}[nbytes]


@functools.cache
def cp_async_wait(groups: int) -> Callable[..., Any]:
    """Waits until at most `groups` of the youngest committed groups are pending."""
    return device_op("cp_async_wait", f"cp.async.wait_group {groups};")


# --- Shared memory -----------------------------------------------------------------------------------------------
@functools.cache
def store_shared_pair(accumulator: str) -> Callable[..., None]:
    """`store(shared, a, b)`: two neighbouring registers of sums, 8 bytes."""
    kind = REGISTER[accumulator]
    text = f"st.shared.v2.{'f32' if kind == 'f32' else 'b32'} [$shared], {{$a, $b}};"
    return device_op("store_shared_pair", text, ins={"shared": "u32", "a": kind, "b": kind})


@functools.cache
def store_shared_packed(dtype: str, even: bool) -> Callable[..., None]:
    """`store(shared, odd, low, high)`: two float32 as neighbours of 16 bits.

    The address is a multiple of 4, or 2 past one if `odd` (i32) is not 0. With `even` it always is a multiple of 4.
    """
    pack = f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32 word, $high, $low;"
    if even:
        text = f"{{ .reg .b32 word; {pack} st.shared.b32 [$shared], word; }}"
    else:
        text = (
            f"{{ .reg .b32 word; .reg .b16 a, b; .reg .pred odd; {pack} mov.b32 {{a, b}}, word; setp.ne.s32 odd, $odd, 0; "
            "@!odd st.shared.b32 [$shared], word; @odd st.shared.b16 [$shared], a; @odd st.shared.b16 [$shared+2], b; }"
        )
    ins = {"shared": "u32", "odd": "i32", "low": "f32", "high": "f32"}
    return device_op("store_shared_packed", text, ins=ins, unused=("odd",))


# --- Integers: a 64-bit division is a call, and calls make ptxas serialise wgmma --------------------------------------
divide_u32 = device_op(
    "divide_u32", "div.u32 $quotient, $a, $b;", ins={"a": "u32", "b": "u32"}, outs={"quotient": "u32"}, pure=True
)


@functools.cache
def add_bytes(dtype: str, count: int) -> Callable[..., Any]:
    """`add(address, total)`: the total (i32) plus the sum of 1 or 4 neighbouring int8 or uint8 in global memory."""
    signed, word = ("s32" if dtype == "int8" else "u32"), "b32" if count == 4 else "s8" if dtype == "int8" else "u8"
    add = f"dp4a.{signed}.u32 $sum, word, 0x01010101, $total;" if count == 4 else "add.s32 $sum, word, $total;"
    return device_op(
        "add_bytes",
        f"{{ .reg .b32 word; ld.global.nc.{word} word, [$address]; {add} }}",
        ins={"address": "u64", "total": "i32"},
        outs={"sum": "i32"},
    )


warp_sum = device_op(  # sm_80; all lanes take part
    "warp_sum",
    "redux.sync.add.s32 $sum, $value, 0xffffffff;",
    ins={"value": "i32"},
    outs={"sum": "i32"},
    convergent=True,
)


# --- Conversions -----------------------------------------------------------------------------------------------------
@functools.cache
def pack_pair(dtype: str, accumulator: str = "float32") -> Callable[..., Any]:
    """Two float32 -> 32 bits of two 16-bit floats, `low` in the lower half, rounded to nearest even.

    With accumulators of int32 it takes the bits of the floats.
    """
    kind = REGISTER[accumulator]
    return device_op(
        "pack_pair",
        f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32 $packed, $high, $low;",
        ins={"low": kind, "high": kind},
        outs={"packed": "u32"},
        pure=True,
    )


@functools.cache
def pack_bytes(dtype: str) -> Callable[..., Any]:
    """Four int32 -> 32 bits of four saturated int8 or uint8, `a` in the lowest byte ("cvt.pack")."""
    pack = f"cvt.pack.sat.{'u8' if dtype == 'uint8' else 's8'}.s32.b32"
    return device_op(
        "pack_bytes",
        f"{{ .reg .b32 upper; {pack} upper, $d, $c, 0; {pack} $packed, $b, $a, upper; }}",
        ins=dict.fromkeys("abcd", "i32"),
        outs={"packed": "u32"},
        pure=True,
    )


# --- Barriers in shared memory, sm_90 ("Parallel Synchronization: mbarrier") ------------------------------------------
mbarrier_init = device_op(
    "mbarrier_init", "mbarrier.init.shared::cta.b64 [$shared], $arrivals;", ins={"shared": "u32", "arrivals": "u32"}
)
mbarrier_init_fence = device_op("mbarrier_init_fence", "fence.mbarrier_init.release.cluster;")
mbarrier_expect_bytes = device_op(
    "mbarrier_expect_bytes",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$shared], $bytes;",
    ins={"shared": "u32", "bytes": "u32"},
)
mbarrier_arrive = device_op("mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$shared];", ins={"shared": "u32"})
mbarrier_wait = device_op(  # spins until the phase of this parity has completed
    "mbarrier_wait",
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$shared], $parity; @!done bra again; }",
    ins={"shared": "u32", "parity": "u32"},
)


warp_barrier = device_op(  # all lanes take part; what they wrote to memory before is seen by all after it
    "warp_barrier", "bar.warp.sync 0xffffffff;", convergent=True
)


@functools.cache
def group_barrier(groups: int, threads: int) -> Callable[..., Any]:
    """A barrier for each of `groups` groups of `threads` threads. It takes the group's number, equal in a warp.

    The text contains the barriers' numbers (1 and up; 0 belongs to the whole block): a register would reserve all 16.
    """
    lines = [f"setp.eq.u32 mine, $group, {group}; @mine bar.sync {group + 1}, {threads};" for group in range(groups)]
    return device_op("group_barrier", f"{{ .reg .pred mine; {' '.join(lines)} }}", ins={"group": "u32"})


# --- Tensor copies, sm_90 ("Data Movement: cp.async.bulk.tensor") ------------------------------------------------------
prefetch_map = device_op("prefetch_map", "prefetch.tensormap [$tensor];", ins={"tensor": "u64"})  # before its first use
prefetch_bulk = device_op(
    "prefetch_bulk",
    "cp.async.bulk.prefetch.L2.global [$address], $nbytes;",
    ins={"address": "u64", "nbytes": "u32"},
)  # to L2; both are multiples of 16
tma_load_3d = device_op(
    "tma_load_3d",
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$shared], [$map, {$c0, $c1, $c2}], [$barrier];",
    ins={"shared": "u32", "map": "u64", "c0": "i32", "c1": "i32", "c2": "i32", "barrier": "u32"},
)
tma_load_4d = device_op(
    "tma_load_4d",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$shared], [$map, {$c0, $c1, $c2, $c3}], [$barrier];",
    ins={"shared": "u32", "map": "u64", "c0": "i32", "c1": "i32", "c2": "i32", "c3": "i32", "barrier": "u32"},
)
tma_load_5d = device_op(
    "tma_load_5d",
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$shared], [$map, {$c0, $c1, $c2, $c3, $c4}], [$barrier];",
    ins={"shared": "u32", "map": "u64", **dict.fromkeys(("c0", "c1", "c2", "c3", "c4"), "i32"), "barrier": "u32"},
)
tma_store_2d = device_op(
    "tma_store_2d",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$map, {$c0, $c1}], [$shared];",
    ins={"map": "u64", "shared": "u32", "c0": "i32", "c1": "i32"},
)
tma_store_3d = device_op(
    "tma_store_3d",
    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [$map, {$c0, $c1, $c2}], [$shared];",
    ins={"map": "u64", "shared": "u32", "c0": "i32", "c1": "i32", "c2": "i32"},
)
tma_store_4d = device_op(
    "tma_store_4d",
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$map, {$c0, $c1, $c2, $c3}], [$shared];",
    ins={"map": "u64", "shared": "u32", "c0": "i32", "c1": "i32", "c2": "i32", "c3": "i32"},
)
tma_store_5d = device_op(
    "tma_store_5d",
    "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [$map, {$c0, $c1, $c2, $c3, $c4}], [$shared];",
    ins={"map": "u64", "shared": "u32", **dict.fromkeys(("c0", "c1", "c2", "c3", "c4"), "i32")},
)
bulk_commit = device_op("bulk_commit", "cp.async.bulk.commit_group;")
bulk_wait_read_all = device_op("bulk_wait_read_all", "cp.async.bulk.wait_group.read 0;")
bulk_wait_read_but_one = device_op("bulk_wait_read_but_one", "cp.async.bulk.wait_group.read 1;")  # of the last group
fence_async_shared = device_op("fence_async_shared", "fence.proxy.async.shared::cta;")

# --- Warpgroup matrices, sm_90a ("Asynchronous Warpgroup Level Matrix Instructions") -----------------------------------


_WGMMA = {  # dtype -> k, type of the sums, type of the operands, and the immediate scales and transpositions at the end
    F16: ("k16", "f32", "f16", ", 1, 1, 0, 0"),
    BF16: ("k16", "f32", "bf16", ", 1, 1, 0, 0"),
    "float32": ("k8", "f32", "tf32", ", 1, 1"),
    "float8_e4m3": ("k32", "f32", "e4m3", ", 1, 1"),
    "float8_e5m2": ("k32", "f32", "e5m2", ", 1, 1"),
    "int8": ("k32", "s32", "s8", ""),
    "uint8": ("k32", "s32", "u8", ""),
}


@functools.cache
def wgmma_steps(bn: int, k_steps: int, dtype: str, dtype_b: str = "") -> Callable[..., Any]:
    """One tile step: fence, `k_steps` times m64nBN and 32 bytes of k with both operands in shared memory, commit.

    It takes (accumulators[bn // 2], descriptor_a, descriptor_b, accumulate). B has the dtype of A unless `dtype_b` names
    another (int8 and uint8 mix). With accumulate = 0 the first step overwrites the accumulators, which are float32, or int32
    for integers. A k step advances both descriptors by 32 bytes, 2 in units of 16 bytes. Both operands are K-major. All
    steps are in one block because NVVM counts the text of inline assembly against its unroll budget.
    """
    k, sums, kind, immediates = _WGMMA[dtype]
    kind_b = _WGMMA[dtype_b or dtype][2]
    multiply = f"wgmma.mma_async.sync.aligned.m64n{bn}{k}.{sums}.{kind}.{kind_b} {{$acc}}, da, db, p{immediates}; "
    advance = "add.s64 da, da, 2; add.s64 db, db, 2; setp.ne.b32 p, 1, 0; "
    return device_op(
        "wgmma_steps",
        "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, $accumulate, 0; mov.b64 da, $a; mov.b64 db, $b; "
        "wgmma.fence.sync.aligned; " + advance.join([multiply] * k_steps) + "wgmma.commit_group.sync.aligned; }",
        inout={"acc": ("f32" if sums == "f32" else "i32", bn // 2)},
        ins={"a": "u64", "b": "u64", "accumulate": "i32"},
    )


def wgmma_from_registers(columns: int, a: str, b: str, dtype: str, dtype_b: str = "") -> str:
    """The text of one wgmma, m64n`columns` and 32 bytes of k, whose first operand is in registers.

    The operation has the accumulators as its operand `acc`, and a predicate p, false if the product overwrites them.

    Args:
        a: four registers, separated by commas: bytes 4 * (lane % 4) to 4 * (lane % 4) + 3 of row lane / 4 and of the row 8
            below, then of both rows 16 bytes further on ("Register Fragments for wgmma.mma_async.m64nNk16", "m64nNk32").
        b: the register with the second operand's matrix descriptor. It is K-major.
        dtype: float16, bfloat16, int8 or uint8.
        dtype_b: of the second operand, if it differs: int8 and uint8 mix.
    """
    k, sums, kind, immediates = _WGMMA[dtype]
    own = immediates.removesuffix(", 0")  # only the second operand may be transposed
    types = f"{sums}.{kind}.{_WGMMA[dtype_b or dtype][2]}"
    return f"wgmma.mma_async.sync.aligned.m64n{columns}{k}.{types} {{$acc}}, {{{a}}}, {b}, p{own};"


@functools.cache
def wgmma_wait(groups: int, bn: int, accumulator: str = "float32") -> Callable[..., Any]:
    """Waits until at most `groups` of the youngest committed wgmma groups are pending.

    It takes the accumulators, which ties them to the wait, so that no use of them is moved before it.
    """
    return device_op(
        "wgmma_wait",
        f"wgmma.wait_group.sync.aligned {groups}; // orders $acc",
        inout={"acc": ("f32" if accumulator == "float32" else "i32", bn // 2)},
    )


stmatrix_x4 = device_op(
    "stmatrix_x4",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$shared], {$a, $b, $c, $d};",
    ins={"shared": "u32", "a": "u32", "b": "u32", "c": "u32", "d": "u32"},
)
stmatrix_x2 = device_op(
    "stmatrix_x2",
    "stmatrix.sync.aligned.m8n8.x2.shared.b16 [$shared], {$a, $b};",
    ins={"shared": "u32", "a": "u32", "b": "u32"},
)
stmatrix_x4_trans = device_op(  # transposes each 8x8 matrix: a lane's two values go to two rows
    "stmatrix_x4_trans",
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$shared], {$a, $b, $c, $d};",
    ins={"shared": "u32", "a": "u32", "b": "u32", "c": "u32", "d": "u32"},
)
stmatrix_x1_trans = device_op(
    "stmatrix_x1_trans",
    "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [$shared], {$a};",
    ins={"shared": "u32", "a": "u32"},
)
stmatrix_x2_trans = device_op(
    "stmatrix_x2_trans",
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$shared], {$a, $b};",
    ins={"shared": "u32", "a": "u32", "b": "u32"},
)
