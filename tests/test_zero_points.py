"""The correction for the zero point of x: classes of borders, the table of weights, and its device operations.

The expected table is computed in int64 by visiting every tap of every output pixel."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from numba import cuda, types

from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.backend.ops import operands_and_text
from schedsearch.constructors.convolutions import conv2d
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.layout import Layout
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts import addressing, ptx, zero_points
from schedsearch.templates.parts.zero_points import TABLE, ZeroPoint, zero_point_problem
from schedsearch.testing.emulator import Emulator, Memory
from schedsearch.workload import Workload

LAYER: dict[str, Any] = {"n": 2, "h": 7, "w": 6, "c": 16, "k": 8, "r": 3, "s": 2, "dtype": "int8", "zero_points": ["x"]}
LAYERS: dict[str, dict[str, Any]] = {
    "no padding, one class": {"padding": 0},
    "the same padding on all sides": {"padding": 1, "weight_dtype": "uint8"},
    "asymmetric padding, strides": {"padding": (2, 0, 1, 3), "stride": (2, 3)},
    "a dilated kernel that is larger than the image": {"padding": (4, 4, 5, 5), "dilation": (4, 5), "r": 3, "s": 3},
    "padding without a tap on the image": {"padding": (5, 0, 4, 0)},
    "channels of groups one by one": {"padding": 1, "c": 24, "groups": 4},
    "blocks": {"padding": 1, "layout": "NCHW8c", "k": 16},
    "OIHW": {"padding": 1, "weight_layout": "OIHW"},
    "an image of one row": {"h": 1, "r": 1, "padding": (0, 1, 0, 0)},
}


def layer(change: dict[str, Any]) -> Workload:
    return conv2d(**{**LAYER, **change})


def sums_of_valid_taps(w: Workload, weight: Any) -> Any:
    """[p, q, k]: the sum of weights whose taps lie inside of the image; weight is OHWI."""
    out_h, out_w = w.definition.output_hw(w.params)  # type: ignore[attr-defined]
    sums = np.zeros((out_h, out_w, w.k), np.int64)
    for p, q, r, s in np.ndindex(out_h, out_w, w.r, w.s):
        h, v = (at * w.stride[a] - w.padding[a] + tap * w.dilation[a] for a, (at, tap) in enumerate(((p, r), (q, s))))
        if 0 <= h < w.h and 0 <= v < w.w:
            sums[p, q] += weight[:, r, s].sum(axis=-1, dtype=np.int64)
    return sums


@pytest.mark.parametrize("change", LAYERS.values(), ids=LAYERS)
def test_the_entry_of_every_pixel_is_the_sum_of_its_valid_taps(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    w, emulator = layer(change), Emulator(Memory(), lambda value, *_: value, late_copies=False)
    emulator.stand_in(monkeypatch, addressing, zero_points)
    zero = ZeroPoint.of(w)
    assert zero is not None and zero_point_problem(w) is None
    limits = np.iinfo(w.weight_dtype)
    weight = np.random.default_rng(0).integers(limits.min, limits.max + 1, (w.k, w.r, w.s, w.c // w.groups))
    table = np.zeros((zero.classes, w.k), np.int32)
    packed = Layout.parse(w.weight_layout).pack(weight.astype(w.weight_dtype), "OHWI")
    emulator.run(zero.step(), {"weight": emulator.memory.add(packed), TABLE: emulator.memory.add(table)}, 2)
    place, expected = zero.places(), sums_of_valid_taps(w, weight)
    pixels = w.n * expected.shape[0] * expected.shape[1]
    found = [table.reshape(-1)[place(pixel) : place(pixel) + w.k] for pixel in range(pixels)]
    np.testing.assert_array_equal(np.array(found).reshape(w.n, *expected.shape), np.stack([expected] * w.n))


def test_inner_pixels_are_one_class() -> None:
    zero = ZeroPoint.of(layer({"h": 56, "w": 56, "r": 3, "s": 3, "padding": 1}))
    assert zero is not None and (zero.rows.count, zero.columns.count) == (3, 3)
    strided = ZeroPoint.of(layer({"h": 224, "w": 224, "r": 7, "s": 7, "padding": 3, "stride": 2}))
    assert strided is not None and (strided.rows.count, strided.columns.count) == (4, 4)  # 0, 1 | inner | 111


def test_what_has_no_correction() -> None:
    assert ZeroPoint.of(layer({"zero_points": []})) is None
    assert "weight has a zero point" in str(zero_point_problem(layer({"zero_points": ["weight"]})))
    large = {"h": 200, "w": 200, "padding": 40, "r": 81, "s": 81}
    assert "6561 classes of borders; allowed: up to 1024" in str(zero_point_problem(layer(large)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_fragment_is_corrected_by_the_entries_of_its_channels(interleaved: bool) -> None:
    """Reads the text of the operation for 6 octets: which entry, of which row, each accumulator is corrected by.

    PTX ISA, wgmma's D fragment: a thread's values of an octet are columns 0 and 1 of row r, then of row r + 8. If columns
    are interleaved, column j of octet o (of two) is channel 2 j + o of 16.
    """
    text = operands_and_text(zero_points.correct_fragments(6, interleaved))[1]  # type: ignore[index]
    accumulators = re.findall(r"mad\.lo\.s32 (\$\d+),", text)
    assert len(accumulators) == len(set(accumulators)) == 24
    registers: dict[str, tuple[str, int]] = {}
    found = []
    for line in re.findall(r"ld\.global\.nc\.v\d\.b32 \{+[^}]*\}+, \[[^]]*\]|mad\.lo\.s32 [^;]*", text):
        if line.startswith("ld"):
            names, base, offset = re.fullmatch(r"ld\S* \{+([^}]*)\}+, \[(\w+)\+(\d+)\]", line).groups()  # type: ignore[union-attr]
            registers |= {name: (base, int(offset) // 4 + i) for i, name in enumerate(names.split(", "))}
        else:
            found.append(registers[line.split(", ")[2]])
    expected = []
    for octet, row, column in itertools.product(range(6), ("at", "at8"), range(2)):
        expected.append((row, 16 * (octet // 2) + 2 * column + octet % 2 if interleaved else 8 * octet + column))
    order = range(24)
    assert [found[i] for i in order] == expected
    assert text.count("bra") == 2  # the loads of 4 octets are in flight at once


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_values_of_neighbouring_channels_are_corrected_by_one_load(arch: str) -> None:
    two, four = ZeroPoint.values(2), ZeroPoint.values(4)

    def kernel(y: Any, table: Any) -> None:
        at = types.int32(cuda.threadIdx.x)
        a, b = two(at, at, 1, at, 0, table, types.float32(3))
        c, d, e, f = four(a, b, a, b, 1, at, 0, table, types.float32(3))
        ptx.store_global_v4(y, c, d, e, f)

    step = KernelStep(kernel, (Pointer("y"), Pointer("table")), Grid(1), 32)
    text = _compile_to_ptx(step, "kernel", arch)
    assert len(re.findall(r"ld\.global\.nc\.v2", text)) == len(re.findall(r"ld\.global\.nc\.v4", text)) == 1
    assert text.count("mad.lo.s32") == 6


def test_the_step_of_the_table_compiles_and_is_constant() -> None:
    zero = ZeroPoint.of(layer({"padding": 1}))
    assert zero is not None
    source = KernelSource("cuda", "native", (zero.step(),), zero.workspaces, zero.alignments)
    for target in (PRESETS["h200"], PRESETS["a100"]):
        compiled = compile_source(source, target)
        assert compiled.resources.local_bytes == 0 and compiled.artifact.plan.constants == ("weight",)
