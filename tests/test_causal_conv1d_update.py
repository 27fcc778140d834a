"""causal_conv1d_update: the operator, its reference and templates, against lists of the last inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, default, verdict
from dynamic_support import emulated, on_device
from test_depthwise_conv1d import Array, assert_close, by_channels, example

from schedsearch import Workload, causal_conv1d_update
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE
from schedsearch.template import load_reference, load_template
from schedsearch.templates.depthwise_conv1d import parts, token, update
from schedsearch.templates.parts import vectors
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

UPDATE_CPU, UPDATE_CUDA = load_template("causal_conv1d_update_cpu"), load_template("causal_conv1d_update_cuda")
TOKEN_CUDA = load_template("causal_conv1d_token_cuda")
TOKEN: dict[str, Any] = {"n": 3, "c": 5, "t": 1, "taps": 4, "length": 5, "dtype": "float32"}


class TestUpdate(OpContract):
    op = CAUSAL_CONV1D_UPDATE
    examples = (
        TOKEN,
        TOKEN | {"rows": 7, "indices": True, "positions": True},
        TOKEN | {"t": 9, "epilogue": ["bias"], "layout": "NCT", "weight_dtype": "float16"},
    )
    wrong = (
        (TOKEN | {"length": 2}, "length"),
        (TOKEN | {"rows": 4}, "rows"),
        (TOKEN | {"rows": 2, "indices": True}, "rows"),
        (TOKEN | {"taps": 300}, "taps"),
        (TOKEN | {"epilogue": ["silu", "bias"]}, "epilogue"),
        (TOKEN | {"dtype": "int8"}, "dtype"),
    )


UPDATES: list[dict[str, Any]] = [
    TOKEN | dict(epilogue=["bias", "silu"], dtype="float16"),
    TOKEN | dict(t=3, indices=True, rows=4, dtype="bfloat16"),
    TOKEN | dict(t=2, positions=True, dtype="float16", weight_dtype="float32"),
    TOKEN | dict(t=6, positions=True, indices=True, rows=4, layout="NCT", epilogue=["silu"]),
    TOKEN | dict(taps=1, length=1),
]


def by_rows(workload: Workload, given: dict[str, Any]) -> dict[str, Array]:
    """One input after the other, from lists of the last ones."""
    p = workload.params
    x, state = by_channels(p, given["x"]).astype(np.float64), given["state_before"].astype(np.float64).copy()
    y = np.zeros((p.n, p.c, p.t))
    for n in range(p.n):
        row = int(given["indices"][n]) if p.indices else n
        if row < 0:
            continue
        position = int(given["positions"][n]) if p.positions else 0
        for c in range(p.c):
            last = list(np.roll(state[row, c], -position))
            for t in range(p.t):
                last.append(x[n, c, t])
                z = float(np.dot(last[-p.taps :], given["weight"][c])) + (float(given["bias"][c]) if p.bias else 0.0)
                y[n, c, t] = z / (1 + np.exp(-z)) if p.silu else z
            moved = np.array(last[-p.length :])
            state[row, c] = np.roll(moved, position + p.t) if p.positions else moved
    return {"y": by_channels(p, y), "state": state}


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: causal_conv1d_update(**case).label)
@pytest.mark.mostly_long(3)
def test_updates_are_the_definition(device: CpuDevice, case: dict[str, Any]) -> None:
    workload = causal_conv1d_update(**case)
    arrays = example(workload)
    if workload.params.indices:
        arrays["indices"] = np.array([2, -1, 0], np.int32)
    if workload.params.positions:
        arrays["positions"] = np.array([0, 7, 13], np.int32)
    right = by_rows(workload, arrays)
    points = load_reference(workload.op).points
    for name, array in right.items():
        found = points(workload, arrays, {}, np.arange(array.size), name).reshape(array.shape)
        np.testing.assert_allclose(found, array, rtol=1e-9, atol=1e-9, err_msg=name)
    assert_close(workload, on_device(device, UPDATE_CPU, workload, arrays), right)
    with pytest.MonkeyPatch.context() as patch:
        assert_close(workload, emulated(patch, UPDATE_CUDA, workload, arrays, None, update, parts, vectors), right)


TOKENS: list[dict[str, Any]] = [
    dict(n=3, c=24, t=1, taps=4, length=3, dtype="bfloat16", epilogue=["bias", "silu"]),  # as final states are
    dict(n=3, c=6, t=1, taps=4, length=4, dtype="float16", indices=True, rows=4),
    dict(n=2, c=4, t=1, taps=2, length=4, dtype="float32", weight_dtype="float16", epilogue=["bias"], layout="NCT"),
]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", TOKENS, ids=lambda case: causal_conv1d_update(**case).label)
def test_vectors_of_channels_take_a_token(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], rows: int) -> None:
    workload = causal_conv1d_update(**case)
    arrays, config = example(workload), default(TOKEN_CUDA, workload, H200)
    if workload.params.indices:
        arrays["indices"] = np.array([2, -1, 0], np.int32)
    config = Config(**{**dict(config), "rows": rows, "threads": 32})
    found = emulated(monkeypatch, TOKEN_CUDA, workload, arrays, config, token, update, parts, vectors)
    assert_close(workload, found, by_rows(workload, arrays))


def test_verification_accepts_updates(device: CpuDevice) -> None:
    for case in UPDATES[:4:2]:
        assert verdict(device, UPDATE_CPU, causal_conv1d_update(**case)) is None


class TestUpdateCpuContract(TemplateContract):
    template, target, compiled = UPDATE_CPU, detect("cpu"), 1
    accepted = (causal_conv1d_update(**UPDATES[0]),)


class TestUpdateCudaContract(TemplateContract):
    template, target, compiled = UPDATE_CUDA, H200, 1
    accepted = causal_conv1d_update(**UPDATES[1]), causal_conv1d_update(n=64, c=16384, t=1, taps=4, length=4)


class TestTokenContract(TemplateContract):
    template, target, compiled = TOKEN_CUDA, H200, 1
    accepted = causal_conv1d_update(**TOKENS[0]), causal_conv1d_update(n=64, c=16384, t=1, taps=4, length=4)
    refused = (
        (causal_conv1d_update(**TOKENS[1] | dict(t=2)), "steps"),
        (causal_conv1d_update(**TOKENS[1] | dict(positions=True)), "rings"),
        (causal_conv1d_update(**TOKENS[1] | dict(length=9)), "inputs"),
        (causal_conv1d_update(**TOKENS[0] | dict(c=5)), "whole accesses"),
    )


@pytest.mark.gpu
def test_updates_on_the_device(gpu: Any) -> None:
    for case in UPDATES:
        assert verdict(gpu, UPDATE_CUDA, causal_conv1d_update(**case | dict(c=300))) is None
    for case in TOKENS:
        assert verdict(gpu, TOKEN_CUDA, causal_conv1d_update(**case | dict(c=312))) is None
