"""A stage that no release has: adding one takes two entries, and templates refuse stages that they do not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import convolve, integers, numpy_conv2d
from conv2d_support import integer_arguments, run_on_cpu

from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.launch import Pointer, Scalar
from schedsearch.ops import ArgSpec, Operand, Parameter, ScalarSpec, StageKind, stages
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template, load_templates
from schedsearch.templates.conv2d import mma, mma_kernel, mma_store
from schedsearch.templates.parts import addressing
from schedsearch.templates.parts import mma as mma_part
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.stages import STAGE_CODES, StageCode
from schedsearch.testing.emulator import Emulator, Memory
from schedsearch.workload import Workload

H200, HOST = PRESETS["h200"], detect("cpu")

# y = (y + gain[k]) * lift + offset + 2 * second[y]: operands per channel and like y, a call-time scalar, a parameter.
BLEND = StageKind(
    "blend",
    "adds gain, multiplies by lift, adds offset and twice an array like the output",
    lambda value, operands, scalars, params: (
        (value + operands["gain"]) * scalars["lift"] + params["offset"] + 2 * operands["second"]
    ),
    operands=(Operand("gain", "K", role="addend", constant=True), Operand("second", "y", "output", role="addend")),
    scalars=(ScalarSpec("lift", 1.0),),
    parameters={"offset": Parameter("what is added", {"type": "number", "default": 0.5})},
)


def _blend(value: Any, operands: Any) -> Any:
    gain, second, lift, offset = operands
    return (value + gain) * lift + offset + (second + second)


BLEND_CODE = StageCode(
    "add.f32 {value}, {value}, {gain}; fma.rn.f32 {value}, {value}, {lift}, {offset}; "
    "add.f32 {temporary0}, {second}, {second}; add.f32 {value}, {value}, {temporary0};",
    _blend,
    temporaries=1,
)


def halves_height(spec: ArgSpec, params: Any) -> ArgSpec:
    return replace(spec, shape=tuple(size // 2 if axis == "H" else size for axis, size in zip(spec.axes, spec.shape)))


HALVE = StageKind("halve", "drops every other row", lambda value, *_: value, output=halves_height)
NARROW = StageKind("narrow", "makes bytes", lambda value, *_: value, output=lambda spec, _: replace(spec, dtype="int8"))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages above exist during a test. Only `blend` has code."""
    kinds = {kind.name: kind for kind in (BLEND, HALVE, NARROW)}
    monkeypatch.setattr(stages, "STAGES", {**stages.STAGES, **kinds})


@pytest.fixture
def with_code(made_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGE_CODES, "blend", BLEND_CODE)


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(HOST)
    yield device
    device.close()


def target_of(template: Template) -> Target:
    if template.name == "conv2d_tcgen05":
        return PRESETS["b200"]
    return H200 if template.kind == "cuda" else HOST


def taken_by(template: Template, *epilogue: Any) -> Workload:
    """A workload that `template` supports if nothing is wrong with the epilogue."""
    sizes: dict[str, Any] = dict(n=2, h=9, w=8, c=16, k=16, r=3, s=3, padding=1, dtype="float16", epilogue=epilogue)
    if template.kind == "cpu" or template.name in ("conv2d_simt", "conv2d_tf32x3"):
        sizes |= dict(dtype="float32")
    if template.name == "conv2d_cpu_int8":
        sizes |= dict(dtype="int8", epilogue=["dequantise", *epilogue])
    if template.name in ("conv2d_stem", "conv2d_packed"):
        sizes |= dict(c=3)
    if template.name == "conv2d_reordered":
        sizes |= dict(layout="NCHW", output_layout="NHWC")
    return Workload.conv2d(**sizes)


def default(template: Template, workload: Workload, target: Target) -> Config:
    return template.default(workload, target, template.space(workload, target))


TEMPLATES = [template for template in load_templates().values() if template.op == "conv2d"]


# --- Every template refuses an unknown stage before anything is built ---------------------------------------------------
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
@pytest.mark.usefixtures("made_up")
def test_every_template_refuses_a_stage_that_it_does_not_know(template: Template) -> None:
    assert template.validate(taken_by(template, "bias", "relu"), target_of(template)) is None
    reason = template.validate(taken_by(template, "bias", "blend"), target_of(template))
    assert reason is not None
    assert "'blend'" in reason and "allowed: bias, scale_shift, residual, relu, leaky_relu, clip" in reason


@pytest.mark.parametrize(
    ("stage", "becomes"), [("halve", r"float\d+ NHWC 2x4x8x16 of float\d+ NHWC 2x9x8x16"), ("narrow", "int8")]
)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
@pytest.mark.usefixtures("made_up")
def test_every_template_refuses_a_stage_that_changes_the_stored_output(
    monkeypatch: pytest.MonkeyPatch, template: Template, stage: str, becomes: str
) -> None:
    """This holds even if its arithmetic is known, because tiles are stored as they are accumulated."""
    monkeypatch.setitem(STAGE_CODES, stage, StageCode("", lambda value, operands: value))
    reason = template.validate(taken_by(template, "relu", stage), target_of(template))
    assert reason is not None
    with pytest.raises(AssertionError, match=rf"'{stage}' makes {becomes}.*allowed: stages that keep shape and dtype"):
        raise AssertionError(reason)


@pytest.mark.usefixtures("with_code")
def test_an_array_like_y_is_refused_where_the_kernel_stages_the_residual_alone() -> None:
    halo = load_templates(["conv2d_halo"])["conv2d_halo"]
    assert halo.validate(taken_by(halo, "residual"), H200) is None
    reason = halo.validate(taken_by(halo, "blend"), H200)
    assert reason == "the epilogue reads second, an array like the output; allowed: residual"


# --- One entry is enough to add a stage ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("with_code")
def test_operands_of_a_new_stage_follow_those_of_fixed_places() -> None:
    workload = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, epilogue=["bias", "blend"])
    epilogue = Epilogue(workload)
    assert epilogue.params[7:] == (Pointer("gain"), Pointer("second"), Scalar("lift"))
    assert [epilogue.index(name) for name in ("bias", "clip_max", "gain")] == [0, 6, 7]
    assert epilogue.alignments == {"bias": 4, "gain": 4, "second": 4}


@pytest.mark.long
@pytest.mark.parametrize("name", ["conv2d_mma", "conv2d_wgmma", "conv2d_stem"])
@pytest.mark.usefixtures("with_code")
def test_a_new_stage_compiles_in_the_templates_that_can_read_its_operands(name: str) -> None:
    template = load_templates([name])[name]
    workload = taken_by(template, {"blend": {"offset": -1.5}}, "relu")
    assert template.validate(workload, H200) is None
    source = template.kernel(workload, H200, default(template, workload, H200))
    text = _compile_to_ptx(source.steps[0], "kernel", "sm_90a")
    assert "0fBFC00000" in text  # -1.5
    assert text.index("0fBFC00000") < text.index("max.NaN.f32")  # the workload's order
    assert compile_source(source, H200).resources.local_bytes == 0


class EmulatedEpilogue(Epilogue):
    """Computes with the Python functions of stages, on operands that it reads at the kernel's addresses."""

    def __init__(self, workload: Workload, memory: Memory) -> None:
        super().__init__(workload)
        self.workload, self.memory = workload, memory
        self.single = self._apply
        self.pair = lambda v0, v1, valid, k, offset, *operands: (
            self._apply(v0, valid, k, offset, *operands),
            self._apply(v1, valid, k + 1, offset + 1, *operands),
        )

    def _apply(self, value: Any, valid: int, k: int, offset: int, *operands: Any) -> Any:
        assert valid
        for stage in self.workload.epilogue:
            given = [
                self.memory.at(operands[self.index(each.name)] + 2 * (k if each.axes == "K" else offset), 2)
                for each in stage.kind.operands
            ]
            values = [np.float32(array.view(np.float16)[0]) for array in given]
            values += [np.float32(operands[self.index(scalar.name)]) for scalar in stage.kind.scalars]
            value = STAGE_CODES[stage.name].function(value, (*values, *stage.params.values()))
        return value


@pytest.mark.parametrize("k", [16, 7], ids=["pairs", "single channels"])
@pytest.mark.usefixtures("with_code")
def test_a_new_stage_gets_its_operands_in_the_mma_template(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """NumPy does the arithmetic; channels, offsets, addresses and scalars are those that the kernel passes."""
    template = load_templates(["conv2d_mma"])["conv2d_mma"]
    epilogue = ["residual", {"blend": {"offset": -1.5}}, "clip", "bias"]
    workload = Workload.conv2d(n=1, h=4, w=5, c=8, k=k, r=1, s=1, epilogue=epilogue)
    memory = Memory()
    emulator = Emulator(memory, lambda value, *_: value, late_copies=False)
    emulator.stand_in(monkeypatch, mma_kernel, mma_store, addressing, mma_part)
    monkeypatch.setattr(mma, "Epilogue", lambda workload, further: EmulatedEpilogue(workload, memory))
    arrays = integers(workload, np.random.default_rng(0))
    buffers = {name: memory.add(array.astype(np.float16)) for name, array in arrays.items()}
    y = np.full(workload.output.shape, np.nan, np.float16)
    small = Config(bm=16, bn=16, bk=16, wm=16, wn=16, slices=1, stages=2, band=1, persistent=False, blocks_per_sm=1)
    (step,) = template.kernel(workload, H200, small).steps
    scalars = {"lift": 3.0, "clip_min": -20.0, "clip_max": 50.0}
    emulator.run(step, {**buffers, "y": memory.add(y)}, 2, scalars=scalars)

    total = convolve(workload, arrays["x"], arrays["weight"]) + arrays["residual"]
    blended = (total + arrays["gain"]) * 3.0 - 1.5 + 2 * arrays["second"]
    np.testing.assert_array_equal(y, np.clip(blended, -20.0, 50.0) + arrays["bias"])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.usefixtures("with_code")
@pytest.mark.mostly_long(2)
def test_a_new_stage_runs_in_the_cpu_template(device: CpuDevice, layout: str) -> None:
    template = load_templates(["conv2d_cpu"])["conv2d_cpu"]
    epilogue = ["bias", {"blend": {"offset": -1.5}}, "relu"]
    workload = Workload.conv2d(
        n=2, h=5, w=6, c=4, k=9, r=3, s=3, padding=1, dtype="float32", layout=layout, epilogue=epilogue
    )
    arrays = integer_arguments(workload)
    source = template.kernel(workload, HOST, default(template, workload, HOST))
    y = run_on_cpu(device, source, arrays, {"y": (workload.output.shape, np.float32)}, {"lift": 3.0})["y"]

    per_channel = (slice(None),) if layout == "NHWC" else (slice(None), None, None)
    total = numpy_conv2d(workload, arrays, epilogue=False)
    blended = (total + arrays["bias"][per_channel] + arrays["gain"][per_channel]) * 3.0 - 1.5
    np.testing.assert_array_equal(y, np.maximum(blended + 2 * arrays["second"], 0))
