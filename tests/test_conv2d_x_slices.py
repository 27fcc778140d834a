"""conv2d of a slice of a larger array: half of an array needs no copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv2d_numpy import numpy_conv2d
from conv2d_support import integer_arguments
from mma_emulated import emulate

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import WorkloadError
from schedsearch.runtime import Kernel, Provenance
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_template, load_templates
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

H200, CPU = PRESETS["h200"], detect("cpu")
SHAPE: dict[str, Any] = {"n": 2, "h": 4, "w": 5, "c": 6, "k": 12, "r": 3, "s": 2, "padding": (1, 0, 1, 1)}
FORMS: dict[str, dict[str, Any]] = {
    "the last channels": {"x_slice": (16, 10)},
    "channels in the middle, of an odd array": {"x_slice": (11, 3), "epilogue": ["bias"]},
    "pixels": {"x_slice": (12, 0), "r": 1, "s": 1, "padding": 0, "epilogue": ["bias"]},
    "NCHW": {"layout": "NCHW", "x_slice": (9, 2)},
    "groups, into a slice": {"groups": 3, "x_slice": (14, 4), "slice_of": 20},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def right_of(workload: Workload, arrays: dict[str, Any]) -> Any:
    """NumPy's convolution of a copy of the slice."""
    _, first = workload.x_slice
    channels = slice(first, first + workload.c)
    x = arrays["x"][..., channels] if workload.layout == "NHWC" else arrays["x"][:, channels]
    return numpy_conv2d(workload.replace(x_slice=()), {**arrays, "x": np.ascontiguousarray(x)})


# --- The operator -------------------------------------------------------------------------------------------------------
def test_kernels_take_the_larger_array_and_work_counts_the_slice() -> None:
    own, part = Workload.conv2d(**SHAPE), Workload.conv2d(**SHAPE, x_slice=(600, 3))
    assert part.signature[0].shape == (2, 4, 5, 600) and part.work == own.work and part.output == own.output
    assert part.label == f"{own.label} x in 600 from 3 on"
    assert Workload.conv2d(**SHAPE, x_slice=(6, 0)) == own, "all channels of an array are that array"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_slice": (8, 3)}, "x_slice is [8, 3] and x has 6 channels"),
        ({"x_slice": (8,)}, "allowed: [channels of the array, first channel of x]"),
        ({"c": 8, "k": 8, "layout": "NCHW4c", "x_slice": (16, 8)}, "in NCHW4c; allowed: in NHWC and NCHW"),
        ({"dtype": "int8", "zero_points": ["x"], "x_slice": (16, 8)}, "zero points"),
    ],
)
def test_an_impossible_slice_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.conv2d(**{**SHAPE, **change})
    assert words in str(caught.value)


def test_templates_take_slices_or_say_why_not() -> None:
    def refusals(**params: Any) -> dict[str, str | None]:
        workload = Workload.conv2d(**{"n": 2, "h": 9, "w": 8, "k": 64, "r": 1, "s": 1, **params})
        gpu = [each for each in load_templates().values() if "conv2d" in each.ops and each.kind == "cuda"]
        return {each.name: each.validate(workload, H200) for each in gpu}

    last = refusals(c=64, x_slice=(192, 128))
    assert {name for name, reason in last.items() if reason is None} == {"conv2d_wgmma", "conv2d_mma"}
    assert "array of 192 channels" in str(last["conv2d_stem"]) and "array of 192 channels" in str(last["conv2d_packed"])
    assert "channels 64 to 127 of 192" in str(refusals(c=64, x_slice=(192, 64))["conv2d_wgmma"])
    assert "x_slice is [132, 68]; allowed: multiples of 8" in str(refusals(c=64, x_slice=(132, 68))["conv2d_wgmma"])
    few = refusals(c=12, k=8, r=3, s=3, x_slice=(14, 2))
    assert {name for name, reason in few.items() if reason is None} == {"conv2d_mma"}


# --- Kernels ------------------------------------------------------------------------------------------------------------
@every_form
def test_conv2d_mma_reads_a_slice(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form, "slice_of": 12})
    rng = np.random.default_rng(1)
    arrays = {each.name: rng.integers(-2, 3, each.shape).astype(np.float16) for each in workload.signature}
    config: dict[str, Any] = {
        "bm": 32, "bn": 32, "bk": 16, "wm": 16, "wn": 16, "slices": 1, "stages": 2, "band": 1,
        "persistent": False, "blocks_per_sm": 1, "batch": "folded", "merged": 1,
    }  # fmt: skip
    y = np.full(workload.output.shape, 99, np.float16)
    emulate(monkeypatch, workload, config, arrays, memory_of_y=y)
    np.testing.assert_array_equal(y, right_of(workload, arrays).astype(np.float16))


@every_form
@pytest.mark.mostly_long(5)
def test_conv2d_cpu_reads_a_slice_as_the_reference_does(form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form}, dtype="float32").replace(slice_of=12)
    template, device = load_template("conv2d_cpu"), open_device(CPU)
    try:
        space = template.space(workload, CPU)
        for x_layout in next(knob.values for knob in space.knobs if knob.name == "x_layout"):
            config = schedsearch.Config({**template.default(workload, CPU, space), "x_layout": x_layout})
            loaded = device.load(compile_source(template.kernel(workload, CPU, config), CPU).artifact)
            assert verify_once(device, workload, loaded) is None
            kernel = Kernel(workload, loaded, ("cpu", 0), Provenance("exact", template.name, schedsearch.Config()), True)
            arrays = {name: array.astype(np.float32) for name, array in integer_arguments(workload).items()}
            np.testing.assert_array_equal(kernel(**arrays), right_of(workload, arrays).astype(np.float32))
    finally:
        device.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("template", "shape"),
    [
        ("conv2d_mma", {"c": 58, "k": 58, "x_slice": (116, 58), "epilogue": ["bias", "relu"]}),
        ("conv2d_wgmma", {"c": 232, "k": 232, "x_slice": (464, 232)}),
        ("conv2d_wgmma", {"c": 40, "k": 75, "x_slice": (64, 24)}),
    ],
)
def test_on_a_gpu_a_slice_is_read_where_it_is(template: str, shape: dict[str, Any]) -> None:
    target: Target = detect("cuda")
    workload, chosen = Workload.conv2d(**{"n": 2, "h": 9, "w": 11, "r": 1, "s": 1, **shape}), load_template(template)
    if reason := chosen.validate(workload, target):
        pytest.skip(reason)
    config = chosen.default(workload, target, chosen.space(workload, target))
    on_gpu = open_device(target)
    try:
        loaded = on_gpu.load(compile_source(chosen.kernel(workload, target, config), target).artifact)
        assert verify_once(on_gpu, workload, loaded) is None
    finally:
        on_gpu.close()
