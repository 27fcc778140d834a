"""conv2d's output in its final form: through depth_to_space, and in another layout than the input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from conv2d_numpy import depth_to_space, numpy_conv2d
from conv2d_support import integer_arguments, run_on_cpu
from mma_emulated import emulate
from onnx.reference import ReferenceEvaluator
from simt_emulator import SimtEmulator

import schedsearch.templates.conv2d.simt as simt_module
from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import WorkloadError
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.target import PRESETS
from schedsearch.template import Template, load_reference, load_templates
from schedsearch.templates.conv2d import placement, simt_kernel, simt_loads, weight_rows
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.parts import addressing, walk
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200, A100 = PRESETS["h200"], PRESETS["a100"]
Array = np.ndarray[Any, Any]
SHAPE: dict[str, Any] = {"n": 2, "h": 4, "w": 5, "c": 8, "k": 24, "r": 3, "s": 2, "padding": (1, 0, 1, 1)}


def shuffle(block: int = 2, mode: str = "DCR") -> dict[str, Any]:
    return {"depth_to_space": {"block": block, "mode": mode}}


FORMS: dict[str, dict[str, Any]] = {
    "DCR": {"epilogue": [shuffle()]},
    "CRD": {"epilogue": ["bias", shuffle(mode="CRD")]},
    "DCR, NCHW": {"layout": "NCHW", "epilogue": [shuffle()]},
    "CRD, NCHW": {"layout": "NCHW", "epilogue": [shuffle(mode="CRD")]},
    "CRD, NHWC to NCHW": {"output_layout": "NCHW", "epilogue": ["bias", shuffle(mode="CRD")]},
    "DCR, blocks of 3 x 3": {"k": 36, "epilogue": [shuffle(3)]},
    "NHWC to NCHW": {"output_layout": "NCHW", "epilogue": ["bias"]},
    "NCHW to NHWC": {"layout": "NCHW", "output_layout": "NHWC", "epilogue": ["bias"]},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


# --- The operator -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_depth_to_space_is_that_of_onnx(mode: str, block: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 4 * block**2, 3, 5)).astype(np.float32)
    info = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    node = onnx.helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=block, mode=mode)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", info[:1], info[1:]))
    (right,) = ReferenceEvaluator(model).run(None, {"x": x})
    n, k, p, q = (index.ravel() for index in np.indices(x.shape))
    shuffled = PixelShuffle(x.shape[1], block, mode)
    channel, row, column = shuffled.element(k, p, q)
    np.testing.assert_array_equal(right[n, channel, row, column], x[n, k, p, q])
    np.testing.assert_array_equal(shuffled.source(channel, row, column), (k, p, q))
    np.testing.assert_array_equal(depth_to_space(x, "NCHW", block=block, mode=mode), right)


def test_the_output_has_the_shape_and_layout_that_were_asked_for() -> None:
    assert Workload.conv2d(**SHAPE, **FORMS["CRD, NHWC to NCHW"]).output.shape == (2, 6, 8, 10)
    assert Workload.conv2d(**SHAPE, **FORMS["DCR"]).output.shape == (2, 8, 10, 6)
    assert Workload.conv2d(**SHAPE, output_layout="NCHW").output.shape == (2, 24, 4, 5)
    workload = Workload.conv2d(**SHAPE, epilogue=["residual", shuffle()])
    assert workload.signature[2].shape == (2, 4, 5, 24), "a residual is added before elements move"
    assert Workload.conv2d(**SHAPE, output_layout="NHWC") == Workload.conv2d(**SHAPE)
    assert Workload.conv2d(**SHAPE, dtype="int8", epilogue=["requantise", shuffle()]).out_dtype == "int8"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epilogue": [shuffle(), "bias"]}, ["depth_to_space must be the last", "bias after it"]),
        ({"epilogue": [shuffle(5)]}, ["multiple of block * block = 25, got 24"]),
        ({"epilogue": ["depth_to_space"]}, ["block", "missing"]),
        ({"epilogue": [{"depth_to_space": {"block": 0}}]}, ["block of stage depth_to_space", "0"]),
        ({"epilogue": [{"depth_to_space": {"block": 2, "mode": "RCD"}}]}, ["mode", "'RCD'", "DCR, CRD"]),
        ({"layout": "NCHW8c", "epilogue": [shuffle()]}, ["NHWC or NCHW, got NCHW8c"]),
        ({"layout": "NCHW8c", "output_layout": "NHWC"}, ["output_layout", "'NHWC'", "NCHW8c"]),
        ({"output_layout": "NWHC"}, ["output_layout", "did you mean 'NHWC'"]),
    ],
    ids=str,
)
def test_an_impossible_form_is_refused_with_the_remedy(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.conv2d(**SHAPE, **change)
    assert [word for word in words if word not in str(caught.value)] == []


# --- References -------------------------------------------------------------------------------------------------------
@every_form
@pytest.mark.mostly_long(9)
def test_the_reference_has_every_form(form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form}, dtype="float32")
    arrays, reference, device = integer_arguments(workload), load_reference("conv2d"), CpuDevice(detect("cpu"))
    right = numpy_conv2d(workload, arrays)
    outputs = dict.fromkeys(("y", "magnitude_of_y"), (workload.output.shape, np.float64))
    try:
        found = run_on_cpu(device, reference.kernel(workload, device.target), arrays, outputs, {})
    finally:
        device.close()
    np.testing.assert_array_equal(found["y"], right)
    np.testing.assert_array_equal(reference.points(workload, arrays, {}, np.arange(right.size)), right.ravel())


def test_a_residual_is_read_where_it_lies_before_depth_to_space() -> None:
    workload = Workload.conv2d(**SHAPE, dtype="float32", epilogue=["residual", shuffle(mode="CRD")])
    arrays = integer_arguments(workload)
    right = numpy_conv2d(workload, arrays)
    found = load_reference("conv2d").points(workload, arrays, {}, np.arange(right.size))
    np.testing.assert_array_equal(found, right.ravel())


# --- Templates --------------------------------------------------------------------------------------------------------
@every_form
@pytest.mark.mostly_long(3)
def test_conv2d_mma_stores_every_form(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form})
    rng = np.random.default_rng(1)
    arrays = {each.name: rng.integers(-2, 3, each.shape).astype(np.float16) for each in workload.signature}
    config: dict[str, Any] = {
        "bm": 32, "bn": 32, "bk": 16, "wm": 16, "wn": 16, "slices": 1, "stages": 2, "band": 1,
        "persistent": False, "blocks_per_sm": 1,
        "batch": "folded", "merged": 1,
    }  # fmt: skip
    y = emulate(monkeypatch, workload, config, arrays)
    np.testing.assert_array_equal(y, numpy_conv2d(workload, arrays).astype(np.float16))


@every_form
@pytest.mark.mostly_long(9)
def test_conv2d_simt_stores_every_form(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form}, dtype="float32")
    emulator = SimtEmulator(Memory(), lambda value, *_: value, True)
    emulator.stand_in(monkeypatch, simt_kernel, simt_loads, weight_rows, addressing, placement, walk)
    arrays = {name: array.astype(np.float32) for name, array in integer_arguments(workload).items()}
    bias = arrays.get("bias", np.zeros(workload.k))

    def single(value: Any, valid: int, k: int, offset: int, *_: Any) -> Any:
        return value + bias[k]

    def pair(a: Any, b: Any, valid: int, k: int, offset: int, *_: Any) -> Any:
        return a + bias[k], b + bias[k + 1]

    stages = SimpleNamespace(params=(), alignments={}, pair=pair, single=single)
    monkeypatch.setattr(simt_module, "Epilogue", lambda *_, **__: stages)
    template, y = simt_module.Conv2dSimt(), np.full(workload.output.shape, np.nan, np.float32)
    space = template.space(workload, H200)
    source = template.kernel(workload, H200, space.sample(1, np.random.default_rng(3))[0])
    buffers = {name: emulator.memory.add(array) for name, array in {**arrays, "y": y}.items()}
    buffers |= {name: emulator.memory.add(np.full(size, 0x77, np.uint8)) for name, size in source.workspaces.items()}
    for step in source.steps:
        emulator.run(step, buffers, sms=2)
    np.testing.assert_array_equal(y, numpy_conv2d(workload, arrays).astype(np.float32))


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "target", "mode"), [(Conv2dWgmma(), H200, "DCR"), (Conv2dMma(), A100, "CRD")], ids=["wgmma", "mma"]
)
def test_the_kernels_compile_without_spills(template: Template, target: Any, mode: str) -> None:
    workload = Workload.conv2d(
        n=1, h=720, w=1280, c=64, k=128, r=3, s=3, padding=1, epilogue=["bias", "leaky_relu", shuffle(mode=mode)]
    )
    assert template.validate(workload, target) is None
    config = template.default(workload, target, template.space(workload, target))
    result = compile_source(template.kernel(workload, target, config), target)
    assert result.resources.spill_bytes == result.resources.local_bytes == 0


def refusals(workload: Workload) -> dict[str, str | None]:
    return {
        name: template.validate(workload, H200) for name, template in load_templates().items() if template.op == "conv2d"
    }


def test_every_form_has_a_template_on_every_gpu_and_others_say_why_not() -> None:
    for form in FORMS.values():
        workload = Workload.conv2d(**{**SHAPE, **form})
        assert Conv2dMma().validate(workload, A100) is None
        assert all(isinstance(reason, str | None) for reason in refusals(workload).values())
    refused = refusals(Workload.conv2d(n=1, h=9, w=10, c=64, k=64, r=3, s=3, epilogue=[shuffle()]))
    assert {name for name, reason in refused.items() if reason is None} == {"conv2d_wgmma", "conv2d_halo", "conv2d_mma"}
    assert "depth_to_space" in str(refused["conv2d_packed"])
    refused = refusals(Workload.conv2d(n=1, h=9, w=8, c=64, k=64, r=3, s=3, output_layout="NCHW"))
    assert refused["conv2d_halo"] == "output_layout is NCHW; allowed: NHWC, as that of x"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out_dtype": "float32", "epilogue": [shuffle()]}, "outputs of 2 bytes or 1"),
        ({"w": 37, "epilogue": [shuffle()]}, "rows of 37 output pixels before depth_to_space; allowed: multiples of 8"),
        ({"k": 24, "epilogue": [shuffle()]}, "k / block of depth_to_space is 12; allowed: multiples of 8"),
        ({"k": 48, "epilogue": [shuffle(mode="CRD")]}, "mode CRD is 12; allowed: multiples of 8"),
        ({"epilogue": ["residual", shuffle(mode="CRD")]}, "depth_to_space after residual"),
        ({"dtype": "int8", "epilogue": ["requantise", shuffle(mode="CRD")]}, "int8 in mode CRD; allowed: DCR"),
    ],
    ids=str,
)
def test_conv2d_wgmma_says_what_it_cannot_store(change: dict[str, Any], words: str) -> None:
    workload = Workload.conv2d(**{**SHAPE, "w": 8, "c": 16, "k": 64, **change})
    assert words in str(Conv2dWgmma().validate(workload, H200))


def test_conv2d_wgmma_takes_a_residual_and_integers_before_dcr() -> None:
    for change in ({"epilogue": ["residual", shuffle()]}, {"dtype": "int8", "epilogue": ["requantise", shuffle()]}):
        assert Conv2dWgmma().validate(Workload.conv2d(**{**SHAPE, "w": 8, "c": 16, "k": 64, **change}), H200) is None
