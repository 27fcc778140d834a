"""conv2d_halo stores y through depth_to_space: its kernel in the emulator, its limits, its machine code."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import integers, numpy_conv2d
from halo_emulation import MODULES, emulator_of

import schedsearch.templates.conv2d.halo as module
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.target import PRESETS
from schedsearch.templates.parts import epilogue_fragments
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = module.Conv2dHalo()
SHAPE: dict[str, Any] = {"n": 2, "h": 7, "w": 9, "c": 24, "k": 64, "r": 3, "s": 3, "padding": 1}
TOGETHER = {
    "tile_h": 3, "tile_w": 5, "channel_groups": 1, "row_groups": 1, "patches": 2, "weight_stages": 3, "schedule": "together",
    "blocks_per_sm": 1, "split_k": 1,
}  # fmt: skip
IN_TURN = {**TOGETHER, "row_groups": 2, "schedule": "in_turn", "weight_stages": 0}


def shuffle(block: int, mode: str) -> list[Any]:
    return [{"depth_to_space": {"block": block, "mode": mode}}]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CRD, segments of 32 channels": ({"epilogue": shuffle(2, "CRD")}, TOGETHER),
    "DCR, segments of 64, two columns of tiles": ({"k": 128, "epilogue": shuffle(2, "DCR")}, TOGETHER),
    "CRD, a warpgroup for each half": ({"k": 128, "epilogue": shuffle(2, "CRD")}, {**TOGETHER, "channel_groups": 2}),
    "CRD, in turn, staged in the patch": ({"epilogue": shuffle(2, "CRD")}, IN_TURN),
    "DCR, segments of 16 channels": ({"epilogue": shuffle(4, "DCR"), "n": 1}, {**TOGETHER, "row_groups": 2}),
    "DCR, the last warpgroup has too few channels": ({"k": 96, "epilogue": shuffle(2, "DCR"), "n": 1}, TOGETHER),
}


class Bias:
    """Stands in for `Epilogue`: adds the channel's number modulo 5."""

    identity = False
    params = tuple(SimpleNamespace(kind="i64", value=0) for _ in range(7))

    def __init__(self, *_: Any) -> None:
        self.alignments: dict[str, int] = {}

    def index(self, name: str) -> int:
        return 3

    def transposed(self, octets: int, tile: Any) -> Any:
        def fuse(
            acc: list[Any], channels: int, rows: int, columns: int, position: int, staged: int, k: int, *_: Any
        ) -> None:
            for number in range(4 * octets):
                acc[number] += (k + number // 2 % 2 * tile.second * tile.step) % 5

        return fuse


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize(("shape", "config"), CASES.values(), ids=CASES)
@pytest.mark.mostly_long(3)
def test_every_pixel_gets_its_channels(monkeypatch: pytest.MonkeyPatch, shape: Any, config: Any, late: bool) -> None:
    workload, memory = Workload.conv2d(**{**SHAPE, **shape}), Memory()
    assert TEMPLATE.validate(workload, H200) is None
    emulator = emulator_of(memory, config, late)
    emulator.stand_in(monkeypatch, *MODULES, epilogue_fragments)
    monkeypatch.setattr(module, "Epilogue", Bias)
    arrays = integers(workload, np.random.default_rng(0))
    y = np.full(workload.output.shape, np.nan, np.float16)
    step = TEMPLATE.kernel(workload, dataclasses.replace(H200, sms=2), Config(config)).steps[0]
    tensors = {**{name: array.astype(np.float16) for name, array in arrays.items()}, "y": y}
    views = {}
    for param in (each for each in step.params if each.kind == "tensor_map"):
        strides = (*param.strides_bytes[::-1], 2)
        views[param.buffer] = np.lib.stride_tricks.as_strided(tensors[param.buffer], param.dims[::-1], strides)
    emulator.run(step, {name: memory.add(array) for name, array in tensors.items()}, 2, views)
    biased = workload.replace(epilogue=["bias", *workload.epilogue])
    right = numpy_conv2d(biased, {**arrays, "bias": np.arange(workload.k) % 5})
    np.testing.assert_array_equal(y, right.astype(np.float16))


@pytest.mark.long
@pytest.mark.parametrize("shape", [{"k": 128}, {"h": 1440, "w": 2560, "c": 32}], ids=str)
def test_the_layers_of_a_network_that_enlarges_images_compile(shape: dict[str, Any]) -> None:
    layer = {**SHAPE, "n": 1, "h": 720, "w": 1280, "c": 64, "epilogue": ["bias", *shuffle(2, "CRD")]}
    workload = Workload.conv2d(**{**layer, **shape})
    assert TEMPLATE.validate(workload, H200) is None
    config = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
    resources = compile_source(TEMPLATE.kernel(workload, H200, config), H200).resources
    assert (resources.local_bytes, resources.spill_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out_dtype": "float32", "epilogue": shuffle(2, "DCR")}, "outputs of 2 bytes or 1"),
        ({"k": 48, "epilogue": shuffle(2, "DCR")}, "k / block of depth_to_space is 24; allowed: multiples of 16"),
        ({"k": 192, "epilogue": shuffle(2, "CRD")}, "mode CRD is 48; allowed: 16, 32 and multiples of 64"),
        ({"epilogue": ["residual", *shuffle(2, "DCR")]}, "depth_to_space after residual"),
        ({"groups": 2, "c": 32, "epilogue": shuffle(2, "DCR")}, "in 2 groups; allowed: outputs of 16 bits, one group"),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_store(change: dict[str, Any], words: str) -> None:
    assert words in str(TEMPLATE.validate(Workload.conv2d(**{**SHAPE, **change}), H200))
