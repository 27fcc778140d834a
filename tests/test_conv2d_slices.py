"""conv2d into a slice of a larger array: a concatenation that costs nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faulty_templates as faulty
import numpy as np
import pytest
from conv2d_numpy import exactly, numpy_conv2d
from conv2d_support import integer_arguments
from mma_emulated import emulate
from simt_emulator import SimtEmulator

import schedsearch
import schedsearch.templates.conv2d.simt as simt_module
from schedsearch.backend import compile_source
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import ArgumentError
from schedsearch.ops import ArgSpec
from schedsearch.runtime import Kernel, Provenance
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_template, load_templates
from schedsearch.templates.conv2d import placement, simt_kernel, simt_loads, weight_rows
from schedsearch.templates.parts import addressing, walk
from schedsearch.testing.emulator import Memory
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

H200, CPU = PRESETS["h200"], detect("cpu")
SHAPE: dict[str, Any] = {"n": 2, "h": 4, "w": 5, "c": 8, "k": 12, "r": 3, "s": 2, "padding": (1, 0, 1, 1)}
FORMS: dict[str, dict[str, Any]] = {
    "NHWC": {"slice_of": 40},
    "an odd array": {"slice_of": 17, "epilogue": ["bias"]},
    "NCHW": {"layout": "NCHW", "slice_of": 15, "epilogue": ["bias"]},
    "NHWC to NCHW": {"output_layout": "NCHW", "slice_of": 15},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def slice_of(larger: np.ndarray, workload: Workload, first: int) -> Any:
    """The slice of a larger array that begins at channel `first`."""
    channels = slice(first, first + workload.k)
    return larger[..., channels] if workload.output_layout == "NHWC" else larger[:, channels]


# --- The operator and its arrays ---------------------------------------------------------------------------------------
def test_a_slice_has_the_strides_of_the_larger_array() -> None:
    y = Workload.conv2d(**SHAPE, dtype="float32", slice_of=40).output
    assert (y.shape, y.slice_of, y.strides("NHWC")) == ((2, 4, 5, 12), (2, 4, 5, 40), (800, 200, 40, 1))
    assert (y.nbytes, y.span_bytes, y.runs) == (4 * 480, 4 * (39 * 40 + 12), (12, 40))
    assert [y.place(flat) for flat in (0, 11, 12, 479)] == [0, 11, 40, 39 * 40 + 11]
    whole = Workload.conv2d(**SHAPE, slice_of=12)
    assert (
        whole == Workload.conv2d(**SHAPE) and whole.output.slice_of == () and whole.output.span_bytes == whole.output.nbytes
    )
    y = Workload.conv2d(**SHAPE, layout="NCHW", slice_of=15).output
    assert (y.strides("NCHW"), y.runs) == ((300, 20, 5, 1), (240, 300))
    with pytest.raises(ValueError, match="not a slice of"):
        ArgSpec("y", "NC", (2, 3), "float32", slice_of=(3, 4))


def test_work_does_not_count_the_rest_of_the_larger_array() -> None:
    own, part = Workload.conv2d(**SHAPE), Workload.conv2d(**SHAPE, slice_of=1000)
    assert part.work == own.work and part.label == f"{own.label} into 1000"


# --- Kernels ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def device() -> Any:
    opened = open_device(CPU)
    yield opened
    opened.close()


@every_form
def test_conv2d_mma_stores_into_a_slice(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form})
    rng = np.random.default_rng(1)
    arrays = {each.name: rng.integers(-2, 3, each.shape).astype(np.float16) for each in workload.signature}
    config: dict[str, Any] = {
        "bm": 32, "bn": 32, "bk": 16, "wm": 16, "wn": 16, "slices": 1, "stages": 2, "band": 1,
        "persistent": False, "blocks_per_sm": 1,
        "batch": "folded", "merged": 1,
    }  # fmt: skip
    larger = np.full(workload.output.slice_of, 99, np.float16)
    y = slice_of(larger, workload, 0)
    emulate(monkeypatch, workload, config, arrays, memory_of_y=larger)
    np.testing.assert_array_equal(y, numpy_conv2d(workload, arrays).astype(np.float16))
    assert (larger != 99).sum() == y.size, "nothing around the slice is written"


@every_form
@pytest.mark.mostly_long(6)
def test_conv2d_simt_stores_into_a_slice(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    workload = Workload.conv2d(**{**SHAPE, **form}, dtype="float32")
    emulator = SimtEmulator(Memory(), lambda value, *_: value, True)
    emulator.stand_in(monkeypatch, simt_kernel, simt_loads, weight_rows, addressing, placement, walk)
    arrays = {name: array.astype(np.float32) for name, array in integer_arguments(workload).items()}
    bias = arrays.get("bias", np.zeros(workload.k))
    stages = SimpleNamespace(
        params=(),
        alignments={},
        pair=lambda a, b, valid, k, *_: (a + bias[k], b + bias[k + 1]),
        single=lambda value, valid, k, *_: value + bias[k],
    )
    monkeypatch.setattr(simt_module, "Epilogue", lambda *_, **__: stages)
    template, larger = simt_module.Conv2dSimt(), np.full(workload.output.slice_of, np.nan, np.float32)
    y = slice_of(larger, workload, 0)
    source = template.kernel(workload, H200, template.space(workload, H200).sample(1, np.random.default_rng(3))[0])
    buffers = {name: emulator.memory.add(array) for name, array in {**arrays, "y": larger}.items()}
    buffers |= {name: emulator.memory.add(np.full(size, 0x77, np.uint8)) for name, size in source.workspaces.items()}
    for step in source.steps:
        emulator.run(step, buffers, sms=2)
    np.testing.assert_array_equal(y, numpy_conv2d(workload, arrays).astype(np.float32))
    assert np.isfinite(larger).sum() == y.size, "nothing around the slice is written"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.mostly_long(2)
def test_several_results_are_concatenated_without_a_copy(device: Any, layout: str) -> None:
    """The same kernel fills both halves of a larger array; the result is that of NumPy."""
    workload = Workload.conv2d(**SHAPE, dtype="float32", layout=layout, slice_of=24, epilogue=["bias", "relu"])
    template = load_template("conv2d_cpu")
    artifact = compile_source(
        template.kernel(workload, CPU, template.default(workload, CPU, template.space(workload, CPU))), CPU
    ).artifact
    loaded = device.load(artifact)
    assert verify_once(device, workload, loaded) is None
    kernel = Kernel(workload, loaded, ("cpu", 0), Provenance("exact", template.name, schedsearch.Config()), True)
    arrays = integer_arguments(workload)
    larger = np.full(workload.output.slice_of, np.nan, np.float32)
    right = numpy_conv2d(workload, arrays)
    for first in (0, 12):
        part = slice_of(larger, workload, first)
        assert kernel(*arrays.values(), out=part) is part
        np.testing.assert_array_equal(part, right)
        assert np.isfinite(larger).sum() == part.size * (1 + first // 12)
    fresh = kernel(*arrays.values())
    assert fresh.strides == part.strides
    np.testing.assert_array_equal(fresh, right)
    with pytest.raises(ArgumentError, match=r"strides.*give a slice of an array of shape"):
        kernel(*arrays.values(), out=np.empty(workload.output.shape, np.float32))


class WritesAround(faulty.PointwiseCpu):
    """Right in the slice, but it also writes the element behind each pixel's channels."""

    def _function(self, workload: Workload, config: Any) -> Any:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        m, c, k = faulty.shape_of(workload)
        pitch = workload.slice_of

        def writes_around(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            x, w = as_array(x_at, (m, c), types.float32), as_array(w_at, (k, c), types.float32)
            y = as_array(y_at, (m, pitch), types.float32)
            for i in range(start, stop):
                for j in range(k):
                    total = types.float32(0.0)
                    for t in range(c):
                        total += x[i, t] * w[j, t]
                    y[i, j] = total
                if i + 1 < m:
                    y[i, k] = types.float32(0.0)

        return writes_around


def test_a_kernel_that_writes_around_its_slice_is_refused(device: Any) -> None:
    workload = Workload.conv2d(n=1, h=3, w=4, c=8, k=6, r=1, s=1, dtype="float32", slice_of=10)

    def problem(template: Any) -> Any:
        source = template.kernel(workload, CPU, template.default(workload, CPU, template.space(workload, CPU)))
        return verify_once(device, workload, device.load(compile_source(source, CPU).artifact))

    assert "array of which y is a slice changed, the first 24 bytes after y begins" in problem(WritesAround())
    assert "elements were never written" in problem(faulty.PointwiseCpu()), "it writes the slice as an array of its own"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.mostly_long(2)
def test_the_check_of_exact_results_reads_a_slice_where_it_is(layout: str) -> None:
    """`exactly` is the check of the tests on a GPU. Here a CPU stands in for it."""
    workload, template = Workload.conv2d(**SHAPE, dtype="float32", layout=layout, slice_of=17), load_template("conv2d_cpu")
    exactly(template, workload, CPU)(template.default(workload, CPU, template.space(workload, CPU)))


@pytest.mark.parametrize("template", [WritesAround(), faulty.PointwiseCpu()], ids=["one behind", "as an array of its own"])
def test_the_check_of_exact_results_sees_what_is_written_around_a_slice(template: Any) -> None:
    workload = Workload.conv2d(n=1, h=3, w=4, c=8, k=6, r=1, s=1, dtype="float32", slice_of=10)
    with pytest.raises(AssertionError, match="elements around y are written"):
        exactly(template, workload, CPU)(template.default(workload, CPU, template.space(workload, CPU)))


# --- Who takes what -----------------------------------------------------------------------------------------------------
def refusals(workload: Workload) -> dict[str, str | None]:
    return {name: each.validate(workload, H200) for name, each in load_templates().items() if each.op == "conv2d"}


def test_templates_take_slices_or_say_why_not() -> None:
    large = {"n": 2, "h": 9, "w": 8, "c": 64, "k": 64, "r": 3, "s": 3}
    found = refusals(Workload.conv2d(**large, slice_of=192))
    assert {name for name, reason in found.items() if reason is None} == {"conv2d_wgmma", "conv2d_halo", "conv2d_mma"}
    assert "slice_of is 68; allowed: multiples of 8" in str(refusals(Workload.conv2d(**large, slice_of=68))["conv2d_halo"])
    assert refusals(Workload.conv2d(**large, slice_of=68))["conv2d_wgmma"] is None
    assert "slice of 192 channels" in str(refusals(Workload.conv2d(**large, slice_of=192, layout="NCHW"))["conv2d_packed"])
    residual = refusals(Workload.conv2d(**large, slice_of=192, epilogue=["residual"]))
    assert residual["conv2d_wgmma"] is None and "y is a slice" in str(residual["conv2d_mma"])
    few = refusals(Workload.conv2d(n=1, h=9, w=8, c=64, k=8, r=3, s=3, slice_of=16))
    assert "an array of its own" in str(few["conv2d_few_outputs"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("template", "shape"),
    [
        ("conv2d_wgmma", {"c": 64, "k": 72, "slice_of": 136, "epilogue": ["bias", "residual"]}),
        ("conv2d_wgmma", {"c": 64, "k": 72, "slice_of": 136, "out_dtype": "float32"}),
        ("conv2d_halo", {"c": 64, "k": 72, "slice_of": 136, "epilogue": ["bias", "relu"]}),
        ("conv2d_stem", {"w": 24, "c": 3, "k": 32, "slice_of": 64}),
        ("conv2d_stem", {"c": 3, "k": 32, "slice_of": 64}),  # rows that are copied first
        ("conv2d_tf32x3", {"c": 16, "k": 40, "dtype": "float32", "slice_of": 52}),
        ("conv2d_mma", {"c": 24, "k": 20, "slice_of": 33, "layout": "NCHW"}),
        ("conv2d_simt", {"c": 24, "k": 20, "slice_of": 44, "dtype": "float32"}),
    ],
)  # fmt: skip
def test_on_a_gpu_nothing_around_the_slice_is_written(template: str, shape: dict[str, Any]) -> None:
    target: Target = detect("cuda")
    workload, chosen = (
        Workload.conv2d(**{"n": 2, "h": 9, "w": 11, "r": 3, "s": 3, "padding": 1, **shape}),
        load_template(template),
    )
    if reason := chosen.validate(workload, target):
        pytest.skip(reason)
    config = chosen.default(workload, target, chosen.space(workload, target))
    on_gpu = open_device(target)
    try:
        loaded = on_gpu.load(compile_source(chosen.kernel(workload, target, config), target).artifact)
        assert verify_once(on_gpu, workload, loaded) is None
    finally:
        on_gpu.close()
