"""The templates of conv2d on a GPU: results of small integers are right in every bit.

The other tests of the templates have what only one of them can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import integer_model
import numpy as np
import pytest
import test_conv2d_few_outputs as few_outputs
import test_conv2d_halo as halo
import test_conv2d_halo_stores as halo_stores
import test_conv2d_integers as wgmma_integers
import test_conv2d_mma as mma
import test_conv2d_simt as simt
import test_conv2d_stem as stem
import test_conv2d_stem_integers as stem_integers
import test_conv2d_stores as stores
import test_conv2d_wgmma as wgmma
from conv2d_numpy import KINDS, check_schedules, exactly

from schedsearch.constructors.convolutions import conv2d
from schedsearch.device.detect import detect
from schedsearch.template import load_template
from schedsearch.workload import Workload

SHAPES: dict[str, tuple[Callable[[np.random.Generator], Workload], int, int]] = {  # template -> draw, seed, shapes
    "conv2d_wgmma": (wgmma.random_workload, 21, 60),
    "conv2d_halo": (halo.random_workload, 31, 60),
    "conv2d_stem": (stem.random_workload, 51, 40),
    "conv2d_mma": (mma.random_workload, 61, 40),
}
RGB_7X7, RGB_3X3 = stem.RGB_7X7, stem.RGB_3X3
FIRST_LAYERS = {  # template -> first layers of networks
    "conv2d_stem": [
        RGB_7X7.replace(epilogue=["bias", "relu"]),
        RGB_7X7.replace(n=32),
        RGB_3X3.replace(epilogue=["bias", "residual"]),
        RGB_3X3.replace(n=8, stride=2, k=32, out_dtype="float32"),
        RGB_3X3.replace(c=1, k=16),
        RGB_3X3.replace(c=4, k=96, dtype="bfloat16", out_dtype="bfloat16"),
        RGB_3X3.replace(n=2, h=299, w=299, stride=2, k=32, padding=0),
        RGB_3X3.replace(c=20, r=5, s=5, padding=2, w=61),
    ],
}
PIXELS = conv2d(n=3, h=13, w=11, c=58, k=58, r=1, s=1)
AWKWARD_LAYERS = {  # template -> layers whose channels fill no 16 bytes: 4, 2 and 1 at once
    "conv2d_stem": [
        PIXELS.replace(epilogue=["bias", "residual", "relu"]),
        PIXELS.replace(c=24, k=255, epilogue=["bias"]),
        PIXELS.replace(c=36, k=36, r=3, s=3, padding=1, w=56),
        PIXELS.replace(c=17, k=17, r=3, s=3, padding=1, epilogue=["bias", "residual"]),
        PIXELS.replace(c=6, k=20, r=5, s=5, padding=2, stride=2, h=40, w=40, slice_of=33),
    ],
    "conv2d_wgmma": [
        PIXELS.replace(c=64, k=255, epilogue=["bias", "residual", "relu"]),
        PIXELS.replace(c=24, k=58, slice_of=116),
        PIXELS.replace(c=128, k=76, r=3, s=3, padding=1, epilogue=["scale_shift", "clip"]),
        PIXELS.replace(n=64, h=1, w=1, c=1024, k=1001, epilogue=["bias"]),
    ],
}
BYTES_7X7, BYTES_3X3 = stem_integers.RGB_7X7, stem_integers.RGB_3X3
INTEGER_LAYERS: dict[str, list[dict[str, Any]]] = {
    "conv2d_wgmma": list(wgmma_integers.LAYERS.values()),
    "conv2d_stem": [
        {**BYTES_7X7, "epilogue": stem_integers.INT8},
        {**BYTES_7X7, "n": 32, "epilogue": stem_integers.SUM_OF_TWO},
        {**BYTES_3X3, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "epilogue": stem_integers.INT8},
        {**BYTES_3X3, "n": 8, "stride": 2, "k": 32},
        {**BYTES_3X3, "c": 1, "k": 16, "dtype": "uint8", "epilogue": stem_integers.UINT8},
        {**BYTES_3X3, "c": 4, "k": 96, "epilogue": ["bias", {"dequantise": {"to": "float16"}}]},
        {**BYTES_7X7, "n": 2, "h": 61, "w": 59, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"],
         "epilogue": stem_integers.UINT8},
    ],
}  # fmt: skip


def float_cases() -> list[Any]:
    cases = [("conv2d_few_outputs", name, {"epilogue": ["bias", "leaky_relu"], **shape})
             for name, (shape, _) in few_outputs.CASES.items()]  # fmt: skip
    for name, (shape, _) in halo_stores.CASES.items():
        larger = {**halo_stores.SHAPE, "h": 19, "w": 37, **shape, "epilogue": ["bias", *shape["epilogue"]]}
        cases.append(("conv2d_halo", name, larger))
    for name, form in stores.FORMS.items():
        if name != "NCHW to NHWC":
            larger = {**stores.SHAPE, "h": 9, "w": 40, "c": 24, **form, "k": 288}
            cases += [("conv2d_wgmma", name, larger), ("conv2d_mma", name, larger)]
    layers = [(template, f"{template}-{name}", conv2d(**params)) for template, name, params in cases]
    for first in (FIRST_LAYERS, AWKWARD_LAYERS):
        layers += [(name, f"{name}-{layer.label}", layer) for name, some in first.items() for layer in some]
    return [pytest.param(template, layer, number, id=id) for number, (template, id, layer) in enumerate(layers)]


def random_integers(template: str, rng: np.random.Generator) -> Workload:
    """A convolution of 8-bit integers with every kind of end. conv2d_mma takes blocks of channels, and every zero point."""

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    everything = template == "conv2d_mma"
    while True:
        groups, block = pick(1, 1, 1, 2, 8, 32), pick(0, 0, 1, 4, 12, 16, 32) if everything else 0
        multiples = (1, 2, 3, 5, 8, 16, 17) if everything else (1, 4, 8, 16, 64, 144)
        add = {"to": "uint8", "middle": pick("int8", "uint8"), "residual": pick("int8", "uint8"), "relu": True}
        ends: Any = pick(
            [],
            [{"requantise": {"to": pick("int8", "uint8")}}],
            [{"dequantise": {"to": pick("float16", "float32")}}],
            [{"requantise_add": add}],
        )
        before = ("bias", "relu", "clip") if "requantise_add" in str(ends) else ("bias", "residual", "relu", "clip")
        r, s = (int(size) for size in rng.integers(1, 6, 2))
        workload = conv2d(
            n=pick(1, 2, 5), h=int(rng.integers(5, 40)), w=int(rng.integers(5, 40)),
            c=groups * max(block, 1) * pick(*multiples), k=groups * max(block, 1) * pick(*multiples), r=r, s=s,
            stride=pick(1, 1, 2, (2, 1)), padding=tuple(int(p) for p in rng.integers(0, 4, 4)), dilation=pick(1, 1, 2),
            groups=groups, dtype=pick("int8", "uint8"), weight_dtype=pick("int8", "uint8"),
            zero_points=pick([], ["x"], ["x", "weight"]) if everything else pick([], ["x"]),
            layout={0: "NHWC", 1: "NCHW"}.get(block, f"NCHW{block}c"),
            epilogue=[*(stage for stage in before if rng.random() < 0.4), *ends],
        )  # fmt: skip
        if load_template(template).validate(workload, halo.H200) is None:
            return workload


INTEGER_SHAPES: dict[str, tuple[Callable[[np.random.Generator], Workload], int, int]] = {
    "conv2d_halo": (lambda rng: random_integers("conv2d_halo", rng), 32, 16),
    "conv2d_stem": (stem_integers.random_workload, 53, 24),
    "conv2d_mma": (lambda rng: random_integers("conv2d_mma", rng), 62, 40),
}


def numbered(shapes: dict[str, tuple[Any, int, int]]) -> list[tuple[str, int]]:
    return [(template, number) for template, (_, _, count) in shapes.items() for number in range(count)]


def check_on_gpu(
    check_of: Any, template_name: str, workload: Workload, rng: np.random.Generator, kinds: Any, **more: Any
) -> None:
    target, template = detect("cuda"), load_template(template_name)
    if reason := template.validate(workload, target):
        pytest.skip(reason)
    check_schedules(check_of(template, workload, target, **more), template, workload, target, rng, kinds)


@pytest.mark.gpu
@pytest.mark.many(each="template")
@pytest.mark.parametrize(("template", "number"), numbered(SHAPES))
def test_random_schedules_of_random_shapes_are_exact(some_of: Callable[..., Any], template: str, number: int) -> None:
    draw, seed, _ = SHAPES[template]
    rng = np.random.default_rng([seed, number])
    check_on_gpu(exactly, template, draw(rng), rng, some_of(KINDS, number), seed=number)


@pytest.mark.gpu
@pytest.mark.parametrize(("template", "workload", "number"), float_cases())
def test_layers_are_exact(some_of: Callable[..., Any], template: str, workload: Workload, number: int) -> None:
    check_on_gpu(exactly, template, workload, np.random.default_rng(0), some_of(KINDS, number))


@pytest.mark.gpu
@pytest.mark.many(each="template")
@pytest.mark.parametrize(("template", "number"), numbered(INTEGER_SHAPES))
def test_random_schedules_of_random_integers_are_exact(some_of: Callable[..., Any], template: str, number: int) -> None:
    """Launched twice: the second launch must not read what the first one has left."""
    draw, seed, _ = INTEGER_SHAPES[template]
    rng = np.random.default_rng([seed, number])
    check_on_gpu(integer_model.exactly, template, draw(rng), rng, some_of(KINDS, number), seed=number, launches=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("template", "number"), [(name, number) for name, layers in INTEGER_LAYERS.items() for number in range(len(layers))]
)
def test_layers_of_integers_are_exact(some_of: Callable[..., Any], template: str, number: int) -> None:
    workload, rng = conv2d(**INTEGER_LAYERS[template][number]), np.random.default_rng(1)
    check_on_gpu(integer_model.exactly, template, workload, rng, some_of(KINDS, number), seed=number, launches=2)


@pytest.mark.gpu
@pytest.mark.many
@pytest.mark.parametrize("seed", range(40))
def test_random_convolutions_on_cuda_cores_are_exact(some_of: Callable[..., Any], seed: int) -> None:
    workload, small = simt.draw(seed)
    workload = workload.replace(h=workload.h + 5 * (seed % 7), w=workload.w + 3 * (seed % 5))
    rng, kinds = np.random.default_rng(seed), some_of(KINDS, seed)
    check_on_gpu(integer_model.exactly, "conv2d_simt", workload, rng, kinds, truth_of=simt.expected)
    target, template = detect("cuda"), load_template("conv2d_simt")
    if not template.space(workload, target).check(small):
        integer_model.exactly(template, workload, target, truth_of=simt.expected)(small)
