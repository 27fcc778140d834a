"""conv2d_wgmma with TF32 and float8: its own source runs in the emulator, and expected values are float64 sums."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import Array, numpy_conv2d
from hopper_emulator import multiplied
from test_conv2d_wgmma import instructions

import schedsearch.templates.conv2d.wgmma as module
import schedsearch.templates.conv2d.wgmma_loads as loads
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.launch import TensorMap
from schedsearch.ops import decode, encode
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d import wgmma_store
from schedsearch.templates.parts import addressing, gather, pipeline, sharing, store, store_words, walk, wgmma
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200, A100 = PRESETS["h200"], PRESETS["a100"]
TEMPLATE = module.Conv2dWgmma()
SMALL = dict(
    warpgroups=1, bn=32, bk=32, stages=3, split_k=1, cluster_m=1, cluster_n=1, persistent=False, blocks_per_sm=1,
    schedule="together", band=1, l2_promotion=256,
)  # fmt: skip
SHAPE = {"n": 2, "h": 7, "w": 6, "c": 48, "k": 48, "r": 2, "s": 3, "padding": 1}
TF32 = {**SHAPE, "dtype": "float32", "precision": "tf32"}
E4M3 = {**SHAPE, "dtype": "float8_e4m3"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TF32": (TF32, SMALL),
    "TF32, channels and columns that end within a step": (
        {**TF32, "c": 20, "k": 40, "stride": (2, 1), "dilation": (1, 2), "padding": (2, 0, 1, 3)},
        {**SMALL, "bk": 16, "warpgroups": 2},
    ),
    "TF32, few channels": ({**TF32, "c": 4, "k": 8}, {**SMALL, "bn": 16, "bk": 8}),
    "TF32, split by 2": (TF32, {**SMALL, "split_k": 2}),
    "TF32, two rows share weights": ({**TF32, "n": 4}, {**SMALL, "cluster_m": 2, "stages": 2}),
    "E4M3": (E4M3, {**SMALL, "bk": 64}),
    "E5M2 x E4M3, fp32 out": (
        {**E4M3, "dtype": "float8_e5m2", "weight_dtype": "float8_e4m3", "out_dtype": "float32"},
        {**SMALL, "bk": 128, "warpgroups": 2},
    ),
    "E4M3 x E5M2, channels that end within a step, split by 2": (
        {**E4M3, "weight_dtype": "float8_e5m2", "c": 80, "k": 24},
        {**SMALL, "bk": 64, "split_k": 2},
    ),
}


class Scales:
    """Stands in for the fused epilogue, which is PTX: accumulators are scaled by 1/4, as `dequantise` would."""

    alignments: Mapping[str, int] = MappingProxyType({})
    params = tuple(SimpleNamespace(kind="pointer", buffer="y") for _ in range(7))

    def __init__(self, workload: Workload) -> None:
        self.identity = not workload.epilogue

    def words_ahead(self, octets: int, interleaved: bool) -> int:
        return 0

    def fragments(self, octets: int, row_elements: int, interleaved: bool, *_: Any, ahead: bool) -> Any:
        assert not interleaved

        def fuse(acc: Any, *_: Any) -> None:
            acc[:] = [value / 4 for value in acc]

        return fuse


def factors(workload: Workload) -> dict[str, Array]:
    """Random numbers, normally distributed, in storage types."""
    rng = np.random.default_rng(7)
    return {
        spec.name: encode(rng.standard_normal(spec.shape).astype(np.float32), spec.dtype) for spec in workload.signature[:2]
    }


def right(workload: Workload, raw: Mapping[str, Array]) -> Array:
    values = {name: decode(raw[name], dtype) for name, dtype in (("x", workload.dtype), ("weight", workload.weight_dtype))}
    if workload.dtype == "float32":
        values = {name: multiplied(array, "float32") for name, array in values.items()}
    return numpy_conv2d(workload.replace(epilogue=()), values)


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "dequantise"])
@pytest.mark.parametrize(("shape", "config"), CASES.values(), ids=CASES)
@pytest.mark.mostly_long(5)
def test_the_kernel_computes_the_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], scaled: bool, late: bool
) -> None:
    if scaled and (late or "float8" not in shape["dtype"]):
        return
    stage = {"dequantise": {"to": shape.get("out_dtype", "float16")}}
    workload = Workload.conv2d(**shape).replace(epilogue=[stage] if scaled else [])
    emulator = ClusterEmulator(Memory(), lambda value, *_: value, late)
    parts = (addressing, gather, pipeline, sharing, store, store_words, walk, wgmma)
    emulator.stand_in(monkeypatch, module, loads, wgmma_store, *parts)
    monkeypatch.setattr(module, "Epilogue", Scales)
    raw = factors(workload)
    y = np.full(workload.output.shape, np.nan, np.float32 if workload.out_dtype == "float32" else np.float16)
    (step,) = TEMPLATE.kernel(workload, H200, Config(config)).steps
    by_taps = raw["weight"].reshape(workload.k, -1, workload.c)
    emulator.run(step, {"y": emulator.memory.add(y)}, 2, {"x": raw["x"], "weight": by_taps, "y": y})
    expected = right(workload, raw) / (4 if scaled else 1)
    tolerance = 2.0**-11 if workload.out_dtype == "float16" else 2.0**-22
    cancelled = 2.0**-18  # sums of a split tile are rounded before they are added
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=cancelled)
    if workload.dtype == "float32":  # the numbers are such that it matters how many bits count
        exact = numpy_conv2d(workload, raw)
        assert np.abs(exact - expected).max() > 100 * np.abs(y - expected).max()


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2", "float32"])
def test_every_number_of_a_format_is_multiplied_as_what_it_is(dtype: str) -> None:
    """The emulator's own numbers: all 256 of a float8, and TF32 next to float32, against the formats' definitions."""
    if dtype == "float32":
        numbers = np.array([1.0, 1 + 2**-10, 1 + 2**-11, -1 - 2**-10 - 2**-23, 2.0**100 * (1 + 2**-13)], np.float32)
        np.testing.assert_array_equal(multiplied(numbers, dtype), [1.0, 1 + 2**-10, 1.0, -1 - 2**-10, 2.0**100])
        return
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8)
    theirs = every.view(ml_dtypes.float8_e4m3fn if dtype == "float8_e4m3" else ml_dtypes.float8_e5m2).astype(np.float64)
    np.testing.assert_array_equal(multiplied(every, dtype), theirs)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        (TF32, {**SMALL, "bn": 64}),
        ({**E4M3, "weight_dtype": "float8_e5m2", "epilogue": ["bias", {"dequantise": {"to": "bfloat16"}}, "relu"]}, SMALL),
    ],
)
@pytest.mark.mostly_long(2)
def test_it_compiles_to_one_instruction_for_each_32_bytes_of_k(changes: dict[str, Any], config: dict[str, Any]) -> None:
    workload = Workload.conv2d(**changes)
    source = TEMPLATE.kernel(workload, H200, Config(config))
    maps = [param for param in source.steps[0].params if isinstance(param, TensorMap)]
    assert [each.dtype for each in maps[:2]] == [workload.dtype, workload.weight_dtype]
    code = instructions(compile_source(source, H200).artifact.code)  # refuses spills and serialised wgmma
    found = {instruction & 0xFFF for instruction in code}
    assert found & ({0x9F0} if workload.dtype == "float32" else {0x9F3})  # HGMMA, QGMMA


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({"dtype": "float32"}, H200, ["precision fp32", "allowed: tf32"]),
        ({**TF32, "c": 6}, H200, ["c is 6", "multiples of 4"]),
        ({**E4M3, "c": 24}, H200, ["c is 24", "multiples of 16"]),
        (E4M3, A100, ["needs compute capability 9.0, got 8.0", "convert x and weight to float16"]),
    ],
)
def test_what_it_cannot_compute_is_refused_with_a_reason(changes: dict[str, Any], target: Any, words: list[str]) -> None:
    reason = TEMPLATE.validate(Workload.conv2d(**{**SHAPE, **changes}), target)
    assert reason is not None and all(word in reason for word in words), reason


@pytest.mark.parametrize("changes", [TF32, E4M3])
def test_the_space_has_a_default_whose_steps_are_at_most_128_bytes_wide(changes: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**changes, "c": 256, "k": 256, "h": 28, "w": 28})
    space = TEMPLATE.space(workload, H200)
    config = TEMPLATE.default(workload, H200, space)
    assert not space.check(config)
    assert config["bk"] == (32 if workload.dtype == "float32" else 128)
