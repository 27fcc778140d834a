"""float32 by three TF32 products: the split and its error, the launches emulated, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import Array, numpy_conv2d
from hypothesis import given
from hypothesis import strategies as st

import schedsearch.templates.conv2d.tf32x3 as module
import schedsearch.templates.conv2d.wgmma as inner
import schedsearch.templates.conv2d.wgmma_loads as inner_loads
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d import wgmma_store
from schedsearch.templates.parts import addressing, gather, pipeline, sharing, store, store_words, walk, wgmma
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = module.Conv2dTf32x3()
SMALL = dict(
    warpgroups=1, bn=32, bk=32, stages=3, split_k=1, cluster_m=1, cluster_n=1, persistent=False, blocks_per_sm=1,
    schedule="together", band=1, l2_promotion=256,
)  # fmt: skip
LAYER = Workload.conv2d(n=2, h=7, w=6, c=20, k=24, r=2, s=3, padding=1, dtype="float32")


def nearest(values: Array) -> Array:
    """float32 rounded to TF32, halves away from zero."""
    bits = values.view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def split(values: Array) -> tuple[Array, Array]:
    """What `parts.tf32.split` does to finite numbers that do not overflow."""
    high = nearest(values)
    return high, nearest(values - high)


class Tf32:
    """Stands in for `parts.tf32`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def load_global_v4(self, address: int) -> tuple[int, ...]:
        return tuple(int(word) for word in self._memory.at(address, 16).view(np.uint32))

    @staticmethod
    def split(word: int) -> tuple[int, ...]:
        return tuple(int(part.view(np.uint32)[0]) for part in split(np.array([word], np.uint32).view(np.float32)))


@given(
    numbers=st.lists(
        st.tuples(*[st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)] * 2), min_size=12, max_size=40
    )
)
def test_the_error_of_three_products_is_within_that_of_float32_sums(numbers: list[tuple[float, float]]) -> None:
    x, w = np.array([pair for pair in numbers if min(map(abs, pair)) > 2.0**-60 or 0 in pair], np.float32).reshape(-1, 2).T
    (x_high, x_low), (w_high, w_low) = split(np.ascontiguousarray(x)), split(np.ascontiguousarray(w))
    exact = x.astype(np.float64) * w
    products = sum(a.astype(np.float64) * b for a, b in ((x_low, w_high), (x_high, w_low), (x_high, w_high)))
    assert (np.abs(x_low) <= 2.0**-11 * np.abs(x)).all()
    assert (np.abs(products - exact) <= module.LEAST_PRODUCTS * 2.0**-24 * np.abs(exact)).all()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "channels that end within a step": ({}, SMALL),
    "one part for each step": ({"c": 32, "k": 8}, {**SMALL, "bn": 16}),
    "one pixel, one image": ({"n": 1, "h": 1, "w": 1, "c": 12, "r": 1, "s": 1, "padding": 0}, SMALL),
    "blocks of channels": ({"c": 32, "k": 32, "layout": "NCHW16c", "weight_layout": "OIHW16o16i"}, {**SMALL, "bk": 16}),
    "strided, split by 2": ({"stride": (2, 1), "dilation": (1, 2), "padding": (2, 0, 1, 3)}, {**SMALL, "split_k": 2}),
}


@pytest.mark.parametrize(("changes", "config"), CASES.values(), ids=CASES)
@pytest.mark.mostly_long(2)
def test_the_launches_compute_float32(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], config: dict[str, Any]
) -> None:
    workload, memory = LAYER.replace(**changes), Memory()
    emulator = ClusterEmulator(memory, lambda value, *_: value, late=True)
    parts = (addressing, gather, pipeline, sharing, store, store_words, walk, wgmma)
    emulator.stand_in(monkeypatch, module, inner, inner_loads, wgmma_store, *parts)
    monkeypatch.setattr(module, "tf32", Tf32(memory))
    stages = {"fragments": lambda *_, **__: None, "words_ahead": lambda *_: 0}
    epilogue = SimpleNamespace(identity=True, params=(), alignments={}, **stages)
    monkeypatch.setattr(inner, "Epilogue", lambda _: epilogue)
    source = TEMPLATE.kernel(workload, H200, Config(config))
    rng = np.random.default_rng(3)
    arrays = {spec.name: rng.standard_normal(spec.shape, dtype=np.float32) for spec in workload.signature}
    y = np.full(workload.output.shape, np.nan, np.float32)
    spaces = {name: np.full(nbytes // 4, np.nan, np.float32) for name, nbytes in source.workspaces.items()}
    buffers = {name: memory.add(array) for name, array in {**arrays, **spaces, "y": y}.items()}
    x_split, _ = module.split_workload(workload).signature
    by_taps = (workload.k, -1, 3 * workload.c) if workload.layout == "NHWC" else (-1,)
    tensors = {
        "x_split": spaces["x_split"].reshape(x_split.shape),
        "weight_split": spaces["weight_split"].reshape(by_taps),
        "y": y,
    }
    for step in source.steps:
        emulator.run(step, buffers, 2, tensors)
    plain_workload = workload.replace(layout="NHWC", weight_layout="OHWI")
    layouts = {"x": Layout.parse(workload.layout), "weight": Layout.parse(workload.weight_layout)}
    sizes = {"N": workload.n, "C": workload.c, "H": workload.h, "W": workload.w}
    filter_sizes = {"O": workload.k, "I": workload.c, "H": workload.r, "W": workload.s}
    logical = {
        "x": layouts["x"].unpack(arrays["x"], sizes, "NHWC"),
        "weight": layouts["weight"].unpack(arrays["weight"], filter_sizes, "OHWI"),
    }
    expected = layouts["x"].pack(numpy_conv2d(plain_workload, logical), "NHWC")
    magnitude = layouts["x"].pack(numpy_conv2d(plain_workload, logical, absolute=True), "NHWC")
    assert (np.abs(y - expected) <= 2.0**-21 * magnitude).all()
    high = {name: nearest(array) for name, array in logical.items()}
    one_product = layouts["x"].pack(numpy_conv2d(plain_workload, high), "NHWC")
    assert np.abs(one_product - expected).max() > 50 * np.abs(y - expected).max()  # one product


@pytest.mark.long
def test_weights_are_split_once_if_they_are_prepared() -> None:
    config = TEMPLATE.default(LAYER, H200, TEMPLATE.space(LAYER, H200))
    built = compile_source(TEMPLATE.kernel(LAYER.replace(epilogue=["bias", "relu"]), H200, config), H200)
    assert built.artifact.plan.constants == ("weight",)
    assert built.artifact.plan.workspaces == {"x_split": 3 * 4 * 2 * 7 * 6 * 20, "weight_split": 3 * 4 * 24 * 2 * 3 * 20}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "tf32"}, ["precision is tf32", "conv2d_wgmma"]),
        ({"dtype": "float16"}, ["dtype is float16", "float32"]),
        ({"c": 6}, ["c is 6", "multiples of 4"]),
        ({"c": 8, "r": 1, "s": 1, "padding": 0}, ["8 products", "at least 12"]),
        ({"layout": "NCHW"}, ["layout", "NHWC"]),
        ({"k": 20}, ["k is 20", "multiples of 8"]),
    ],
)
def test_what_it_cannot_compute_is_refused_with_a_reason(changes: dict[str, Any], words: list[str]) -> None:
    reason = TEMPLATE.validate(LAYER.replace(**changes), H200)
    assert reason is not None and all(word in reason for word in words), reason
