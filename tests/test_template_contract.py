"""Every built-in template keeps the contract for third-party templates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import ConfigError
from schedsearch.launch import Grid, Pointer
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, load_template
from schedsearch.templates.conv2d.cpu import Conv2dCpu
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.workload import Workload

H200 = PRESETS["h200"]


def conv2d(n: int, h: int, w: int, c: int, k: int, r: int, **more: Any) -> Workload:
    return Workload("conv2d", {"n": n, "h": h, "w": w, "c": c, "k": k, "r": r, "s": r, **more})


class OwnTemplates(TemplateContract):
    """Other tests compile random configurations of these templates."""

    compiled = 1


class TestWgmma(OwnTemplates):
    template, target = load_template("conv2d_wgmma"), H200
    accepted = (
        conv2d(32, 56, 56, 64, 64, 3, padding=1, epilogue=("bias", "relu")),
        conv2d(1, 7, 7, 520, 72, 1, dtype="bfloat16", out_dtype="float32"),
    )
    refused = (
        (conv2d(1, 8, 8, 12, 16, 3), "c is 12"),
        (conv2d(1, 8, 8, 16, 16, 3, groups=2), "groups"),
        (conv2d(1, 8, 8, 16, 16, 3, dtype="float32"), "dtype"),
        (conv2d(1, 8, 8, 16, 16, 3, layout="NCHW"), "layout"),
    )


class TestHalo(OwnTemplates):
    template, target = load_template("conv2d_halo"), H200
    accepted = (
        conv2d(32, 28, 28, 128, 128, 3, padding=1, epilogue=("residual", "relu")),
        conv2d(8, 30, 30, 64, 64, 3, groups=32, stride=2),
    )
    refused = ((conv2d(1, 8, 8, 16, 16, 1), "1x1"), (conv2d(1, 80, 80, 16, 16, 3, stride=9), "stride"))


class TestStem(OwnTemplates):
    template, target = load_template("conv2d_stem"), H200
    accepted = (
        conv2d(8, 224, 224, 3, 64, 7, stride=2, padding=3, epilogue=("bias", "relu")),
        conv2d(2, 299, 299, 3, 32, 3, stride=2),
    )
    refused = ((conv2d(8, 56, 56, 64, 64, 3), "allowed"),)


class TestMma(OwnTemplates):
    template, target = load_template("conv2d_mma"), PRESETS["a100"]
    accepted = (
        conv2d(4, 17, 19, 36, 21, 3, padding=(0, 1, 2, 0), epilogue=("bias", "scale_shift", "leaky_relu")),
        conv2d(2, 28, 28, 96, 96, 3, groups=96, padding=1),
        conv2d(2, 9, 9, 24, 16, 3, groups=4, padding=1, dtype="int8", layout="NCHW2c", zero_points=["x", "weight"]),
    )
    refused = ((conv2d(1, 8, 8, 16, 16, 3, dtype="float8_e4m3"), "8.9"),)


class TestTcgen05(OwnTemplates):
    template, target = load_template("conv2d_tcgen05"), PRESETS["b200"]
    accepted = (
        conv2d(32, 28, 28, 128, 128, 3, padding=1, epilogue=("bias", "residual", "relu")),
        conv2d(2, 9, 9, 32, 21, 3, groups=1, stride=2, dtype="bfloat16", out_dtype="float32"),
        conv2d(2, 9, 9, 48, 24, 3, dtype="uint8", weight_dtype="int8", zero_points=["x", "weight"], epilogue=["requantise"]),
    )
    refused = (
        (conv2d(1, 8, 8, 12, 16, 3), "12 channels"),
        (conv2d(1, 8, 8, 16, 16, 3, dtype="float32"), "fp32"),
        (conv2d(1, 80, 80, 16, 16, 3, stride=9), "stride"),
    )


class TestSimt(OwnTemplates):
    template, target = load_template("conv2d_simt"), PRESETS["a100"]
    accepted = (
        conv2d(4, 17, 19, 36, 21, 3, dtype="float32", padding=(0, 1, 2, 0), epilogue=("bias", "scale_shift", "leaky_relu")),
        conv2d(2, 14, 14, 24, 40, 3, dtype="int8", layout="NCHW4c", zero_points=("x",), padding=1, epilogue=("requantise",)),
    )
    refused = ((conv2d(1, 8, 8, 16, 16, 3), "dtype"),)


class TestCpu(OwnTemplates):
    template, target = load_template("conv2d_cpu"), detect("cpu")
    accepted = (
        conv2d(1, 9, 11, 12, 20, 3, dtype="float32", padding=1, epilogue=("bias", "relu")),
        conv2d(2, 8, 8, 16, 16, 3, dtype="float32", layout="NCHW", groups=16),
    )
    refused = ((conv2d(1, 8, 8, 16, 16, 3, dtype="float16"), "dtype"),)


class Broken(Conv2dCpu):
    """Each mistake breaks one promise."""

    mistake = ""

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None if self.mistake == "takes all" else super().validate(workload, target)

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        space = super().space(workload, target)
        if self.mistake != "no doc":
            return space
        return ConfigSpace([Knob(knob.name, knob.values) for knob in space.knobs], space.constraints, space.derived)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        default = super().default(workload, target, space)
        return Config({**default, "block": 3}) if self.mistake == "illegal default" else default

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        source = super().kernel(workload, target, config)
        (*rest, last) = source.steps
        if self.mistake == "unknown buffer":
            last = dataclasses.replace(last, params=(Pointer("z"), *last.params[1:]))
        if self.mistake == "counts its calls":
            Broken.calls += 1
            last = dataclasses.replace(last, grid=Grid(Broken.calls))
        return dataclasses.replace(source, steps=(*rest, last))

    calls = 0


@pytest.mark.parametrize(
    ("mistake", "promise"),
    [
        ("takes all", "test_a_refusal_is_one_sentence_about_what_is_wrong"),
        ("no doc", "test_every_knob_is_documented"),
        ("illegal default", "test_the_default_is_legal"),
        ("unknown buffer", "test_a_kernel_names_what_the_workload_has"),
        ("counts its calls", "test_the_same_configuration_gives_the_same_launch"),
    ],
)
def test_a_broken_promise_is_noticed(mistake: str, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = TestCpu()
    monkeypatch.setattr(TestCpu, "template", Broken())
    getattr(contract, promise)()
    monkeypatch.setattr(Broken, "mistake", mistake)
    with pytest.raises((AssertionError, ConfigError)):
        getattr(contract, promise)()
