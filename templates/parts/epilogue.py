"""The fused epilogue of a convolution as one device operation: a short PTX text per stage, in the workload's order.

It comes for one value, for a pair of neighbouring channels, and for all that a thread holds of a wgmma tile, whose columns
or rows are channels: there, text repeated by an unrolled loop would exceed NVVM's budget, and accumulators end up in memory.

All arithmetic is float32, on the accumulator, before the cast to the output's dtype. NaN is kept by every stage (as in
PyTorch), so that poison in the data shows in the result. Conversions and `max.NaN` need sm_80.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.launch import Float32, Param, Pointer, Scalar
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.workload import Workload

_POINTERS = ("bias", "scale", "shift", "residual")
_SCALARS = {"slope": "leaky_relu_slope", "clip_min": "clip_min", "clip_max": "clip_max"}
_INS = {
    "valid": "i32",
    "k": "i32",
    "offset": "i64",
    **dict.fromkeys(_POINTERS, "u64"),
    **dict.fromkeys(_SCALARS, "f32"),
}

# Stage -> operands loaded from memory: (register prefix, pointer), then the arithmetic on one value, the register {t}.
_STAGES: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "bias": ((("a", "bias"),), "add.f32 {t}, {t}, {a};"),
    "scale_shift": ((("a", "scale"), ("b", "shift")), "fma.rn.f32 {t}, {t}, {a}, {b};"),
    "residual": ((("a", "residual"),), "add.f32 {t}, {t}, {a};"),
    "relu": ((), "max.NaN.f32 {t}, {t}, 0f00000000;"),
    "leaky_relu": ((), "mul.f32 {a}, {t}, $slope; setp.gt.f32 q, {t}, 0f00000000; selp.f32 {t}, {t}, {a}, q;"),
    "clip": ((), "max.NaN.f32 {t}, {t}, $clip_min; min.NaN.f32 {t}, {t}, $clip_max;"),
}
_WIDEN = {  # 16-bit float -> float32, exact; cvt.f32.bf16 would need sm_90
    "float16": "cvt.f32.f16 {to}, {half};",
    "bfloat16": "mov.b32 {to}, {{zero, {half}}};",
}


class Epilogue:
    """What follows the accumulation in a CUDA kernel for `workload`.

    Attributes:
        params: seven launch parameters that a kernel takes and hands on to `pair` or `single`: bias, scale, shift,
            residual (u64 addresses, 0 where unused), slope, clip_min, clip_max (f32, 0 where unused).
        pair: `pair(v0, v1, valid, k, offset, *params) -> (f32, f32)`, the device operation for the accumulators of two
            neighbouring channels. k (i32, even) is the channel of v0, offset (i64, even) its element offset in y and the
            residual; valid (i32) = 0 touches no memory, and the result is then meaningless.
        single: `single(v0, valid, k, offset, *params) -> f32`, the same for one channel, where pairs would not be aligned.
        identity: there are no stages: `pair` and `single` return the accumulators, `fragments` leaves them alone.
        alignments: buffer -> bytes that `pair` needs an address to be a multiple of; `single` needs one element.
    """

    def __init__(self, workload: Workload) -> None:
        stages = tuple(stage.name for stage in workload.epilogue)
        used = {arg.name for arg in workload.signature}
        given = {scalar.name for scalar in workload.scalars}
        self.identity = not stages
        self.params: tuple[Param, ...] = (
            *(Pointer(name, optional=name not in used) for name in _POINTERS),
            *(Scalar(name) if name in given else Float32(0.0) for name in _SCALARS.values()),
        )
        self.alignments = {arg.name: 2 * dtype_of(arg.dtype).nbytes for arg in workload.signature if arg.name in _POINTERS}
        self.pair = _operation(stages, 2, workload.dtype, workload.out_dtype)
        self.single = _operation(stages, 1, workload.dtype, workload.out_dtype)
        self._dtypes = stages, workload.dtype, workload.out_dtype

    def index(self, name: str) -> int:
        """The index of the operand `name` in `params`, and so in a kernel's `*operands`."""
        return [*_POINTERS, *_SCALARS.values()].index(name)

    def fragments(self, octets: int, elements_8_rows: int) -> Callable[..., Any]:
        """A device operation on a thread's part of wgmma's result: `octets` times 8 columns, of rows r and r + 8.

        It changes accumulators in place. Called as (accumulators[4 * octets], columns, row_inside, row_8_inside, k, offset,
        *params): of each 8 columns the thread holds two neighbours in row r, then the same in row r + 8. k (i32, even) is
        the channel of the first, offset (i64, even) its element offset in y and the residual, where rows r and r + 8 are
        `elements_8_rows` apart. `columns` (i32, a multiple of 8, the same in the whole warp) are those that lie inside, from
        the thread's first 8 on; outside of them and of the rows nothing is read. Per-channel operands are loaded once for
        both rows.
        """
        return _fragments_operation(octets, elements_8_rows, *self._dtypes)

    def transposed(self, octets: int, tile: TileRows) -> Callable[..., Any]:
        """A device operation on a thread's part of a wgmma whose rows are channels: `octets` times 8 positions of pixels.

        It changes accumulators in place. Called as (accumulators[4 * octets], channels, rows, columns, position, staged, k,
        offset, *params): of each 8 positions the thread holds two neighbours in channel k, then the same in channel k + 8.
        `channels` (i32) are those from k to the last, of which per-channel operands are read, once; `rows`, `columns` (i32)
        of the tile lie inside of y. A residual is read

        - of 16 bits from shared memory, where it lies like the y that `stmatrix_x4_trans` puts there; `staged` is the lane's
          address for it;
        - of 32 bits from memory: offset (i64) is the element offset of (the tile's first pixel, k), `position` (i32) the
          thread's first position.
        """
        return _transposed_operation(octets, tile, *self._dtypes)


@dataclass(frozen=True)
class TileRows:
    """How positions become pixels: position p is row p // patch_w and column p % patch_w of a tile.

    Attributes:
        patch_w: positions of a row, at most 256.
        row_elements, pixel_elements: of y, from a row of pixels to the next, from a pixel to the next.
    """

    patch_w: int
    row_elements: int
    pixel_elements: int


@functools.cache
def _operation(stages: tuple[str, ...], values: int, dtype: str, out_dtype: str) -> Callable[..., Any]:
    return device_op(
        "epilogue",
        _text(stages, values, dtype, out_dtype),
        ins={**{f"v{i}": "f32" for i in range(values)}, **_INS},
        outs={f"y{i}": "f32" for i in range(values)},
        pure=not any(_STAGES[stage][0] for stage in stages),
    )


def _text(stages: Sequence[str], values: int, dtype: str, out_dtype: str) -> str:
    """The whole PTX. Operands are read into local registers first, results are written last: they may share registers."""
    lines = [
        "{ .reg .pred inside, q; .reg .b64 address; .reg .b32 word; .reg .b16 low, high, zero;",
        ".reg .f32 t0, t1, a0, a1, b0, b1;",
        "setp.ne.s32 inside, $valid, 0; mov.b16 zero, 0;",
        *(f"mov.f32 t{i}, $v{i};" for i in range(values)),
    ]
    for stage in stages:
        loads, arithmetic = _STAGES[stage]
        for prefix, pointer in loads:
            loaded = out_dtype if pointer == "residual" else dtype
            lines.append(_address("address", pointer, loaded))
            lines += _load([f"{prefix}{i}" for i in range(values)], "inside", "address", loaded)
        lines += [arithmetic.format(t=f"t{i}", a=f"a{i}", b=f"b{i}") for i in range(values)]
    lines += [f"mov.f32 $y{i}, t{i};" for i in range(values)]
    return _naming_all([*lines, "}"], _INS)


# --- All accumulators of a thread -------------------------------------------------------------------------------------
_BRANCH_OCTETS = 4  # between two branches: loads in flight at once; without branches ptxas would hoist all of them

_FRAGMENT_INS = {
    "columns": "i32",
    "row_inside": "i32",
    "row_8_inside": "i32",
    **{name: kind for name, kind in _INS.items() if name != "valid"},
}


@functools.cache
def _fragments_operation(
    octets: int, elements_8_rows: int, stages: tuple[str, ...], dtype: str, out_dtype: str
) -> Callable[..., Any]:
    return device_op(
        "epilogue_fragments",
        _fragments_text(octets, elements_8_rows, stages, dtype, out_dtype),
        inout={"acc": ("f32", 4 * octets)},
        ins=_FRAGMENT_INS,
    )


def _fragments_text(octets: int, elements_8_rows: int, stages: Sequence[str], dtype: str, out_dtype: str) -> str:
    lines = [
        "{ .reg .pred column, row, row8, inside, inside8, q; .reg .b64 at_<4>, at_residual8;",
        ".reg .b32 word; .reg .b16 low, high, zero; .reg .f32 a<4>, b<2>;",
        "setp.ne.s32 row, $row_inside, 0; setp.ne.s32 row8, $row_8_inside, 0; mov.b16 zero, 0;",
    ]
    pointers = {pointer for stage in stages for _, pointer in _STAGES[stage][0]}
    at = {pointer: f"at_{number}" for number, pointer in enumerate(_POINTERS)}
    for pointer in sorted(pointers):
        lines.append(_address(at[pointer], pointer, out_dtype if pointer == "residual" else dtype))
    if "residual" in pointers:
        lines.append(f"add.s64 at_residual8, {at['residual']}, {elements_8_rows * dtype_of(out_dtype).nbytes};")
    for octet in range(octets):
        column = 8 * octet
        lines.append(f"setp.gt.s32 column, $columns, {column};")
        if octet % _BRANCH_OCTETS == 0:
            lines.append("@!column bra done;")
        lines += ["and.pred inside, column, row;", "and.pred inside8, column, row8;"] if "residual" in pointers else []
        for stage in stages:
            loads, arithmetic = _STAGES[stage]
            for prefix, pointer in loads:
                if pointer == "residual":
                    offset = column * dtype_of(out_dtype).nbytes
                    lines += _load(["a0", "a1"], "inside", f"{at[pointer]}+{offset}", out_dtype)
                    lines += _load(["a2", "a3"], "inside8", f"at_residual8+{offset}", out_dtype)
                else:
                    address = f"{at[pointer]}+{column * dtype_of(dtype).nbytes}"
                    lines += _load([f"{prefix}0", f"{prefix}1"], "column", address, dtype)
            for i in range(4):
                a = f"a{i}" if stage == "residual" else f"a{i % 2}"
                lines.append(arithmetic.format(t=f"$acc[{4 * octet + i}]", a=a, b=f"b{i % 2}"))
    return _naming_all([*lines, "done: }"], ("acc", *_FRAGMENT_INS))


# --- The same where rows are channels -----------------------------------------------------------------------------------
_TRANSPOSED_INS = {
    "channels": "i32",
    "rows": "i32",
    "columns": "i32",
    "position": "i32",
    "staged": "u32",
    **{name: kind for name, kind in _INS.items() if name != "valid"},
}
_OCTET_BYTES = 8 * 128  # of staged y, 128 bytes a position
_DIVISION_BITS = 20  # p // d == p * ceil(2**20 / d) >> 20 where p * d < 2**20


@functools.cache
def _transposed_operation(
    octets: int, tile: TileRows, stages: tuple[str, ...], dtype: str, out_dtype: str
) -> Callable[..., Any]:
    return device_op(
        "epilogue_transposed",
        _transposed_text(octets, tile, stages, dtype, out_dtype),
        inout={"acc": ("f32", 4 * octets)},
        ins=_TRANSPOSED_INS,
    )


def _transposed_text(octets: int, tile: TileRows, stages: Sequence[str], dtype: str, out_dtype: str) -> str:
    vectors = sorted({pointer for stage in stages for _, pointer in _STAGES[stage][0]} - {"residual"})
    lines = [
        "{ .reg .pred inside, inside8, more, q, in_tile, valid; .reg .b64 at, first; .reg .b16 low, high, zero;",
        ".reg .b32 word, w<4>, p, row, column, stop; .reg .f32 a<4>;",
        *(f".reg .f32 {name}0, {name}1;" for name in vectors),
        "setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside8, $channels, 8; mov.b16 zero, 0;",
        f"mul.lo.s32 stop, $rows, {tile.patch_w};",
    ]
    for name in vectors:
        lines.append(_address("at", name, dtype))
        lines += _load([f"{name}0"], "inside", "at", dtype) + _load(
            [f"{name}1"], "inside8", f"at+{8 * dtype_of(dtype).nbytes}", dtype
        )
    if "residual" in stages and out_dtype == "float32":
        lines.append(_address("first", "residual", out_dtype))
    for octet in range(octets):
        if octet % _BRANCH_OCTETS == 0:
            lines.append(f"setp.gt.s32 more, stop, {8 * octet}; @!more bra done;")
        for stage in stages:
            if stage == "residual":
                lines += _residual_of_octet(octet, octets, tile, out_dtype)
            loads, arithmetic = _STAGES[stage]
            operands = dict(loads)
            for i in range(4):
                a, b = (f"{operands[prefix]}{i // 2}" if prefix in operands else "" for prefix in "ab")
                a = a if a and stage != "residual" else f"a{i}"
                lines.append(arithmetic.format(t=f"$acc[{4 * octet + i}]", a=a, b=b))
    return _naming_all([*lines, "done: }"], ("acc", *_TRANSPOSED_INS))


def _residual_of_octet(octet: int, octets: int, tile: TileRows, out_dtype: str) -> list[str]:
    """Loads a0..a3: two neighbouring positions of channel k, then of channel k + 8."""
    if out_dtype != "float32":
        address, first = f"[$staged+{octet * _OCTET_BYTES}]", 2 * (octet % 2)
        load = "ldmatrix.sync.aligned.m8n8.{}.trans.shared.b16 {{{}}}, {};"
        lines = []
        if octet % 2 == 0:
            number = 4 if octet + 1 < octets else 2
            lines.append(load.format(f"x{number}", ", ".join(f"w{i}" for i in range(number)), address))
        for pair in range(2):
            lines.append(f"mov.b32 {{low, high}}, w{first + pair};")
            lines += [_WIDEN[out_dtype].format(to=f"a{2 * pair + i}", half=half) for i, half in enumerate(("low", "high"))]
        return lines
    lines = []
    for neighbour in range(2):
        lines += _address_of_position(8 * octet + neighbour, tile)
        for half, channel in enumerate(("inside", "inside8")):
            lines.append(f"and.pred valid, in_tile, {channel};")
            lines += _load([f"a{2 * half + neighbour}"], "valid", f"at+{32 * half}", out_dtype)
    return lines


def _address_of_position(position: int, tile: TileRows) -> list[str]:
    """Computes `at` of the thread's `position`, of 32-bit values, from `first`, and whether it is `in_tile`."""
    return [
        f"add.s32 p, $position, {position}; mul.lo.s32 row, p, {-(-(2**_DIVISION_BITS) // tile.patch_w)};",
        f"shr.u32 row, row, {_DIVISION_BITS}; mad.lo.s32 column, row, {-tile.patch_w}, p;",
        "setp.lt.s32 in_tile, row, $rows; setp.lt.and.s32 in_tile, column, $columns, in_tile;",
        f"cvt.s64.s32 at, row; mad.lo.s64 at, at, {4 * tile.row_elements}, first;",
        f"mad.wide.s32 at, column, {4 * tile.pixel_elements}, at;",
    ]


@functools.cache
def store_transposed(octets: int, tile: TileRows) -> Callable[..., Any]:
    """Stores the accumulators that `Epilogue.transposed` takes as float32, in sectors of 32 bytes.

    Called as (accumulators[4 * octets], y, channels, rows, columns, position, offset): y's address, the rest as there.
    """
    lines = [
        "{ .reg .pred inside, inside8, more, in_tile, valid; .reg .b64 at, first; .reg .b32 p, row, column, stop;",
        "setp.gt.s32 inside, $channels, 0; setp.gt.s32 inside8, $channels, 8; mad.lo.s64 first, $offset, 4, $y;",
        f"mul.lo.s32 stop, $rows, {tile.patch_w};",
    ]
    for octet in range(octets):
        if octet % _BRANCH_OCTETS == 0:
            lines.append(f"setp.gt.s32 more, stop, {8 * octet}; @!more bra done;")
        for neighbour in range(2):
            lines += _address_of_position(8 * octet + neighbour, tile)
            for half, channel in enumerate(("inside", "inside8")):
                value = f"$acc[{4 * octet + 2 * half + neighbour}]"
                lines.append(f"and.pred valid, in_tile, {channel}; @valid st.global.f32 [at+{32 * half}], {value};")
    return device_op(
        "store_transposed",
        "\n".join([*lines, "done: }"]),
        inout={"acc": ("f32", 4 * octets)},
        ins={"y": "u64", "channels": "i32", "rows": "i32", "columns": "i32", "position": "i32", "offset": "i64"},
    )


# --- What all share --------------------------------------------------------------------------------------------------
def _naming_all(lines: list[str], operands: Iterable[str]) -> str:
    """The text, and a comment with the operands that it does not name: every one must be; there it costs nothing."""
    unused = " ".join(f"${name}" for name in operands if not any(f"${name}" in line for line in lines))
    return "\n".join(lines) + f" // unused: {unused}"


def _address(register: str, pointer: str, dtype: str) -> str:
    """Computes the address of the first channel's element of a per-channel vector or the residual."""
    index, multiply = ("$offset", "mad.lo.s64") if pointer == "residual" else ("$k", "mad.wide.s32")
    return f"{multiply} {register}, {index}, {dtype_of(dtype).nbytes}, ${pointer};"


def _load(registers: Sequence[str], inside: str, address: str, dtype: str) -> list[str]:
    """Loads one element, or two neighbours, as float32; zeros where the predicate `inside` is false.

    The non-coherent path lets loads move up past the stores of y. It is right even where the residual is y itself: an
    element is read by the one thread that writes it, before it does.
    """
    single = len(registers) == 1
    if dtype == "float32":
        vector, target = ("", registers[0]) if single else (".v2", f"{{{', '.join(registers)}}}")
        zeros = [f"mov.f32 {register}, 0f00000000;" for register in registers]
        return [*zeros, f"@{inside} ld.global.nc{vector}.f32 {target}, [{address}];"]
    if single:
        lines = [f"mov.b16 low, zero; @{inside} ld.global.nc.b16 low, [{address}];"]
    else:
        lines = [f"mov.b32 word, 0; @{inside} ld.global.nc.b32 word, [{address}]; mov.b32 {{low, high}}, word;"]
    return lines + [_WIDEN[dtype].format(to=register, half=half) for register, half in zip(registers, ("low", "high"))]
